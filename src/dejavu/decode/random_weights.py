"""Random weights of a model's shape, made in the storage type at once: for latency, never for quality.

A model of which no weights are at hand decodes at the speed that its shape allows. Shape suffixes as in `weights`.
"""

from typing import Any

import numpy as np
import torch

from dejavu.decode.storage import Rows, in_large_pages, pack
from dejavu.decode.weights import Block, Norm, PackedPredictor, Projection, Weights, turns
from dejavu.models.anatomy import KINDS, Rotary, plain_frequencies
from dejavu.models.families import shape_of
from dejavu.models.shape import Shape


class RandomParts:
    """Draws the parts of a model of some shape in a storage type."""

    def __init__(self, sizes: Shape, storage: str, seed: int) -> None:
        self.sizes, self.storage, self.random = sizes, storage, np.random.default_rng(seed)

    def rows(self, count: int, columns: int) -> Rows:
        return random_rows(self.random, count, columns, self.storage)

    def linear(self, count: int, columns: int, *outputs: int) -> Projection:
        return Projection(self.rows(count, columns), self.random.standard_normal(outputs, dtype=np.float32) * 0.02)

    def norm(self) -> Norm:
        width = self.sizes.width
        return Norm(np.ones(width, np.float32), None if self.sizes.rms_norm else np.zeros(width, np.float32), 1e-5)

    def block(self) -> Block:
        sizes = self.sizes
        width, neurons, heads, groups = sizes.width, sizes.neurons, sizes.heads, sizes.kv_heads
        return Block(
            attention_norm=self.norm(),
            queries=self.linear(heads * sizes.head_dim, width, heads * sizes.head_dim),
            keys=self.linear(groups * sizes.head_dim, width, groups * sizes.head_dim),
            values=self.linear(groups * sizes.head_dim, width, groups * sizes.head_dim),
            output=self.linear(heads * sizes.head_dim, width, width),
            mlp_norm=self.norm(),
            first=self.linear(2 * neurons, width, neurons, 2) if sizes.gated else self.linear(neurons, width, neurons),
            second=self.linear(neurons, width, width),
        )

    def predictor(self, units: int, rank: int, together: int) -> PackedPredictor:
        width = self.sizes.width
        plain = Norm(np.ones(width, np.float32), np.zeros(width, np.float32), 1e-5)
        scored = units // together
        return PackedPredictor(plain, self.linear(rank, width, rank), self.linear(rank, scored, scored), True, together)


def random_weights(
    architecture: dict[str, Any], storage: str, ranks: tuple[int, int], seed: int = 0, head_unit: str = "head"
) -> Weights:
    """A config's shape with random weights and predictors, in the storage type.

    `ranks` of the predictors: in the first layer, in all others.
    """
    sizes = shape_of(architecture)
    parts = RandomParts(sizes, storage, seed)
    blocks = [parts.block() for _ in range(sizes.layers)]
    units = {"mlp": (sizes.neurons, 1), "heads": (sizes.heads, sizes.together(head_unit))}
    predictors = {
        (kind, layer): parts.predictor(units[kind][0], rank, units[kind][1])
        for kind in KINDS
        for layer, rank in enumerate([ranks[0], *[ranks[1]] * (sizes.layers - 1)])
    }
    learned, rotary = None, None
    if sizes.rotary_base is None:
        learned = parts.random.standard_normal((sizes.context, sizes.width), dtype=np.float32) * 0.02
    else:
        rotary = Rotary(plain_frequencies(sizes.rotary_base, sizes.head_dim))
    embedding = parts.rows(sizes.vocabulary, sizes.width)
    return Weights(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        context=sizes.context,
        storage=storage,
        embedding=embedding,
        output=embedding if sizes.tied else parts.rows(sizes.vocabulary, sizes.width),
        positions=learned,
        turns=turns(rotary, sizes.context),
        final_norm=parts.norm(),
        blocks=blocks,
        predictors=predictors,
    )


def random_rows(random: np.random.Generator, count: int, columns: int, storage: str) -> Rows:
    """A random matrix of standard deviation 0.02: a block of values repeated, since drawing 7e9 would take minutes."""
    drawn = torch.from_numpy(random.standard_normal((min(count, 512), columns), dtype=np.float32) * 0.02)
    block = pack(drawn, storage)
    repeats = -(-count // len(block.data_RC))
    data = np.tile(block.data_RC, (repeats, 1))[:count]
    return Rows(in_large_pages(data), np.tile(block.scale_R, repeats)[:count].copy(), storage)

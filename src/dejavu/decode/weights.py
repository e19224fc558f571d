"""A model's weights as the engine reads them: every matrix as `Rows`, what one unit needs side by side.

Layers are repacked one by one and the originals freed, so that memory never holds the model twice. Shape suffixes:
D width, F neurons, K head_dim, E = heads * head_dim, G = key/value heads * head_dim, V vocabulary, R rank, P positions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dejavu.decode.storage import Rows, pack
from dejavu.errors import ConfigError
from dejavu.models.anatomy import Anatomy, Decoding, Rotary
from dejavu.models.families import anatomy
from dejavu.predictors.network import Predictor

Vector = np.ndarray
NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Norm:
    """LayerNorm's weight and bias, (D,) each; RMSNorm has no bias."""

    weight_D: Vector
    bias_D: Vector | None
    epsilon: float


@dataclass(frozen=True)
class Projection:
    """A matrix and its bias; a transposed one (W2, W_o) has as many rows as it has inputs.

    Of a gated MLP's first one, rows 2j and 2j + 1 are neuron j's, and the bias is (F, 2).
    """

    rows: Rows
    bias: Vector


def matrix(part: Projection) -> tuple[np.ndarray, ...]:
    """A projection as kernels take it: stored rows, their scales, bias."""
    return part.rows.data_RC, part.rows.scale_R, part.bias


def normed(norm: Norm | None) -> tuple[Any, ...]:
    """A norm as kernels take it; none has no weights."""
    return (NOTHING, NOTHING, 0.0) if norm is None else (norm.weight_D, norm.bias_D, norm.epsilon)


def normed_matrix(norm: Norm | None, part: Projection) -> tuple[Any, ...]:
    """A norm and the projection that reads it."""
    return (*normed(norm), *matrix(part))


@dataclass(frozen=True)
class Block:
    """One transformer block with its norms before each half."""

    attention_norm: Norm
    queries: Projection  # (E, D)
    keys: Projection  # (G, D)
    values: Projection  # (G, D)
    output: Projection  # W_o transposed, (E, D)
    mlp_norm: Norm
    first: Projection  # W1, (F, D); gated: gate and up, (2 F, D)
    second: Projection  # W2 transposed, (F, D)


@dataclass(frozen=True)
class PackedPredictor:
    """A predictor's norm (None: it has none) and its two matrices.

    What it chooses may be groups of heads `together`: its scores are then sums of theirs.
    """

    norm: Norm | None
    down: Projection  # (R, D)
    up: Projection  # transposed, (R, units)
    relu: bool
    together: int = 1


@dataclass
class Weights:
    """All that decoding reads."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int
    storage: str
    embedding: Rows  # (V, D), looked up on the way in
    output: Rows  # (V, D), multiplied on the way out: the same, or another
    positions: np.ndarray | None  # learned ones, (P, D), added to the embedding
    turns: np.ndarray  # of rotary ones the cosines and sines, (P, K); of others nothing, (0,)
    final_norm: Norm
    blocks: list[Block]
    predictors: dict[tuple[str, int], PackedPredictor]

    @property
    def width(self) -> int:
        return self.embedding.shape[1]

    @property
    def neurons(self) -> int:
        return self.blocks[0].second.rows.shape[0]

    def units(self, kind: str) -> int:
        """Units of a kind in one layer."""
        return self.neurons if kind == "mlp" else self.heads

    def together(self, kind: str, head_unit: str) -> int:
        """How many neighbouring units of a kind are chosen as one."""
        return self.heads // self.kv_heads if kind == "heads" and head_unit == "group" else 1


def repack(model: Any, storage: str, free: bool = True) -> Weights:
    """Weights of a loaded model; its own are freed layer by layer unless `free` is off.

    Raises ConfigError for a model that the kernels do not know.
    """
    parts = anatomy(model)
    besides = known(parts)
    embedding, head = pack(besides.embedding.weight, storage), model.get_output_embeddings()
    output = embedding if head.weight is besides.embedding.weight else pack(head.weight, storage)
    blocks = [
        Block(
            attention_norm=norm(attention.norm),
            queries=projection(attention.queries, storage, free),
            keys=projection(attention.keys, storage, free),
            values=projection(attention.values, storage, free),
            output=projection(block.attention_output, storage, free, transposed=True),
            mlp_norm=norm(block.mlp_norm),
            first=projection(block.mlp_input, storage, free)
            if block.mlp_up is None
            else side_by_side(block.mlp_input, block.mlp_up, storage, free),
            second=projection(block.mlp_output, storage, free, transposed=True),
        )
        for block, attention in zip(parts.blocks, besides.attention, strict=True)
    ]
    learned = besides.learned_positions
    return Weights(
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        head_dim=parts.head_dim,
        context=parts.context,
        storage=storage,
        embedding=embedding,
        output=output,
        positions=None if learned is None else copied(learned),
        turns=turns(besides.rotary, parts.context),
        final_norm=norm(besides.final_norm),
        blocks=blocks,
        predictors={},
    )


def known(parts: Anatomy) -> Decoding:
    """What the engine reads of a model besides its points. Raises ConfigError for one that the kernels do not know."""
    besides, has = parts.decoding, None
    if besides is None:
        has = "other parts"
    elif parts.post_norm or besides.embedding.embedding_dim != parts.width:
        has = "its norms after each half (post-norm)"
    elif besides.activation != ("silu" if parts.gated else "relu"):
        has = f"a {'gated' if parts.gated else 'plain'} MLP with {besides.activation}"
    elif besides.rotary is not None and not besides.rotary.fixed:
        has = "rotary positions that depend on the length of the text"
    if besides is None or has is not None:
        raise ConfigError(
            "backend=kernel decodes models with their norms before each half, plain MLPs with relu or gated ones with "
            f"silu, and positions that stay; this one has {has}: use backend=simulate"
        )
    return besides


def turns(rotary: Rotary | None, positions: int) -> np.ndarray:
    """Cosines and then sines of every position's angles, float32 (P, K); (0,) where positions are learned."""
    if rotary is None:
        return NOTHING
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rotary.frequencies.detach().float().cpu()
    table: np.ndarray = (torch.cat([angles.cos(), angles.sin()], 1) * rotary.scale).numpy()
    return table


def copied(values: torch.Tensor) -> np.ndarray:
    """As float32, in memory of its own."""
    return values.detach().float().cpu().numpy().copy()


def projection(linear: nn.Linear, storage: str, free: bool, transposed: bool = False) -> Projection:
    """A linear layer's matrix and bias (zeros where it has none)."""
    weight = linear.weight.detach()
    rows = pack(weight.T.contiguous() if transposed else weight, storage)
    if free:
        forget(linear)
    return Projection(rows, bias_of(linear))


def side_by_side(gate: nn.Linear, up: nn.Linear, storage: str, free: bool) -> Projection:
    """A gated MLP's two matrices as one in which a neuron's rows are neighbours."""
    both = torch.stack([gate.weight.detach(), up.weight.detach()], 1).flatten(0, 1)
    if free:
        forget(gate)
        forget(up)
    return Projection(pack(both, storage), np.stack([bias_of(gate), bias_of(up)], 1))


def bias_of(linear: nn.Linear) -> Vector:
    """A linear layer's bias, zeros where it has none."""
    return np.zeros(linear.out_features, np.float32) if linear.bias is None else copied(linear.bias)


def forget(linear: nn.Linear) -> None:
    """Free a linear layer's matrix."""
    linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def norm(layer: Any) -> Norm:
    """A LayerNorm's or an RMSNorm's values, copied."""
    if getattr(layer, "bias", None) is None:
        return Norm(copied(layer.weight), None, float(layer.variance_epsilon))
    return Norm(copied(layer.weight), copied(layer.bias), float(layer.eps))


def pack_predictor(predictor: Predictor, storage: str, together: int = 1) -> PackedPredictor:
    """A trained predictor in a storage type; with `together` above 1 it scores groups of so many neighbouring units."""
    up = projection(predictor.up, storage, free=False, transposed=True)
    if together > 1:
        summed_RU = predictor.up.weight.detach().T.unflatten(1, (-1, together)).sum(-1)
        up = Projection(pack(summed_RU, storage), up.bias.reshape(-1, together).sum(1))
    return PackedPredictor(
        norm=norm(predictor.norm) if isinstance(predictor.norm, nn.LayerNorm) else None,
        down=projection(predictor.down, storage, free=False),
        up=up,
        relu=isinstance(predictor.activation, nn.ReLU),
        together=together,
    )

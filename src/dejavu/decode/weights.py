"""A model's weights as the engine reads them: every matrix as `Rows`, what one unit needs side by side.

Layers are repacked one by one and the originals freed, so that memory never holds the model twice; with random weights
they are made in the storage type at once. Shape suffixes: D width, F neurons, E = heads * head_dim, V vocabulary, R
rank, P positions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dejavu.decode.storage import Rows, in_large_pages, pack
from dejavu.errors import ConfigError
from dejavu.models.anatomy import KINDS
from dejavu.predictors.network import Predictor

Vector = np.ndarray
NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Norm:
    """LayerNorm's weight and bias, (D,) each."""

    weight_D: Vector
    bias_D: Vector
    epsilon: float


@dataclass(frozen=True)
class Projection:
    """A matrix and its bias; a transposed one (fc2, out_proj) has as many rows as it has inputs."""

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
    """One transformer block of OPT's kind."""

    attention_norm: Norm
    queries: Projection  # (E, D)
    keys: Projection
    values: Projection
    output: Projection  # W_o transposed, (E, D)
    mlp_norm: Norm
    first: Projection  # fc1, (F, D)
    second: Projection  # fc2 transposed, (F, D)


@dataclass(frozen=True)
class PackedPredictor:
    """A predictor's norm (None: it has none) and its two matrices."""

    norm: Norm | None
    down: Projection  # (R, D)
    up: Projection  # transposed, (R, units)
    relu: bool


@dataclass
class Weights:
    """All that decoding reads."""

    heads: int
    head_dim: int
    storage: str
    embedding: Rows  # (V, D): looked up on the way in, multiplied on the way out
    positions: np.ndarray  # (P, D)
    final_norm: Norm
    blocks: list[Block]
    predictors: dict[tuple[str, int], PackedPredictor]

    @property
    def width(self) -> int:
        return self.embedding.shape[1]

    @property
    def neurons(self) -> int:
        return self.blocks[0].first.rows.shape[0]

    @property
    def context(self) -> int:
        return len(self.positions)

    def units(self, kind: str) -> int:
        """Units of a kind in one layer."""
        return self.neurons if kind == "mlp" else self.heads


def repack(model: Any, storage: str, free: bool = True) -> Weights:
    """Weights of a loaded OPT of the pre-norm kind; its own are freed layer by layer unless `free` is off.

    Raises ConfigError for a model that the kernels do not know.
    """
    config = model.config
    pre_norm = getattr(config, "do_layer_norm_before", False)
    if config.model_type != "opt" or not pre_norm or config.word_embed_proj_dim != config.hidden_size:
        what = "post-norm OPT (opt-350m)" if config.model_type == "opt" else f"models of type {config.model_type}"
        raise ConfigError(
            f"backend=kernel decodes OPT with its norms before each half, not {what}: use backend=simulate"
        )
    decoder = model.model.decoder
    embedding = pack(decoder.embed_tokens.weight, storage)
    positions = decoder.embed_positions.weight[decoder.embed_positions.offset :].detach().float().cpu().numpy().copy()
    final_norm = norm(decoder.final_layer_norm)
    blocks = []
    for layer in decoder.layers:
        attention = layer.self_attn
        blocks.append(
            Block(
                attention_norm=norm(layer.self_attn_layer_norm),
                queries=projection(attention.q_proj, storage, free),
                keys=projection(attention.k_proj, storage, free),
                values=projection(attention.v_proj, storage, free),
                output=projection(attention.out_proj, storage, free, transposed=True),
                mlp_norm=norm(layer.final_layer_norm),
                first=projection(layer.fc1, storage, free),
                second=projection(layer.fc2, storage, free, transposed=True),
            )
        )
    heads = config.num_attention_heads
    return Weights(heads, config.hidden_size // heads, storage, embedding, positions, final_norm, blocks, {})


def projection(linear: nn.Linear, storage: str, free: bool, transposed: bool = False) -> Projection:
    """A linear layer's matrix and bias (zeros where it has none)."""
    weight = linear.weight.detach()
    rows = pack(weight.T.contiguous() if transposed else weight, storage)
    outputs = linear.out_features
    bias = np.zeros(outputs, np.float32) if linear.bias is None else linear.bias.detach().float().cpu().numpy().copy()
    if free:
        linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return Projection(rows, bias)


def norm(layer: Any) -> Norm:
    """A LayerNorm's values, copied."""
    weight, bias = (part.detach().float().cpu().numpy().copy() for part in (layer.weight, layer.bias))
    return Norm(weight, bias, float(layer.eps))


def pack_predictor(predictor: Predictor, storage: str) -> PackedPredictor:
    """A trained predictor in a storage type."""
    return PackedPredictor(
        norm=norm(predictor.norm) if isinstance(predictor.norm, nn.LayerNorm) else None,
        down=projection(predictor.down, storage, free=False),
        up=projection(predictor.up, storage, free=False, transposed=True),
        relu=isinstance(predictor.activation, nn.ReLU),
    )


def random_weights(architecture: dict[str, Any], storage: str, ranks: tuple[int, int], seed: int = 0) -> Weights:
    """OPT's shape with random weights and predictors, built in the storage type: for latency, never for quality.

    `ranks` of the predictors: in the first layer, in all others.
    """
    width, heads = architecture["hidden_size"], architecture["num_attention_heads"]
    neurons, layers = architecture["ffn_dim"], architecture["num_hidden_layers"]
    random = np.random.default_rng(seed)

    def rows(count: int, columns: int) -> Rows:
        return random_rows(random, count, columns, storage)

    def linear(count: int, columns: int, outputs: int) -> Projection:
        return Projection(rows(count, columns), random.standard_normal(outputs, dtype=np.float32) * 0.02)

    def plain_norm() -> Norm:
        return Norm(np.ones(width, np.float32), np.zeros(width, np.float32), 1e-5)

    blocks = [
        Block(
            attention_norm=plain_norm(),
            queries=linear(width, width, width),
            keys=linear(width, width, width),
            values=linear(width, width, width),
            output=linear(width, width, width),
            mlp_norm=plain_norm(),
            first=linear(neurons, width, neurons),
            second=linear(neurons, width, width),
        )
        for _ in range(layers)
    ]
    units = {"mlp": neurons, "heads": heads}
    predictors = {
        (kind, layer): PackedPredictor(
            plain_norm(), linear(rank, width, rank), linear(rank, units[kind], units[kind]), relu=True
        )
        for kind in KINDS
        for layer, rank in enumerate([ranks[0], *[ranks[1]] * (layers - 1)])
    }
    positions = random.standard_normal((architecture.get("max_position_embeddings", 2048), width), dtype=np.float32)
    embedding = rows(architecture.get("vocab_size", 50_272), width)
    return Weights(heads, width // heads, storage, embedding, positions * 0.02, plain_norm(), blocks, predictors)


def random_rows(random: np.random.Generator, count: int, columns: int, storage: str) -> Rows:
    """A random matrix of standard deviation 0.02: a block of values repeated, since drawing 7e9 would take minutes."""
    drawn = torch.from_numpy(random.standard_normal((min(count, 512), columns), dtype=np.float32) * 0.02)
    block = pack(drawn, storage)
    repeats = -(-count // len(block.data_RC))
    data = np.tile(block.data_RC, (repeats, 1))[:count]
    return Rows(in_large_pages(data), np.tile(block.scale_R, repeats)[:count].copy(), storage)

"""What decoding a token must read, and the time that takes at the memory's measured speed: the floor.

Bytes: rows of q, k, v, o of the chosen heads and of fc1 and fc2 of the chosen neurons, predictors, output embedding,
keys and values of the chosen heads. Rows that need not be read after all (neurons at zero) are counted as if they were.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dejavu.decode import ops
from dejavu.decode.storage import Rows, in_large_pages
from dejavu.decode.weights import normed
from dejavu.models.topk import kept

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE = {"float32": 0, "bfloat16": 0, "int8": 4}  # bytes of a row's scale


@dataclass(frozen=True)
class Shape:
    """Sizes of an OPT model, as its config names them."""

    width: int
    layers: int
    heads: int
    neurons: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def shape_of(architecture: dict[str, Any]) -> Shape:
    """The shape in a model's config."""
    return Shape(
        architecture["hidden_size"], architecture["num_hidden_layers"], architecture["num_attention_heads"],
        architecture["ffn_dim"], architecture.get("vocab_size", 50_272),
    )  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """Bytes read for one token, by what they are."""

    body: int
    predictors: int
    embedding: int
    cache: int

    @property
    def total(self) -> int:
        return self.body + self.predictors + self.embedding + self.cache

    def floor_ms(self, bandwidth_gb_s: float) -> float:
        """Milliseconds at a bandwidth; decoding cannot be faster unless the weights stay in a processor's cache."""
        return self.total / bandwidth_gb_s / 1e6


def terms(
    shape: Shape, storage: str, mlp: float, heads: float, ranks: tuple[int, int] | None, positions: int, cached: int
) -> Terms:
    """Bytes of one token when the fractions `mlp` and `heads` are NOT computed and `positions` are cached.

    `ranks` of the predictors in the first layer and in all others, None without; `cached` bytes a value of keys and
    values.
    """
    kept_neurons, kept_heads = kept(mlp, shape.neurons), kept(heads, shape.heads)

    def rows(count: int, columns: int) -> int:
        return count * (columns * BYTES[storage] + SCALE[storage])

    body = rows(2 * kept_neurons + 4 * kept_heads * shape.head_dim, shape.width)
    predictors = 0
    if ranks is not None:
        chosen = [units for ratio, units in ((mlp, shape.neurons), (heads, shape.heads)) if ratio > 0]
        every = ranks[0] + (shape.layers - 1) * ranks[1]
        predictors = sum(rows(every, shape.width) + rows(every, units) for units in chosen)
    return Terms(
        body=shape.layers * body,
        predictors=predictors,
        embedding=rows(shape.vocabulary, shape.width),
        cache=shape.layers * kept_heads * positions * shape.head_dim * 2 * cached,
    )


class Bandwidth:
    """Measures how fast memory is read, by the fastest reader there is: the engine's own row product over long rows."""

    def __init__(self, threads: int, megabytes: int = 512, columns: int = 8192) -> None:
        data_RC = in_large_pages(np.ones((megabytes * (1 << 20) // (4 * columns), columns), np.float32))
        self.rows = Rows(data_RC, np.ones(len(data_RC), np.float32), "float32")
        self.x, self.out = torch.ones(1, columns), torch.empty(1, len(data_RC))
        bias = np.zeros(len(data_RC), np.float32)
        self.bound = ops.Bound("project", *normed(None), data_RC, self.rows.scale_R, bias, False, threads)
        self.gb_s()  # compiles

    def gb_s(self, repeats: int = 3) -> float:
        """10^9 bytes a second, the best of some tries."""
        best = 0.0
        for _ in range(repeats):
            started = time.perf_counter()
            ops.project(self.x, self.out, self.bound.number)
            best = max(best, self.rows.data_RC.nbytes / (time.perf_counter() - started) / 1e9)
        return best


def largest_cache() -> int:
    """Bytes of the processor's last cache, 32 MB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit():
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes, default=32 << 20)

"""What decoding a token must read, and the time that takes at the memory's measured speed: the floor.

Bytes: rows of q and o of the chosen heads, of k and v of the fewest groups that they can lie in, of all matrices of the
chosen neurons, predictors, output embedding, keys and values of those groups. Rows that need not be read after all
(neurons at zero) are counted as if they were.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dejavu.decode import ops
from dejavu.decode.storage import Rows, in_large_pages
from dejavu.decode.weights import normed
from dejavu.models.shape import Shape
from dejavu.models.topk import kept

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE = {"float32": 0, "bfloat16": 0, "int8": 4}  # bytes of a row's scale


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
    shape: Shape, storage: str, mlp: float, heads: float, ranks: tuple[int, int] | None, positions: int, cached: int,
    head_unit: str = "head",
) -> Terms:  # fmt: skip
    """Bytes of one token when the fractions `mlp` and `heads` are NOT computed and `positions` are cached.

    `ranks` of the predictors in the first layer and in all others, None without; `cached` bytes a value of keys and
    values.
    """
    together = shape.together(head_unit)
    kept_neurons, kept_heads = kept(mlp, shape.neurons), together * kept(heads, shape.heads // together)
    kept_groups = shape.groups(kept_heads)

    def rows(count: int, columns: int) -> int:
        return count * (columns * BYTES[storage] + SCALE[storage])

    body = rows(shape.neuron_rows * kept_neurons + 2 * (kept_heads + kept_groups) * shape.head_dim, shape.width)
    predictors = 0
    if ranks is not None:
        halves = ((mlp, shape.neurons), (heads, shape.heads // together))
        every = ranks[0] + (shape.layers - 1) * ranks[1]
        predictors = sum(rows(every, shape.width) + rows(every, units) for ratio, units in halves if ratio > 0)
    return Terms(
        body=shape.layers * body,
        predictors=predictors,
        embedding=rows(shape.vocabulary, shape.width),
        cache=shape.layers * kept_groups * positions * shape.head_dim * 2 * cached,
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

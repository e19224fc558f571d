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
from dejavu.models.anatomy import KINDS
from dejavu.models.shape import Shape
from dejavu.sparsity.budget import Budget

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
    shape: Shape, storage: str, budget: Budget, ranks: tuple[int, int] | None, positions: int, cached: int,
    head_unit: str = "head",
) -> Terms:  # fmt: skip
    """Bytes of one token when every layer computes its budget's units and `positions` are cached.

    `ranks` of the predictors in the first layer and in all others, None without; a layer that computes all of a kind
    does not read its predictor. `cached` bytes a value of keys and values.
    """
    groups = sum(shape.groups(heads) for heads in budget.heads)

    def rows(count: int, columns: int) -> int:
        return count * (columns * BYTES[storage] + SCALE[storage])

    scored = {"mlp": shape.neurons, "heads": shape.heads // shape.together(head_unit)}
    first, others = ranks or (0, 0)
    predictors = sum(
        rows(rank, shape.width) + rows(rank, scored[kind])
        for kind in KINDS
        for kept, rank in zip(budget.of(kind), [first, *[others] * (shape.layers - 1)], strict=True)
        if kept < shape.units(kind)
    )
    head_rows = 2 * (sum(budget.heads) + groups) * shape.head_dim
    return Terms(
        body=rows(shape.neuron_rows * sum(budget.mlp) + head_rows, shape.width),
        predictors=predictors,
        embedding=rows(shape.vocabulary, shape.width),
        cache=groups * positions * shape.head_dim * 2 * cached,
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

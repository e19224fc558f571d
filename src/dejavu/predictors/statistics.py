"""What the training rows of a cache say of each unit on average: the `static` order, and the scale of the labels.

Shape suffixes: N tokens read at a time, U units (neurons or heads) of one layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dejavu.activations.cache import ActivationCache
from dejavu.models.anatomy import KINDS

Key = tuple[str, int]  # kind ("mlp" or "heads"), layer
CHUNK = 2048  # tokens read at a time


@dataclass(frozen=True)
class UnitStatistics:
    """Averages over tokens of one kind in one layer.

    mean_U   mean contribution of each unit: what the selector `static` orders by
    root_U   mean of the square root of each unit's contribution
    active_U share of tokens to which each unit contributes at all
    """

    mean_U: Tensor
    root_U: Tensor
    active_U: Tensor

    @property
    def active(self) -> float:
        """Share of (token, unit) pairs with a contribution above 0."""
        return float(self.active_U.double().mean())

    @property
    def scale(self) -> float:
        """The layer's mean contribution over units and tokens; 1 where nothing ever contributes."""
        return float(self.mean_U.double().mean()) or 1.0


def contributions(cache: ActivationCache, key: Key, rows: slice | np.ndarray) -> np.ndarray:
    """c of every unit of a kind in a layer, float32 (N, U)."""
    kind, layer = key
    return cache.mlp(layer, rows) if kind == "mlp" else cache.heads_of(layer, rows)


def collect_statistics(cache: ActivationCache, rows: np.ndarray, layers: Iterable[int]) -> dict[Key, UnitStatistics]:
    """One pass over the given rows (ascending) of the cache, both kinds of every layer named."""
    layers = list(layers)
    return {(kind, layer): _averages(cache, (kind, layer), rows) for kind in KINDS for layer in layers}


def _averages(cache: ActivationCache, key: Key, rows: np.ndarray) -> UnitStatistics:
    sums_U = roots_U = active_U = np.float64(0)
    for first in range(0, len(rows), CHUNK):
        c_NU = contributions(cache, key, rows[first : first + CHUNK])
        sums_U = sums_U + c_NU.sum(0, dtype=np.float64)
        roots_U = roots_U + np.sqrt(c_NU).sum(0, dtype=np.float64)
        active_U = active_U + np.count_nonzero(c_NU, axis=0)
    return UnitStatistics(*(_mean(total_U, len(rows)) for total_U in (sums_U, roots_U, active_U)))


def _mean(sums_U: np.ndarray | np.float64, tokens: int) -> Tensor:
    return torch.from_numpy(np.asarray(sums_U / tokens, dtype=np.float32))

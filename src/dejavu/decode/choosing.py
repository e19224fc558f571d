"""Who says which units a token gets while decoding. Shapes: B sequences, U units, N the union's units."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dejavu.decode.weights import Weights
from dejavu.models.topk import top_k_mask
from dejavu.predictors.bundle import Bundle
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.selectors import alike

Chosen = tuple[np.ndarray, np.ndarray]  # units of the batch's union, rising (N,); which sequence chose which (B, N)
Chooser = Callable[[str, int, int], Chosen | None]  # (kind, layer, sequences); None: all units


@dataclass(frozen=True)
class Predicted:
    """The weights' predictors choose, inside a half block's operator: the k best units of each sequence."""

    budget: Budget
    skip_zeros: bool = True  # rows of a predictor's second half whose hidden value is zero are not read


class Fixed:
    """The units of highest mean contribution, for every token the same."""

    def __init__(self, bundle: Bundle, weights: Weights, budget: Budget, head_unit: str = "head") -> None:
        self.units: dict[tuple[str, int], np.ndarray | None] = {}
        for kind in ("mlp", "heads"):
            for layer, kept in enumerate(budget.of(kind)):
                means_1U = bundle.mean_contribution(kind, layer)[None]
                mask_1U = top_k_mask(alike(means_1U, weights.together(kind, head_unit)), kept)
                every = kept == weights.units(kind)
                self.units[kind, layer] = None if every else np.flatnonzero(mask_1U[0].numpy())

    def __call__(self, kind: str, layer: int, batch: int) -> Chosen | None:
        units_N = self.units[kind, layer]
        return None if units_N is None else (units_N, np.ones((batch, len(units_N)), bool))


class RandomSets:
    """Fresh random sets for every token: the random selector, and what any choice costs when weights are random."""

    def __init__(self, weights: Weights, budget: Budget, seed: int, head_unit: str = "head") -> None:
        self.weights, self.budget, self.head_unit = weights, budget, head_unit
        self.random = np.random.default_rng(zlib.crc32(str(seed).encode()))

    def __call__(self, kind: str, layer: int, batch: int) -> Chosen | None:
        units, kept = self.weights.units(kind), self.budget.of(kind)[layer]
        if kept == units:
            return None
        size = self.weights.together(kind, self.head_unit)
        each = [self.random.choice(units // size, kept // size, replace=False, shuffle=False) for _ in range(batch)]
        neighbours_BKS = np.sort(np.stack(each))[..., None] * size + np.arange(size)
        return union(neighbours_BKS.reshape(batch, -1), units)


def union(units_BK: np.ndarray, units: int) -> Chosen:
    """The sets of all sequences as one rising list, and which sequence chose which."""
    batch, kept = units_BK.shape
    if batch == 1:
        return units_BK[0], np.ones((1, kept), dtype=bool)
    chosen_BU = np.zeros((batch, units), dtype=bool)
    np.put_along_axis(chosen_BU, units_BK, True, axis=1)
    union_N = np.flatnonzero(chosen_BU.any(0))
    return union_N, chosen_BU[:, union_N]

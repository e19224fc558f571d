"""Who says which units a token gets while decoding. Shapes: B sequences, D width, U units, N the union's units."""

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dejavu.decode import ops
from dejavu.decode.weights import Weights, matrix, normed_matrix
from dejavu.errors import DataError
from dejavu.models.topk import top_k_mask
from dejavu.predictors.bundle import Bundle
from dejavu.sparsity.budget import Budget

Chosen = tuple[np.ndarray, np.ndarray]  # units of the batch's union, rising (N,); which sequence chose which (B, N)
Chooser = Callable[[str, int, Tensor], Chosen | None]  # (kind, layer, tap_BD); None: all units


class Predicted:
    """Chooses by packed predictors: the k best units of each sequence."""

    def __init__(self, weights: Weights, budget: Budget, threads: int, skip_zeros: bool = True) -> None:
        self.weights, self.budget = weights, budget
        self.halves = {
            key: (
                ops.Bound("project", *normed_matrix(predictor.norm, predictor.down), predictor.relu, threads),
                ops.Bound("choose", *matrix(predictor.up), threads, skip_zeros),
            )
            for key, predictor in weights.predictors.items()
        }
        self.ready: dict[tuple[str, int], Tensor] = {}  # first halves that ran beside a half block

    def kept(self, kind: str, layer: int) -> int:
        """Units of each token in a layer."""
        return self.budget.of(kind)[layer]

    def hidden(self, kind: str, layer: int, tap_BD: Tensor) -> Tensor:
        """The first half's output, (B, R)."""
        hidden_BR = torch.empty(len(tap_BD), self.weights.predictors[kind, layer].down.rows.shape[0])
        ops.project(tap_BD, hidden_BR, self.halves[kind, layer][0].number)
        return hidden_BR

    def scored(self, kind: str, layer: int, hidden_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of all units (B, U) and the best of them (B, k). Raises DataError for NaN."""
        batch = len(hidden_BR)
        scores_BU = torch.empty(batch, self.weights.units(kind))
        units_BK = torch.empty(batch, self.kept(kind, layer), dtype=torch.int64)
        if not ops.choose(hidden_BR, scores_BU, units_BK, self.halves[kind, layer][1].number):
            raise DataError(
                f"the predictor of {kind} in layer {layer} gave NaN: check the model, the weights and the bundle"
            )
        return scores_BU, units_BK

    def __call__(self, kind: str, layer: int, tap_BD: Tensor) -> Chosen | None:
        if self.kept(kind, layer) == self.weights.units(kind):
            return None
        hidden_BR = self.ready.pop((kind, layer), None)
        hidden_BR = self.hidden(kind, layer, tap_BD) if hidden_BR is None else hidden_BR
        return union(self.scored(kind, layer, hidden_BR)[1].numpy(), self.weights.units(kind))


class Fixed:
    """The units of highest mean contribution, for every token the same."""

    def __init__(self, bundle: Bundle, weights: Weights, budget: Budget) -> None:
        self.units: dict[tuple[str, int], np.ndarray | None] = {}
        for kind in ("mlp", "heads"):
            for layer, kept in enumerate(budget.of(kind)):
                mask_1U = top_k_mask(bundle.mean_contribution(kind, layer)[None], kept)
                every = kept == weights.units(kind)
                self.units[kind, layer] = None if every else np.flatnonzero(mask_1U[0].numpy())

    def __call__(self, kind: str, layer: int, tap_BD: Tensor) -> Chosen | None:
        units_N = self.units[kind, layer]
        return None if units_N is None else (units_N, np.ones((len(tap_BD), len(units_N)), bool))


class RandomSets:
    """Fresh random sets for every token: the random selector, and what any choice costs when weights are random."""

    def __init__(self, weights: Weights, budget: Budget, seed: int) -> None:
        self.weights, self.budget = weights, budget
        self.random = np.random.default_rng(zlib.crc32(str(seed).encode()))

    def __call__(self, kind: str, layer: int, tap_BD: Tensor) -> Chosen | None:
        units, kept = self.weights.units(kind), self.budget.of(kind)[layer]
        if kept == units:
            return None
        each = [self.random.choice(units, kept, replace=False, shuffle=False) for _ in range(len(tap_BD))]
        return union(np.sort(np.stack(each)), units)


def union(units_BK: np.ndarray, units: int) -> Chosen:
    """The sets of all sequences as one rising list, and which sequence chose which."""
    batch, kept = units_BK.shape
    if batch == 1:
        return units_BK[0], np.ones((1, kept), dtype=bool)
    chosen_BU = np.zeros((batch, units), dtype=bool)
    np.put_along_axis(chosen_BU, units_BK, True, axis=1)
    union_N = np.flatnonzero(chosen_BU.any(0))
    return union_N, chosen_BU[:, union_N]

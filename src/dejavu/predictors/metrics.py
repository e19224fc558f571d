"""How well scores choose units, at several densities: recall of mass and recall against the oracle's set.

    recall of mass   sum of c over the chosen units / sum of c, per token; 1 for a token without active units
    recall           share of the chosen units that the oracle (top by c) chooses too, from a set of the same size

Recall of mass is the one to select by: units of small contribution may be confused without harm, and among those that
contribute nothing the oracle's own choice is arbitrary (the lower index), which recall holds against a predictor.

Shape suffixes: N tokens, U units, K densities.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from dejavu.models.topk import kept, top_k_mask

DENSITIES = (0.1, 0.25, 0.35, 0.5)


class SelectionRecall(Metric):
    """Recall of mass and recall of one layer and kind, averaged over all tokens seen."""

    full_state_update = False
    higher_is_better = True
    mass_K: Tensor
    overlap_K: Tensor
    tokens: Tensor

    def __init__(self, densities: Sequence[float] = DENSITIES) -> None:
        super().__init__()
        self.densities = tuple(densities)
        zeros_K = torch.zeros(len(self.densities), dtype=torch.float64)
        self.add_state("mass_K", zeros_K, dist_reduce_fx="sum")
        self.add_state("overlap_K", zeros_K.clone(), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores_NU: Tensor, contributions_NU: Tensor) -> None:
        """Count tokens. Raises FloatingPointError for NaN scores."""
        total_N = contributions_NU.sum(-1)
        silent_N = total_N == 0
        for place, density in enumerate(self.densities):
            k = kept(1 - density, contributions_NU.shape[-1])
            chosen_NU = top_k_mask(scores_NU, k)
            share_N = (contributions_NU * chosen_NU).sum(-1) / total_N
            self.mass_K[place] += share_N.masked_fill(silent_N, 1.0).sum(dtype=torch.float64)
            self.overlap_K[place] += (chosen_NU & top_k_mask(contributions_NU, k)).sum() / max(1, k)
        self.tokens += len(contributions_NU)

    def compute(self) -> dict[str, Tensor]:
        """`recall_of_mass` and `recall`, each (K,), in the order of the densities."""
        return {"recall_of_mass": self.mass_K / self.tokens, "recall": self.overlap_K / self.tokens}

    def figures(self) -> dict[str, dict[str, float]]:
        """The same as plain numbers: {"recall_of_mass": {"0.1": ..., ...}, "recall": {...}}."""
        return {
            name: {f"{density:g}": float(value) for density, value in zip(self.densities, values_K, strict=True)}
            for name, values_K in self.compute().items()
        }


def mean_figure(figures: dict[str, float]) -> float:
    """Mean over densities of one of `figures`' entries."""
    return sum(figures.values()) / len(figures)

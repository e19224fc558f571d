"""What really ran sparse, how good the choice was, and what it cost: what stands beside every quality number."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dejavu.models.anatomy import KINDS, Anatomy
from dejavu.models.topk import top_k_mask
from dejavu.sparsity.calibration import body_weights

if TYPE_CHECKING:
    from dejavu.predictors.bundle import Bundle


class Density:
    """Units used over units, per layer, over the non-padding positions that ran sparse; a dense layer counts 1."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.positions = 0
        self._used: dict[tuple[str, int], Tensor] = {}

    def add_positions(self, count: int) -> None:
        self.positions += count

    def add_used(self, kind: str, layer: int, used: Tensor) -> None:
        """Add a count of units used; it stays on its device so that no layer waits for it."""
        self._used[kind, layer] = self._used.get((kind, layer), torch.zeros_like(used)) + used

    def per_layer(self, kind: str) -> list[float]:
        """Density of each layer, 1.0 for a layer that was not touched or when nothing ran sparse."""
        total = self.positions * self.anatomy.units(kind)
        layers = range(self.anatomy.layers)
        return [
            int(self._used[kind, layer]) / total if (kind, layer) in self._used and total else 1.0 for layer in layers
        ]

    def measured(self) -> dict[str, float]:
        """`mlp_density` and `head_density`, means over all layers; `body_density`, both weighted by their weights."""
        means = {kind: sum(self.per_layer(kind)) / self.anatomy.layers for kind in KINDS}
        weights = {kind: self.anatomy.unit_weights(kind) * self.anatomy.units(kind) for kind in KINDS}
        body = sum(means[kind] * weights[kind] for kind in KINDS) / sum(weights.values())
        return {"mlp_density": means["mlp"], "head_density": means["heads"], "body_density": body}


class Recall:
    """How much of what the oracle would take a choice takes, over the first `limit` tokens that ran sparse.

    On the stream at hand, as the oracle itself works. Two measures per layer, both means over tokens: the share of the
    sum of c (recall of mass), and the share of the oracle's set of the same size (recall). A token without active
    units, or for which nothing is chosen, counts 1.
    """

    def __init__(self, anatomy: Anatomy, limit: int) -> None:
        self.anatomy, self.limit = anatomy, limit
        self.tokens = 0
        self._rows_N: Tensor | None = None
        self._sums: dict[tuple[str, int], Tensor] = {}

    def begin(self, sparse_N: Tensor) -> None:
        """Announce a forward pass: its first sparse tokens are measured until the limit is reached."""
        rows_N = torch.nonzero(sparse_N)[: self.limit - self.tokens, 0]
        self._rows_N = rows_N if len(rows_N) else None
        self.tokens += len(rows_N)

    def add(self, kind: str, layer: int, mask_NU: Tensor, contributions: Callable[[], Tensor]) -> None:
        """Add what was chosen in a layer."""
        if self._rows_N is None:
            return
        mask_NU, c_NU = mask_NU[self._rows_N], contributions()[self._rows_N]
        total_N = c_NU.sum(-1)
        mass_N = torch.where(total_N > 0, c_NU.masked_fill(~mask_NU, 0).sum(-1) / total_N, 1.0)
        count_N = mask_NU.sum(-1)
        shared_N = (mask_NU & best_of_same_size(c_NU, count_N)).sum(-1)
        recall_N = torch.where(count_N > 0, shared_N / count_N, 1.0)
        sums = torch.stack([mass_N.double().sum(), recall_N.double().sum()])
        self._sums[kind, layer] = self._sums.get((kind, layer), torch.zeros_like(sums)) + sums

    def per_layer(self, kind: str) -> dict[str, list[float | None]]:
        """`recall_of_mass` and `recall` of each layer; None for a layer where nothing was chosen."""
        found = [self._sums.get((kind, layer)) for layer in range(self.anatomy.layers)]
        names = ("recall_of_mass", "recall")
        return {
            name: [None if sums is None else float(sums[number]) / self.tokens for sums in found]
            for number, name in enumerate(names)
        }


def choosing_costs(bundle: "Bundle") -> dict[tuple[str, int], float]:
    """Weights that each group's predictor reads, by (kind, layer); what several share is divided among them."""
    tensors = {(kind, layer): bundle.tensors_of(kind, layer) for kind in KINDS for layer in bundle.layers}
    readers = Counter(name for each in tensors.values() for name in each)
    return {
        group: sum(tensor.numel() / readers[name] for name, tensor in each.items()) for group, each in tensors.items()
    }


def cost_account(measured: Mapping[str, Any], bundle: "Bundle", anatomy: Anatomy) -> dict[str, float]:
    """What predictors cost against what they save, as shares of the body's weights; 2 FLOPs a weight, so of FLOPs too.

    gross_skipped   weights of units that were left out
    predictors      weights of the predictors that chose them; a shared trunk counts once for each kind
    net_skipped     the difference, below 0 where a predictor costs more than it saves
    """
    names = {"mlp": "mlp", "heads": "head"}
    asked = [
        (kind, layer)
        for kind in KINDS
        for layer, density in enumerate(measured[f"{names[kind]}_density_per_layer"])
        if density < 1 and layer in bundle.layers
    ]
    sizes = {name: tensor.numel() for key in asked for name, tensor in bundle.tensors_of(*key).items()}
    gross, cost = 1 - float(measured["body_density"]), sum(sizes.values()) / body_weights(anatomy)
    return {"gross_skipped": gross, "predictors": cost, "net_skipped": gross - cost}


def count_true(mask: Tensor) -> Tensor:
    """How many values are True; on a CPU by numpy, whose count is many times as fast as torch's sum of booleans."""
    if mask.device.type == "cpu":
        return torch.tensor(int(np.count_nonzero(mask.numpy())))
    return mask.sum()


def best_of_same_size(c_NU: Tensor, count_N: Tensor) -> Tensor:
    """True at the `count` largest of each row, ties to the lower index; bool (N, U)."""
    if bool((count_N == count_N[0]).all()):
        return top_k_mask(c_NU, int(count_N[0]))
    order_NU = c_NU.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(c_NU.shape[1], device=c_NU.device).expand_as(order_NU)
    return torch.empty_like(order_NU).scatter_(1, order_NU, places) < count_N[:, None]

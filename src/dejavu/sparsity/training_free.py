"""Selectors that need no training: estimates of the activations from the MLP's own weights.

All read m_l, right before the MLP (tap `direct`), so their work cannot run beside attention, and they know neurons
only: heads stay whole. Shape suffixes: N tokens, D width, F neurons, R rank.
"""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from dejavu.errors import ConfigError
from dejavu.models.anatomy import Anatomy
from dejavu.models.placement import tensor_of
from dejavu.sparsity.selectors import Choice, Selector


class ColumnNorms(Protocol):
    """What knows ||W2[:, j]|| of a layer's neurons, (F,)."""

    def column_norms(self, layer: int) -> Tensor: ...


class FromWeights(Selector):
    """Shared by all three: the MLP's input recomputed from its tap."""

    reads_tap = True
    own_tap = "direct"

    def __init__(self, anatomy: Anatomy, norms: ColumnNorms) -> None:
        self.anatomy, self.norms = anatomy, norms

    def scores(self, choice: Choice) -> Tensor:
        assert choice.tap_ND is not None and choice.kind == "mlp", "heads stay whole: the budget sees to it"
        return self.estimate(choice.layer, self.anatomy.mlp_reads(choice.layer, choice.tap_ND))

    @abstractmethod
    def estimate(self, layer: int, x_ND: Tensor) -> Tensor:
        """Importance of each neuron for the MLP's input x, (N, F)."""


class Gate(FromWeights):
    """|silu(gate)|, the gate computed whole (CATS; Lee et al., 2024): only up and down are skipped."""

    name = "gate"

    def __init__(self, anatomy: Anatomy, norms: ColumnNorms) -> None:
        super().__init__(anatomy, norms)
        if not anatomy.gated:
            raise ConfigError(
                f"sparsity.selector=gate needs a model with a gated MLP, which {anatomy.family} has not: "
                "use svd, sign or predictor"
            )

    def estimate(self, layer: int, x_ND: Tensor) -> Tensor:
        block = self.anatomy.blocks[layer]
        return block.activation(block.mlp_input(x_ND)).to(x_ND.device).float().abs()


class LowRank(FromWeights):
    """c from the best approximation of the first projection by a matrix of rank R; a gated MLP's two share the rank."""

    name = "svd"

    def __init__(self, anatomy: Anatomy, norms: ColumnNorms, rank: int) -> None:
        super().__init__(anatomy, norms)
        self.rank = max(1, rank // 2) if anatomy.gated else rank
        self._factors: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def estimate(self, layer: int, x_ND: Tensor) -> Tensor:
        block = self.anatomy.blocks[layer]
        activation_NF = block.activation(self._projected(layer, block.mlp_input, False, x_ND))
        if block.mlp_up is not None:
            activation_NF = activation_NF * self._projected(layer, block.mlp_up, True, x_ND)
        return activation_NF.abs() * self.norms.column_norms(layer)

    def _projected(self, layer: int, linear: torch.nn.Linear, up: bool, x_ND: Tensor) -> Tensor:
        if (layer, up) not in self._factors:
            self._factors[layer, up] = low_rank(tensor_of(linear).to(self.anatomy.home).float(), self.rank)
        down_RD, up_FR = self._factors[layer, up]
        estimate_NF = x_ND.float() @ down_RD.T @ up_FR.T
        return estimate_NF if linear.bias is None else estimate_NF + tensor_of(linear, "bias").to(x_ND.device).float()


class SignBits(FromWeights):
    """Agreement of the signs of x and of each row (SparseInfer; Shin et al., 2025), scaled to a pre-activation.

    sum_i sign(x_i) sign(W_ji), of a gated MLP the gate's, times the row's mean |W_ji| and the neuron's ||W2[:, j]||.
    """

    name = "sign"

    def __init__(self, anatomy: Anatomy, norms: ColumnNorms) -> None:
        super().__init__(anatomy, norms)
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def estimate(self, layer: int, x_ND: Tensor) -> Tensor:
        if layer not in self._rows:
            weight_FD = tensor_of(self.anatomy.blocks[layer].mlp_input).to(self.anatomy.home).float()
            self._rows[layer] = weight_FD.sign(), weight_FD.abs().mean(1) * self.norms.column_norms(layer)
        signs_FD, scale_F = self._rows[layer]
        return (x_ND.float().sign() @ signs_FD.T) * scale_F


def low_rank(weight_FD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(V (R, D), W V' (F, R)): W V' V is the best approximation of W of that rank (Eckart and Young)."""
    _, vectors_DD = torch.linalg.eigh(weight_FD.T @ weight_FD)
    top_RD = vectors_DD[:, -rank:].T.contiguous()
    return top_RD, weight_FD @ top_RD.T

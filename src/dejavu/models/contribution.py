"""How much a unit adds to the residual: the one c of oracle, labels, recall of mass and `static`, in every family.

Neuron j: c_j = |a_j| * ||W2[:, j]||. Head h: c_h = ||W_o[:, h] head_h||.

Shape suffixes: N tokens (batch and time flattened), F neurons, H heads, K head_dim, D width.
"""

import torch
from torch import Tensor

from dejavu.models.anatomy import Anatomy
from dejavu.models.placement import tensor_of


class Contributions:
    """Contributions of one model's units, with what does not depend on the token computed once, in float32."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._column_norms_F: dict[int, Tensor] = {}
        self._head_factors_HKK: dict[int, Tensor] = {}

    def of_neurons(self, layer: int, activations_NF: Tensor) -> Tensor:
        """c of every neuron, float32 (N, F), from the input of W2."""
        return activations_NF.float().abs() * self.column_norms(layer)

    def of_heads(self, layer: int, heads_NHK: Tensor) -> Tensor:
        """c of every head, float32 (N, H), from the head outputs before W_o.

        ||W_h x|| = ||R_h x|| with W_h = Q_h R_h, which costs K*K instead of D*K per head and token.
        """
        projected_HNK = torch.bmm(heads_NHK.float().transpose(0, 1), self.head_factors(layer).transpose(1, 2))
        return projected_HNK.norm(dim=-1).T.contiguous()

    def column_norms(self, layer: int) -> Tensor:
        """||W2[:, j]|| of every neuron, (F,)."""
        if layer not in self._column_norms_F:
            weight_DF = tensor_of(self.anatomy.blocks[layer].mlp_output).to(self.anatomy.home)
            self._column_norms_F[layer] = weight_DF.float().norm(dim=0)
        return self._column_norms_F[layer]

    def head_factors(self, layer: int) -> Tensor:
        """R_h of the QR decomposition of each head's columns of W_o, (H, K, K)."""
        if layer not in self._head_factors_HKK:
            weight_DHK = tensor_of(self.anatomy.blocks[layer].attention_output).to(self.anatomy.home).float()
            columns_HDK = weight_DHK.unflatten(1, (self.anatomy.heads, self.anatomy.head_dim)).transpose(0, 1)
            self._head_factors_HKK[layer] = torch.linalg.qr(columns_HDK, mode="r").R
        return self._head_factors_HKK[layer]

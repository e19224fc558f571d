"""What the kernels compute, in plain PyTorch: the definition they are tested against, for any storage type.

Names and shapes as in `kernels`.
"""

import torch
from torch import Tensor

from dejavu.decode.storage import unpack
from dejavu.decode.weights import Projection


def neurons(units_N: Tensor, mask_BN: Tensor, x_BD: Tensor, first: Projection, second: Projection) -> Tensor:
    """sum_{j in S} relu(W1[j] x + b1[j]) W2[:, j], (B, D)."""
    rows_ND, bias_N = unpack(first.rows)[units_N], torch.from_numpy(first.bias)[units_N]
    a_BN = torch.relu(x_BD @ rows_ND.T + bias_N).masked_fill(~mask_BN, 0)
    return a_BN @ unpack(second.rows)[units_N]


def heads(
    heads_N: Tensor,
    mask_BN: Tensor,
    inputs_BTD: Tensor,
    start_B: Tensor,
    queries: Projection,
    keys: Projection,
    values: Projection,
    output: Projection,
    head_dim: int,
) -> Tensor:
    """sum_{h in A} W_o[:, h] head_h at the last position of each sequence, (B, D), from the inputs of all positions."""

    def projected(part: Projection, x: Tensor) -> Tensor:
        return (x @ unpack(part.rows).T + torch.from_numpy(part.bias)).unflatten(-1, (-1, head_dim))

    q_BHK, k_BTHK, v_BTHK = (
        projected(queries, inputs_BTD[:, -1]),
        projected(keys, inputs_BTD),
        projected(values, inputs_BTD),
    )
    scores_BHT = torch.einsum("bhk,bthk->bht", q_BHK, k_BTHK) * head_dim**-0.5
    before_BT = torch.arange(inputs_BTD.shape[1]) < start_B[:, None]
    shares_BHT = scores_BHT.masked_fill(before_BT[:, None], -torch.inf).softmax(-1)
    out_BHK = torch.einsum("bht,bthk->bhk", shares_BHT, v_BTHK)[:, heads_N].masked_fill(~mask_BN[..., None], 0)
    rows_NKD = unpack(output.rows).unflatten(0, (-1, head_dim))[heads_N]
    return torch.einsum("bnk,nkd->bd", out_BHK, rows_NKD)


def project(part: Projection, x_BC: Tensor, relu: bool) -> Tensor:
    """W x + bias, optionally relu, (B, R)."""
    out_BR = x_BC @ unpack(part.rows).T + torch.from_numpy(part.bias)
    return torch.relu(out_BR) if relu else out_BR

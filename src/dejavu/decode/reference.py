"""What the kernels compute, in plain PyTorch: the definition they are tested against, for any storage type.

Names and shapes as in `kernels`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.decode.storage import unpack
from dejavu.decode.weights import Norm, Projection


def normed(x_BD: Tensor, norm: Norm | None) -> Tensor:
    """LayerNorm, where there is one."""
    if norm is None:
        return x_BD
    weight_D, bias_D = torch.from_numpy(norm.weight_D), torch.from_numpy(norm.bias_D)
    return F.layer_norm(x_BD, x_BD.shape[-1:], weight_D, bias_D, norm.epsilon)


def mlp(
    x_BD: Tensor, units_N: Tensor, mask_BN: Tensor, norm: Norm | None, first: Projection, second: Projection
) -> Tensor:
    """x + sum_{j in S} relu(W1[j] norm(x) + b1[j]) W2[:, j] + b2, (B, D)."""
    rows_ND, bias_N = unpack(first.rows)[units_N], torch.from_numpy(first.bias)[units_N]
    a_BN = torch.relu(normed(x_BD, norm) @ rows_ND.T + bias_N).masked_fill(~mask_BN, 0)
    return x_BD + a_BN @ unpack(second.rows)[units_N] + torch.from_numpy(second.bias)


def attention(
    x_BTD: Tensor,
    heads_N: Tensor,
    mask_BN: Tensor,
    norm: Norm | None,
    queries: Projection,
    keys: Projection,
    values: Projection,
    output: Projection,
    start_B: Tensor,
    head_dim: int,
) -> Tensor:
    """x + sum_{h in A} W_o[:, h] head_h + b_o at each sequence's last position, (B, D), from all inputs."""

    def projected(part: Projection, h: Tensor) -> Tensor:
        return (h @ unpack(part.rows).T + torch.from_numpy(part.bias)).unflatten(-1, (-1, head_dim))

    h_BTD = normed(x_BTD, norm)
    q_BHK, k_BTHK, v_BTHK = projected(queries, h_BTD[:, -1]), projected(keys, h_BTD), projected(values, h_BTD)
    scores_BHT = torch.einsum("bhk,bthk->bht", q_BHK, k_BTHK) * head_dim**-0.5
    before_BT = torch.arange(x_BTD.shape[1]) < start_B[:, None]
    shares_BHT = scores_BHT.masked_fill(before_BT[:, None], -torch.inf).softmax(-1)
    out_BHK = torch.einsum("bht,bthk->bhk", shares_BHT, v_BTHK)[:, heads_N].masked_fill(~mask_BN[..., None], 0)
    rows_NKD = unpack(output.rows).unflatten(0, (-1, head_dim))[heads_N]
    return x_BTD[:, -1] + torch.einsum("bnk,nkd->bd", out_BHK, rows_NKD) + torch.from_numpy(output.bias)


def project(x_BD: Tensor, norm: Norm | None, part: Projection, relu: bool) -> Tensor:
    """W norm(x) + bias, optionally relu, (B, R)."""
    out_BR = normed(x_BD, norm) @ unpack(part.rows).T + torch.from_numpy(part.bias)
    return torch.relu(out_BR) if relu else out_BR


def scores(hidden_BR: Tensor, up: Projection) -> Tensor:
    """A predictor's second half, its matrix transposed: (B, U)."""
    return hidden_BR @ unpack(up.rows) + torch.from_numpy(up.bias)

"""What the kernels compute, in plain PyTorch: the definition they are tested against, for any storage type.

Names and shapes as in `kernels`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.decode.storage import unpack
from dejavu.decode.weights import Norm, Projection


def normed(x_BD: Tensor, norm: Norm | None) -> Tensor:
    """LayerNorm or RMSNorm, where there is one."""
    if norm is None:
        return x_BD
    weight_D = torch.from_numpy(norm.weight_D)
    if norm.bias_D is None:
        return F.rms_norm(x_BD, x_BD.shape[-1:], weight_D, norm.epsilon)
    return F.layer_norm(x_BD, x_BD.shape[-1:], weight_D, torch.from_numpy(norm.bias_D), norm.epsilon)


def activations(h_BD: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    """a of each neuron, (..., F): relu(W1 h + b1); with two rows a neuron, bias (F, 2), silu of one times the other."""
    products = F.linear(h_BD, rows, bias.flatten())
    if bias.dim() == 1:
        return F.relu(products)
    gate, up = products.unflatten(-1, bias.shape).unbind(-1)
    return F.silu(gate) * up


def turned(vectors: Tensor, turns: Tensor | None) -> Tensor:
    """Queries or keys (..., K) turned by their positions: values k and k + K / 2 by the angle whose cosine and sine are
    turns[..., k] and turns[..., k + K / 2]; None where positions are learned."""
    if turns is None:
        return vectors
    cosine, sine = turns.chunk(2, -1)
    real, imaginary = vectors.chunk(2, -1)
    return torch.cat([real * cosine - imaginary * sine, imaginary * cosine + real * sine], -1)


def mlp(
    x_BD: Tensor, units_N: Tensor, mask_BN: Tensor, norm: Norm | None, first: Projection, second: Projection
) -> Tensor:
    """x + sum_{j in S} a_j W2[:, j] + b2, (B, D)."""
    bias = torch.from_numpy(first.bias)
    rows = unpack(first.rows).unflatten(0, (len(bias), -1))[units_N].flatten(0, 1)
    a_BN = activations(normed(x_BD, norm), rows, bias[units_N]).masked_fill(~mask_BN, 0)
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
    turns_PK: Tensor | None = None,
) -> Tensor:
    """x + sum_{h in A} W_o[:, h] head_h + b_o at each sequence's last position, (B, D), from all inputs."""
    h_BTD = normed(x_BTD, norm)
    place_BT = torch.arange(x_BTD.shape[1]) - start_B[:, None]
    turns_BT1K = None if turns_PK is None else turns_PK[place_BT.clamp(min=0)][:, :, None]

    def projected(part: Projection) -> Tensor:
        return (h_BTD @ unpack(part.rows).T + torch.from_numpy(part.bias)).unflatten(-1, (-1, head_dim))

    q_BHK, k_BTGK, v_BTGK = turned(projected(queries), turns_BT1K)[:, -1], projected(keys), projected(values)
    sharing = q_BHK.shape[1] // k_BTGK.shape[2]
    k_BTHK, v_BTHK = (part.repeat_interleave(sharing, 2) for part in (turned(k_BTGK, turns_BT1K), v_BTGK))
    scores_BHT = torch.einsum("bhk,bthk->bht", q_BHK, k_BTHK) * head_dim**-0.5
    shares_BHT = scores_BHT.masked_fill((place_BT < 0)[:, None], -torch.inf).softmax(-1)
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

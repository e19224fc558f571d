"""What rows are multiplied with: a vector normalised and, for int8 rows, in 16 bits. Shapes: B sequences, D width."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.decode import kernels
from dejavu.decode.weights import Norm


def reading(x_BD: np.ndarray, norm: Norm | None, storage: str) -> tuple[np.ndarray, np.ndarray]:
    """x normalised (where there is a norm); for int8 in 16 bits; and the scale of each row."""
    scale_B, h_BD = np.ones(len(x_BD), np.float32), x_BD
    if norm is not None:
        h_BD = np.empty_like(x_BD)
        kernels.layer_norm(x_BD, norm.weight_D, norm.bias_D, norm.epsilon, h_BD)
    if storage == "int8":
        q_BD = np.empty(h_BD.shape, np.int16)
        kernels.quantised_rows(h_BD, q_BD, scale_B)
        return q_BD, scale_B
    return h_BD, scale_B


def normed(x_BTD: Tensor, norm: Norm) -> Tensor:
    """LayerNorm over a whole prompt."""
    width = x_BTD.shape[-1:]
    return F.layer_norm(x_BTD, width, torch.from_numpy(norm.weight_D), torch.from_numpy(norm.bias_D), norm.epsilon)

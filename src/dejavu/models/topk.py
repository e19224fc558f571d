"""The counting rule and the exact top-k that every selector, metric and budget shares.

`torch.topk` breaks ties as it likes, so that the same scores may give another set on another device or batch size. Here
a row keeps everything above its cut, the k-th largest score, and fills up with the first units that equal it.

Shape suffixes: N tokens, U units (neurons or heads).

Milliseconds of processor time for (4096, 1024), k = 50 to 512, one thread of an AVX2 core; "ReLU": 90 % zeros:

    way                       distinct scores   ReLU
    stable sort                 277 to 289     97 to 109
    torch.kthvalue + ties       310 to 323    180 to 402
    torch.topk + ties            56 to 70      36 to 47
    numpy.partition + ties       26 to 30      19 to 44   (this one)
"""

import math

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18  # scores worked on at a time: they and their masks stay in the cache of one core
DIGITS = 9  # after the point: (1 - 0.55) * 10 is the half it says, not 4.499999999999999


def kept(ratio: float, units: int) -> int:
    """How many of `units` are computed when the fraction `ratio` is not: floor((1 - ratio) * units + 0.5).

    At least 1 unless the ratio is 1. Raises ValueError for a ratio outside 0 to 1.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"the ratio {ratio} is the fraction NOT computed: it lies between 0 and 1")
    if ratio == 1:
        return 0
    return max(1, math.floor(round((1 - ratio) * units + 0.5, DIGITS)))


def top_k_mask(scores_NU: Tensor, k: int) -> Tensor:
    """True at the k largest scores of each row, exactly k, ties to the lower index; bool (N, U).

    -0.0 equals 0.0. Raises FloatingPointError for NaN, which has no place in an order, ValueError for k outside 0 to U.
    """
    rows, units = scores_NU.shape
    if not 0 <= k <= units:
        raise ValueError(f"{k} of {units} units cannot be kept")
    scores_NU = scores_NU.detach()
    if scores_NU.numel() and bool(scores_NU.amax().isnan()):
        raise FloatingPointError(f"the scores of {rows} tokens by {units} units hold NaN: they give no order")
    if k in (0, units):
        return torch.full((rows, units), k > 0, device=scores_NU.device)
    if scores_NU.dtype != torch.float64:
        scores_NU = scores_NU.float()
    mask_NU = torch.empty(rows, units, dtype=torch.bool, device=scores_NU.device)
    step = max(1, CHUNK // units) if scores_NU.device.type == "cpu" else max(1, rows)
    for first in range(0, rows, step):
        chunk = slice(first, first + step)
        mask_NU[chunk] = _mask(scores_NU[chunk], k)
    return mask_NU


def _mask(scores_NU: Tensor, k: int) -> Tensor:
    cut_N1 = _cut_numpy(scores_NU, k) if scores_NU.device.type == "cpu" else _cut_torch(scores_NU, k)
    mask_NU = scores_NU >= cut_N1
    surplus_N = _count(mask_NU)[:, 0] > k
    if bool(surplus_N.any()):
        scores_NU, cut_N1 = scores_NU[surplus_N], cut_N1[surplus_N]
        above_NU, tied_NU = scores_NU > cut_N1, scores_NU == cut_N1
        places_NU = tied_NU.cumsum(-1, dtype=torch.int32)
        mask_NU[surplus_N] = above_NU | (tied_NU & (places_NU <= k - _count(above_NU)))
    return mask_NU


def _cut_torch(scores_NU: Tensor, k: int) -> Tensor:
    return scores_NU.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _cut_numpy(scores_NU: Tensor, k: int) -> Tensor:
    """The k-th largest score of each row, (N, 1).

    numpy's selection stalls where a score that is most frequent is also the pivot and nothing is below it. Scores of
    ReLU neurons are mostly their lowest value, 0: rows that are cut there need no selection, and with the sign changed
    the others leave the zeros behind at once.
    """
    negative_NU = -scores_NU.numpy()
    cut_N1 = negative_NU.max(axis=1, keepdims=True)
    selected_N = np.count_nonzero(negative_NU < cut_N1, axis=1) > k
    if selected_N.any():
        rows_NU = negative_NU if selected_N.all() else negative_NU[selected_N]
        cut_N1[selected_N] = np.partition(rows_NU, k - 1, axis=1)[:, k - 1 : k]
    return torch.from_numpy(-cut_N1)


def _count(mask_NU: Tensor) -> Tensor:
    """True values per row, int32 (N, 1). As bytes, since torch counts booleans ten times slower."""
    return mask_NU.view(torch.uint8).sum(-1, keepdim=True, dtype=torch.int32)

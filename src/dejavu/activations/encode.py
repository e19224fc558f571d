"""The neuron contributions worth storing, as compressed rows.

On the CPU all of it is NumPy: torch's own nonzero and selection take several times as long, and this runs on several
threads at once, where torch would start a team of threads for each.

Shape suffixes: N tokens, F neurons, S stored contributions of all tokens.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu.errors import DataError


def compressed(c_NF: Tensor, half_NF: Tensor, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The contributions above 0 (in float16), of each token at most the `kept` largest, of equal ones the first.

    c_NF     contributions, float32, which decide what is largest
    half_NF  the same in float16, which are stored

    Returns how many there are per token (N, uint16), their neurons, ascending within a token (S, uint16), and their
    values (S, float16). NaN is stored, for the writer to find. Raises DataError for a token with 65,536 of them.
    """
    if c_NF.device.type != "cpu":
        return _compressed_on_device(c_NF, half_NF, kept)
    c, bits_NF = c_NF.numpy(), half_NF.numpy().view(np.uint16)
    if kept < bits_NF.shape[1]:
        crowded_N = (bits_NF != 0).sum(axis=1) > kept
        bits_NF = bits_NF.copy()
        bits_NF[crowded_N] *= top_mask(c[crowded_N], _kth_largest(c[crowded_N], kept), kept)
    return _rows(_places(bits_NF), bits_NF)


def top_mask(c_NF: Any, cut_N1: Any, kept: int) -> Any:
    """The `kept` largest of every row, ties to the lower index, and NaN; from each row's `kept`-th largest value.

    In what arrays of NumPy and tensors share.
    """
    mask_NF = ~(c_NF < cut_N1)
    tied_N = mask_NF.sum(1) > kept
    if tied_N.any():
        c_MF, cut_M1 = c_NF[tied_N], cut_N1[tied_N]
        above_MF, at_MF = c_MF > cut_M1, c_MF == cut_M1
        room_M1 = kept - above_MF.sum(1)[:, None]
        mask_NF[tied_N] = above_MF | (at_MF & (at_MF.cumsum(1) <= room_M1)) | (c_MF != c_MF)
    return mask_NF


def _kth_largest(c_NF: np.ndarray, k: int) -> np.ndarray:
    place = c_NF.shape[1] - k
    return np.partition(c_NF, place, axis=1)[:, place : place + 1]


def _places(bits_NF: np.ndarray) -> np.ndarray:
    """Flat positions of what is not 0, int64 (S,).

    Where at most a tenth of a mask is set, np.flatnonzero looks for one element after another, which takes three times
    as long as its walk through all of them: ones at the end make it walk.
    """
    extra = bits_NF.size // 8
    mask = np.ones(bits_NF.size + extra, dtype=bool)
    np.not_equal(bits_NF.reshape(-1), 0, out=mask[: bits_NF.size])
    flat = np.flatnonzero(mask)
    return flat[: len(flat) - extra]


def _rows(flat_S: np.ndarray, bits_NF: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, neurons = bits_NF.shape
    row_starts = np.arange(tokens + 1) * neurons
    count_N = np.diff(np.searchsorted(flat_S, row_starts))
    # Positions and row starts modulo 65,536 differ by the neuron just as the whole numbers do.
    index_S = flat_S.astype(np.uint16) - np.repeat(row_starts[:-1].astype(np.uint16), count_N)
    return _counts(count_N), index_S, bits_NF.reshape(-1).take(flat_S).view(np.float16)


def _compressed_on_device(c_NF: Tensor, half_NF: Tensor, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if kept < c_NF.shape[1]:
        cut_N1 = torch.topk(c_NF, kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        half_NF = torch.where(top_mask(c_NF, cut_N1, kept), half_NF, 0)
    flat_S = half_NF.reshape(-1).nonzero().view(-1)
    count_N = (half_NF != 0).sum(dim=1).cpu().numpy()
    index_S = (flat_S % c_NF.shape[1]).int().cpu().numpy().astype(np.uint16)
    return _counts(count_N), index_S, half_NF.reshape(-1)[flat_S].cpu().numpy()


def _counts(count_N: np.ndarray) -> np.ndarray:
    if count_N.max(initial=0) > np.iinfo(np.uint16).max:
        raise DataError("a token has 65,536 active neurons, too many to count in 16 bits: use collect.encoding=dense")
    return count_N.astype(np.uint16)

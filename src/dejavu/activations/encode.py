"""The neuron contributions worth storing, as compressed rows.

Shape suffixes: N tokens, F neurons, S stored contributions of all tokens.
"""

from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from dejavu.errors import DataError
from dejavu.models.topk import top_k_mask

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # counts, neurons, values


def compressed(c_NF: Tensor, half_NF: Tensor, kept: int) -> Rows:
    """The contributions above 0 (in float16), of each token at most the `kept` largest, of equal ones the first.

    c_NF     contributions, float32, which decide what is largest
    half_NF  the same in float16, which are stored

    Returns how many there are per token (N, uint16), their neurons, ascending within a token (S, uint16), and their
    values (S, float16). NaN is stored, for the writer to find. Raises DataError for a token with 65,536 of them.
    """
    if kept < c_NF.shape[1]:
        with suppress(FloatingPointError):  # NaN has no order: all of it is stored
            half_NF = torch.where(top_k_mask(c_NF, kept), half_NF, 0)
    if half_NF.device.type == "cpu":
        return _rows_of_array(half_NF.numpy())
    return _rows_of_tensor(half_NF)


def _rows_of_array(half_NF: np.ndarray) -> Rows:
    # Not torch: its nonzero takes four times as long on a CPU.
    bits_NF = half_NF.view(np.uint16)
    tokens, neurons = bits_NF.shape
    flat_S = _places(bits_NF)
    row_starts = np.arange(tokens + 1) * neurons
    count_N = np.diff(np.searchsorted(flat_S, row_starts))
    # Positions and row starts modulo 65,536 differ by the neuron, just as the whole numbers do.
    index_S = flat_S.astype(np.uint16) - np.repeat(row_starts[:-1].astype(np.uint16), count_N)
    return _counts(count_N), index_S, half_NF.reshape(-1).take(flat_S)


def _rows_of_tensor(half_NF: Tensor) -> Rows:
    flat_S = half_NF.reshape(-1).nonzero().view(-1)
    count_N = (half_NF != 0).sum(dim=1).cpu().numpy()
    index_S = (flat_S % half_NF.shape[1]).cpu().numpy().astype(np.uint16)
    return _counts(count_N), index_S, half_NF.reshape(-1)[flat_S].cpu().numpy()


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


def _counts(count_N: np.ndarray) -> np.ndarray:
    if count_N.max(initial=0) > np.iinfo(np.uint16).max:
        raise DataError("a token has 65,536 active neurons, too many to count in 16 bits: use collect.encoding=dense")
    return count_N.astype(np.uint16)

"""What happens to vectors between two products: norm, rounding to 16 bits, the k best of many, attention of one head.

All of it serial and small. Shape suffixes: B sequences, D width, U units, K head_dim, T positions, P threads.
"""

import numpy as np
from numba import float32, njit, types
from numba.extending import overload

from dejavu.decode.rows import OPTIONS, quantised

# Sums may be taken in any order, eight at a time, but NaN and infinity have to stay what they are.
STRICT = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy", "cache": True}


@njit(**STRICT)
def layer_norm(x_BD, weight_D, bias_D, epsilon):
    """LayerNorm of each row, its sums in float64. A norm without weights leaves rows as they are."""
    batch, width = x_BD.shape
    out_BD = np.empty((batch, width), dtype=np.float32)
    if len(weight_D) == 0:
        out_BD[:] = x_BD
        return out_BD
    for b in range(batch):
        mean, square = 0.0, 0.0
        for d in range(width):
            mean += x_BD[b, d]
        mean /= width
        for d in range(width):
            square += (x_BD[b, d] - mean) ** 2
        factor = 1.0 / np.sqrt(square / width + epsilon)
        for d in range(width):
            out_BD[b, d] = float32((x_BD[b, d] - mean) * factor) * weight_D[d] + bias_D[d]
    return out_BD


@njit(**STRICT)
def rms_norm(x_BD, weight_D, epsilon):
    """RMSNorm of each row, its sum in float64."""
    batch, width = x_BD.shape
    out_BD = np.empty((batch, width), dtype=np.float32)
    for b in range(batch):
        square = 0.0
        for d in range(width):
            square += x_BD[b, d] * x_BD[b, d]
        factor = 1.0 / np.sqrt(square / width + epsilon)
        for d in range(width):
            out_BD[b, d] = float32(x_BD[b, d] * factor) * weight_D[d]
    return out_BD


def operand(h_BD, data_RC):
    """What rows of a stored matrix are multiplied with, and the scale of each: int8 rows want 16-bit integers.

    Compiled per storage type below; Python never runs it.
    """
    raise NotImplementedError


@overload(operand)
def _operand(h_BD, data_RC):
    if data_RC.dtype != types.int8:
        return lambda h_BD, data_RC: (h_BD, np.ones(len(h_BD), dtype=np.float32))

    def rounded(h_BD, data_RC):
        out_BD, scale_B = np.empty(h_BD.shape, dtype=np.int16), np.empty(len(h_BD), dtype=np.float32)
        for b in range(len(h_BD)):
            scale_B[b] = quantised(h_BD[b], out_BD[b])
        return out_BD, scale_B

    return rounded


@njit(**STRICT)
def at_least(keys_U, cut):
    """How many keys are at or above the cut."""
    total = 0
    for first in range(0, len(keys_U), 256):
        part = np.int16(0)
        for u in range(first, min(first + 256, len(keys_U))):
            part = np.int16(part + np.int16(keys_U[u] >= cut))
        total += part
    return total


@njit(**STRICT)
def best(scores_U, units_K):
    """The units of largest score in rising order, ties to the lower index, without sorting; False when a score is NaN.

    Scores become integers of the same order, and the k-th largest is found by bisection: counting how many lie above a
    value is done eight at a time, so all thirty passes cost less than one that branches.
    """
    count, k = len(scores_U), len(units_K)
    if k == 0:
        return True
    bits_U, keys_U, broken = scores_U.view(np.int32), np.empty(count, dtype=np.int32), False
    for u in range(count):
        broken |= scores_U[u] != scores_U[u]
        bits = bits_U[u]
        keys_U[u] = bits if bits >= 0 else np.int32(-(bits & np.int32(0x7FFFFFFF)))  # -0 is 0
    if broken:
        return False
    low, high = np.int64(keys_U.min()), np.int64(keys_U.max()) + 1  # at least k keys reach low, fewer than k high
    while high - low > 1:
        middle = (low + high) // 2
        reach = at_least(keys_U, np.int32(middle))
        if reach >= k:
            low = middle
        else:
            high = middle
        if reach == k:
            break
    cut, found = np.int32(low), 0
    tied = k - at_least(keys_U, np.int32(low + 1)) if low < 0x7FFFFFFF else k
    chosen_U = np.empty(count + 1, dtype=np.int64)
    for u in range(count):
        tie = keys_U[u] == cut
        chosen_U[found] = u
        found += (keys_U[u] > cut) | (tie & (tied > 0))
        tied -= tie
    units_K[:] = chosen_U[:k]
    return True


@njit(**OPTIONS)
def attend(query_K, keys_TK, values_TK, first, last, scaling, out_K, scores_T):
    """softmax(q K' scaling) V over positions first to last."""
    size = len(query_K)
    largest = float32(-np.inf)
    for t in range(first, last):
        total = float32(0)
        for k in range(size):
            total += query_K[k] * keys_TK[t, k]
        scores_T[t] = total * scaling
        largest = max(largest, scores_T[t])
    weight = float32(0)
    out_K[:] = 0
    for t in range(first, last):
        share = np.exp(scores_T[t] - largest)
        weight += share
        for k in range(size):
            out_K[k] += share * values_TK[t, k]
    for k in range(size):
        out_K[k] /= weight


@njit(**OPTIONS)
def add_partial(sums_PBD, bias_D, out_BD):
    """out += bias and the threads' sums, in their order."""
    for b in range(out_BD.shape[0]):
        for d in range(out_BD.shape[1]):
            total = sums_PBD[0, b, d]
            for p in range(1, sums_PBD.shape[0]):
                total += sums_PBD[p, b, d]
            out_BD[b, d] += total + bias_D[d]

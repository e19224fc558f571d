"""The engine's three parallel loops on a CPU: predictor, MLP half and attention half of a block, each one launch.

No barrier is needed inside a half block: a thread that has a neuron's activation adds that neuron's column of fc2 at
once, and a thread that has a head's output adds its columns of out_proj. Each thread adds into a sum of its own; the
sums are then added in the order of the threads, so the same number of threads gives the same bits.

Shape suffixes: B sequences, D width, N chosen units (the union of the batch), U units, K head_dim, T positions,
P threads, W pending positions. `mask_BN` says which sequence chose which unit.
"""

import numpy as np
from numba import float32, njit, prange

from dejavu.decode.rows import add1, add4, dot4, quantised

OPTIONS = {"fastmath": True, "error_model": "numpy", "nogil": True, "cache": True}


@njit(**OPTIONS)
def add_units(data_RC, scale_R, rows_G, values_GB, count, sums_BD):
    """sums[b] += sum over the first `count` rows of their value for b, four at a time; those without are skipped."""
    batch = sums_BD.shape[0]
    factors_g = np.empty(4, dtype=np.float32)
    for first in range(0, count, 4):
        if first + 4 <= count:
            for b in range(batch):
                for g in range(4):
                    factors_g[g] = values_GB[first + g, b] * scale_R[rows_G[first + g]]
                if factors_g[0] != 0 or factors_g[1] != 0 or factors_g[2] != 0 or factors_g[3] != 0:
                    add4(data_RC, rows_G[first : first + 4], factors_g, sums_BD[b])
        else:
            for g in range(first, count):
                for b in range(batch):
                    if values_GB[g, b] != 0:
                        add1(data_RC, rows_G[g], values_GB[g, b] * scale_R[rows_G[g]], sums_BD[b])


@njit(**OPTIONS)
def neurons_part(units_N, mask_BN, x_BD, x_scale_B, w1, s1, b1, w2, s2, sums_BD, read):
    """One thread's neurons: rows of fc1, ReLU, rows of the transposed fc2 for those above zero.

    `read` counts rows of fc1 and of fc2 that were read.
    """
    batch, count = mask_BN.shape
    rows_G, values_GB = np.empty(64, dtype=np.int64), np.empty((64, batch), dtype=np.float32)
    rows_g, out_g = np.empty(4, dtype=np.int64), np.empty(4, dtype=np.float32)
    kept = 0
    for first in range(0, count, 4):
        size = min(4, count - first)
        for g in range(4):  # a short last group reads its last row again, from the cache
            rows_g[g] = units_N[first + min(g, size - 1)]
        for b in range(batch):
            dot4(w1, s1, rows_g, x_BD[b], x_scale_B[b], out_g)
            for g in range(size):
                value = out_g[g] + b1[rows_g[g]]
                values_GB[kept + g, b] = value if value > 0 and mask_BN[b, first + g] else float32(0)
        read[0] += size
        target = kept
        for g in range(size):  # neurons at zero for every sequence need no row of fc2
            live = False
            for b in range(batch):
                live = live or values_GB[kept + g, b] != 0
            if live:
                rows_G[target] = rows_g[g]
                for b in range(batch):
                    values_GB[target, b] = values_GB[kept + g, b]
                target += 1
        kept = target
        if kept > 60:
            add_units(w2, s2, rows_G, values_GB, kept, sums_BD)
            read[1] += kept
            kept = 0
    add_units(w2, s2, rows_G, values_GB, kept, sums_BD)
    read[1] += kept


@njit(parallel=True, **OPTIONS)
def neurons(units_N, mask_BN, x_BD, x_scale_B, w1, s1, b1, w2, s2, sums_PBD, read_P2):
    """sum_{j in S} relu(W1[j] x + b1[j]) W2[:, j] for each sequence's own S, as one partial sum per thread."""
    threads, count = sums_PBD.shape[0], len(units_N)
    for p in prange(threads):
        first, last = count * p // threads, count * (p + 1) // threads
        sums_PBD[p] = 0
        neurons_part(
            units_N[first:last], mask_BN[:, first:last], x_BD, x_scale_B, w1, s1, b1, w2, s2, sums_PBD[p], read_P2[p]
        )


@njit(**OPTIONS)
def head_rows(data_RC, scale_R, bias_R, first_row, x_D, x_scale, out_K):
    """out = the head_dim rows from `first_row` on, times x, plus bias."""
    rows_g, out_g = np.empty(4, dtype=np.int64), np.empty(4, dtype=np.float32)
    size = len(out_K)
    for first in range(0, size, 4):
        for g in range(4):
            rows_g[g] = first_row + min(first + g, size - 1)
        dot4(data_RC, scale_R, rows_g, x_D, x_scale, out_g)
        for g in range(min(4, size - first)):
            out_K[first + g] = out_g[g] + bias_R[first_row + first + g]


@njit(**OPTIONS)
def catch_up(head, b, filled_BH, pending_BWD, pending_scale_BW, end, wk, sk, bk, wv, sv, bv, keys_TK, values_TK):
    """K and V of a head at its positions from `filled` to `end`, from the inputs kept for them."""
    size, window = keys_TK.shape[1], pending_BWD.shape[1]
    for position in range(filled_BH[b, head], end):
        slot = position % window
        x_D, x_scale = pending_BWD[b, slot], pending_scale_BW[b, slot]
        head_rows(wk, sk, bk, head * size, x_D, x_scale, keys_TK[position])
        head_rows(wv, sv, bv, head * size, x_D, x_scale, values_TK[position])
    rows = max(0, end - filled_BH[b, head]) * 2 * size
    filled_BH[b, head] = max(filled_BH[b, head], end)
    return rows


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


@njit(parallel=True, **OPTIONS)
def heads(
    heads_N, mask_BN, pending_BWD, pending_scale_BW, start_B, length_B, filled_BH, wq, sq, bq, wk, sk, bk, wv, sv, bv,
    wo, so, keys_BHTK, values_BHTK, scaling, sums_PBD, read_P4,
):  # fmt: skip
    """sum_{h in A} W_o[:, h] head_h for each sequence's own A at its newest position, as one partial sum per thread.

    The newest position's input is already among the pending ones. Every chosen head first catches up on its keys and
    values. `read` counts rows of q, k, v (k and v together) and o.
    """
    threads, count, batch = sums_PBD.shape[0], len(heads_N), mask_BN.shape[0]
    size, window = keys_BHTK.shape[3], pending_BWD.shape[1]
    for p in prange(threads):
        sums_PBD[p] = 0
        query_K, scores_T = np.empty(size, dtype=np.float32), np.empty(keys_BHTK.shape[2], dtype=np.float32)
        out_K = np.empty(size, dtype=np.float32)
        rows_K, values_KB = np.empty(size, dtype=np.int64), np.zeros((size, batch), dtype=np.float32)
        for n in range(count * p // threads, count * (p + 1) // threads):
            head = heads_N[n]
            values_KB[:] = 0
            for b in range(batch):
                if not mask_BN[b, n]:
                    continue
                end = length_B[b]
                keys_TK, values_TK = keys_BHTK[b, head], values_BHTK[b, head]
                read_P4[p, 1] += catch_up(
                    head, b, filled_BH, pending_BWD, pending_scale_BW, end, wk, sk, bk, wv, sv, bv, keys_TK, values_TK
                )
                slot = (end - 1) % window
                head_rows(wq, sq, bq, head * size, pending_BWD[b, slot], pending_scale_BW[b, slot], query_K)
                read_P4[p, 0] += size
                attend(query_K, keys_TK, values_TK, start_B[b], end, scaling, out_K, scores_T)
                for k in range(size):
                    values_KB[k, b] = out_K[k]
            for k in range(size):
                rows_K[k] = head * size + k
            add_units(wo, so, rows_K, values_KB, size, sums_PBD[p])
            read_P4[p, 2] += size


@njit(parallel=True, **OPTIONS)
def flush(
    filled_BH, pending_BWD, pending_scale_BW, length_B, wk, sk, bk, wv, sv, bv, keys_BHTK, values_BHTK, read_P
):  # fmt: skip
    """Every head of every sequence catches up, so that no pending input is needed any more."""
    threads, (batch, count) = len(read_P), filled_BH.shape
    for p in prange(threads):
        for head in range(count * p // threads, count * (p + 1) // threads):
            for b in range(batch):
                read_P[p] += catch_up(
                    head, b, filled_BH, pending_BWD, pending_scale_BW, length_B[b], wk, sk, bk, wv, sv, bv,
                    keys_BHTK[b, head], values_BHTK[b, head],
                )  # fmt: skip


@njit(parallel=True, **OPTIONS)
def project(data_RC, scale_R, bias_R, x_BC, x_scale_B, relu, threads, out_BR):
    """out[b] = W x[b] + bias for all rows, optionally relu: the two halves of a predictor, the output embedding."""
    count, batch = data_RC.shape[0], x_BC.shape[0]
    for p in prange(threads):
        rows_g, out_g = np.empty(4, dtype=np.int64), np.empty(4, dtype=np.float32)
        first, last = count * p // threads, count * (p + 1) // threads
        for row in range(first, last, 4):
            size = min(4, last - row)
            for g in range(4):
                rows_g[g] = row + min(g, size - 1)
            for b in range(batch):
                dot4(data_RC, scale_R, rows_g, x_BC[b], x_scale_B[b], out_g)
                for g in range(size):
                    value = out_g[g] + bias_R[row + g]
                    out_BR[b, row + g] = max(value, float32(0)) if relu else value


@njit(**OPTIONS)
def add_partial(sums_PBD, bias_D, out_BD):
    """out += bias and the threads' sums, in their order."""
    for b in range(out_BD.shape[0]):
        for d in range(out_BD.shape[1]):
            total = sums_PBD[0, b, d]
            for p in range(1, sums_PBD.shape[0]):
                total += sums_PBD[p, b, d]
            out_BD[b, d] += total + bias_D[d]


@njit(error_model="numpy", cache=True)
def layer_norm(x_BD, weight_D, bias_D, epsilon, out_BD):
    """LayerNorm of each row, sums in float64."""
    width = x_BD.shape[1]
    for b in range(x_BD.shape[0]):
        mean, square = 0.0, 0.0
        for d in range(width):
            mean += x_BD[b, d]
        mean /= width
        for d in range(width):
            square += (x_BD[b, d] - mean) ** 2
        factor = 1.0 / np.sqrt(square / width + epsilon)
        for d in range(width):
            out_BD[b, d] = float32((x_BD[b, d] - mean) * factor) * weight_D[d] + bias_D[d]


@njit(error_model="numpy", cache=True)
def quantised_rows(x_BD, out_BD, scale_B):
    """Each row in 16 bits, for int8 weights."""
    for b in range(x_BD.shape[0]):
        scale_B[b] = quantised(x_BD[b], out_BD[b])


@njit(error_model="numpy", cache=True)
def top_k(scores_U, k, work_U, units_k):
    """The k units of largest score in rising order, ties to the lower index, without sorting: quickselect on a copy.

    Returns False when a score is NaN.
    """
    count = len(scores_U)
    for u in range(count):
        if scores_U[u] != scores_U[u]:
            return False
        work_U[u] = scores_U[u]
    low, high, target = 0, count - 1, k - 1  # the k-th largest ends up at `target`
    while low < high:
        pivot, left, right = work_U[(low + high) // 2], low, high
        while left <= right:
            while work_U[left] > pivot:
                left += 1
            while work_U[right] < pivot:
                right -= 1
            if left <= right:
                work_U[left], work_U[right] = work_U[right], work_U[left]
                left += 1
                right -= 1
        if target <= right:
            high = right
        elif target >= left:
            low = left
        else:
            break
    cut, above = work_U[target], 0
    for u in range(count):
        above += scores_U[u] > cut
    tied, found = k - above, 0
    for u in range(count):
        if scores_U[u] > cut or (scores_U[u] == cut and tied > 0):
            tied -= scores_U[u] == cut
            units_k[found] = u
            found += 1
    return True

"""The engine's loops on a CPU: predictor, MLP half of a block, output embedding (`attention`: its attention half).

No barrier is needed inside a half block: a thread that has a neuron's activation adds that neuron's column of W2 at
once, and a thread that has a head's output adds its columns of W_o. Each thread adds into a sum of its own; the
sums are then added in the order of the threads, so the same number of threads gives the same bits. A half block is one
parallel launch, a predictor two. What differs between kinds of models is in `kinds`.

Shape suffixes: B sequences, D width, N chosen units (the union of the batch), U units, R rows, K head_dim, T positions,
P threads, W pending positions, C counts, G key/value groups. `mask_BN` says which sequence chose which unit. `w`, `s`,
`b`: a stored matrix, the scales of its rows and a bias.
"""

import numpy as np
from numba import float32, njit, prange
from numba.core.cpu_options import ParallelOptions

from dejavu.decode.kinds import activation, normalised, products
from dejavu.decode.rows import OPTIONS, add1, add4, dot4
from dejavu.decode.vectors import add_partial, best, operand

# Numba would also spread array assignments over threads, each at the price of a launch.
_NOT = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
PRANGE_ONLY = ParallelOptions(dict.fromkeys(_NOT, False) | {"prange": True})
# Written out, since Numba compiles a function anew for every literal that it is called with.
ZERO, ONE, YES = np.int64(0), np.int64(1), np.bool_(True)
BUFFER = 64  # neurons whose activations wait to be added together


@njit(**OPTIONS)
def four(units_N, first, last):
    """Four units from `first` on; past the last one it is named again, and its row then read from the cache."""
    end = last - 1
    return (
        units_N[min(first, end)],
        units_N[min(first + 1, end)],
        units_N[min(first + 2, end)],
        units_N[min(first + 3, end)],
    )


@njit(**OPTIONS)
def neighbours(first, last):
    """Four row numbers from `first` on, not past the last."""
    end = last - 1
    return min(first, end), min(first + 1, end), min(first + 2, end), min(first + 3, end)


@njit(**OPTIONS)
def some_rows(p, threads, x_BC, scale_B, w, s, bias, relu, out_BR):
    """Thread p's share of out = W x + bias, optionally relu."""
    count, groups = w.shape[0], (w.shape[0] + 3) // 4
    for group in range(groups * p // threads, groups * (p + 1) // threads):
        first = 4 * group
        rows, after = neighbours(first, count), neighbours(first + 4, count)
        for b in range(len(x_BC)):
            found = dot4(w, s, rows, after, x_BC, b, scale_B[b])
            for g in range(min(4, count - first)):
                value = found[g] + bias[first + g]
                out_BR[b, first + g] = max(value, float32(0)) if relu else value


@njit(parallel=PRANGE_ONLY, **OPTIONS)
def project(x_BC, scale_B, w, s, b, relu, threads, out_BR):
    """out = W x + bias for all rows, optionally relu."""
    for p in prange(threads):
        some_rows(p, threads, x_BC, scale_B, w, s, b, relu, out_BR)


@njit(**OPTIONS)
def normed_project(x_BD, out_BR, norm_weight, norm_bias, epsilon, w, s, b, relu, threads):
    """Rows times the normed vectors: the output embedding, a predictor's first half."""
    h_BD, scale_B = operand(normalised(x_BD, norm_weight, norm_bias, epsilon), w)
    project(h_BD, scale_B, w, s, b, relu, threads, out_BR)


@njit(**OPTIONS)
def add_units(w, s, rows_G, values_GB, count, first, last, skip, sums_BD):
    """sums[b] += sum over the first `count` rows of their value for b, columns first to last; `skip`: not of zeros."""
    whole = count - count % 4
    for place in range(0, whole, 4):
        rows, after = four(rows_G, place, count), four(rows_G, place + 4, count)
        r0, r1, r2, r3 = rows
        for b in range(len(sums_BD)):
            factors = (
                values_GB[place, b] * s[r0], values_GB[place + 1, b] * s[r1], values_GB[place + 2, b] * s[r2],
                values_GB[place + 3, b] * s[r3],
            )  # fmt: skip
            if not skip or factors[0] != 0 or factors[1] != 0 or factors[2] != 0 or factors[3] != 0:
                add4(w, rows, after, factors, first, last, sums_BD, b)
    for place in range(whole, count):
        for b in range(len(sums_BD)):
            if not skip or values_GB[place, b] != 0:
                add1(w, rows_G[place], values_GB[place, b] * s[rows_G[place]], first, last, sums_BD, b)


@njit(parallel=PRANGE_ONLY, **OPTIONS)
def score(hidden_BR, w, s, b, threads, skip, scores_BU):
    """scores = W hidden + bias from the transposed matrix, each thread a stretch of units.

    Half of a hidden vector is zero after its ReLU, and rows of zeros are not read.
    """
    batch, count = hidden_BR.shape
    units, kept = w.shape[1], 0
    rows_R, values_RB = np.empty(count, dtype=np.int64), np.empty((count, batch), dtype=np.float32)
    for row in range(count):
        live = not skip
        for sequence in range(batch):
            values_RB[kept, sequence] = hidden_BR[sequence, row]
            live |= hidden_BR[sequence, row] != 0
        rows_R[kept] = row
        kept += live
        if kept == count:
            break
    step = ((units + threads - 1) // threads + 63) // 64 * 64  # whole turns for all threads but the last
    for p in prange(threads):
        first, last = min(p * step, units), min((p + 1) * step, units)
        for sequence in range(batch):
            scores_BU[sequence, first:last] = b[first:last]
        add_units(w, s, rows_R, values_RB, kept, first, last, skip, scores_BU)


@njit(**OPTIONS)
def choose(hidden_BR, scores_BU, units_BK, w, s, b, threads, skip):
    """A predictor's second half: all units' scores, and the k best of each sequence. False when a score is NaN."""
    score(hidden_BR, w, s, b, threads, skip, scores_BU)
    fine = True
    for row in range(len(hidden_BR)):
        fine &= best(scores_BU[row], units_BK[row])
    return fine


@njit(**OPTIONS)
def union(units_BK, active_B, units):
    """The sets of the active sequences as one rising list (N,), and which sequence chose which (B, N)."""
    batch, kept = units_BK.shape
    if batch == 1 and active_B[0]:
        return units_BK[0], np.ones((1, kept), dtype=np.bool_)
    chosen_BU, units_N, count = np.zeros((batch, units), dtype=np.bool_), np.empty(units, dtype=np.int64), 0
    for b in range(batch):
        if active_B[b]:
            for k in range(kept):
                chosen_BU[b, units_BK[b, k]] = True
    for unit in range(units):
        units_N[count] = unit
        count += chosen_BU[:, unit].any()
    mask_BN = np.empty((batch, count), dtype=np.bool_)
    for b in range(batch):
        for n in range(count):
            mask_BN[b, n] = chosen_BU[b, units_N[n]]
    return units_N[:count], mask_BN


@njit(**OPTIONS)
def some_neurons(first, last, units_N, mask_BN, h_BD, scale_B, w1, s1, b1, w2, s2, skip, sums_BD, read):
    """One thread's neurons: rows of W1, activation, rows of the transposed W2 for those that are not zero.

    `read` counts neurons whose rows of W1, and of W2, were read.
    """
    batch, width = sums_BD.shape
    rows_G, values_GB, kept = np.empty(BUFFER, dtype=np.int64), np.empty((BUFFER, batch), dtype=np.float32), 0
    for place in range(first, last, 4):
        rows, after = four(units_N, place, last), four(units_N, place + 4, last)
        size = min(4, last - place)
        for b in range(batch):
            found = products(w1, s1, b1, rows, after, h_BD, b, scale_B[b])
            for g in range(size):
                value = activation(found, g, b1, rows[g])
                values_GB[kept + g, b] = value if mask_BN[b, place + g] else float32(0)
        target = kept
        for g in range(size):  # neurons at zero for every sequence need no row of W2
            live = not skip
            for b in range(batch):
                live |= values_GB[kept + g, b] != 0
                values_GB[target, b] = values_GB[kept + g, b]
            rows_G[target] = rows[g]
            target += live
        kept = target
        if kept > BUFFER - 4:
            add_units(w2, s2, rows_G, values_GB, kept, ZERO, width, skip, sums_BD)
            read[1] += kept
            kept = 0
    add_units(w2, s2, rows_G, values_GB, kept, ZERO, width, skip, sums_BD)
    read[0] += last - first
    read[1] += kept


@njit(parallel=PRANGE_ONLY, **OPTIONS)
def mlp(
    x_BD, units_N, mask_BN, norm_weight, norm_bias, epsilon, w1, s1, b1, w2, s2, b2, skip, sums_PBD, read_PC,
    tap_weight, tap_bias, tap_epsilon, wd, sd, bd, relu, hidden_BR,
):  # fmt: skip
    """x += sum_{j in S} a_j W2[:, j] + b2 for each sequence's own S; a from W1, b1 and norm(x).

    `skip`: columns of W2 of neurons at zero are not read (latency with random weights is measured without).
    The arguments from `tap_weight` on are the first half of a predictor that reads x too; its rows stand in the same
    work list (`decode.overlap`; none: no rows).
    """
    threads, count = sums_PBD.shape[0], len(units_N)
    h_BD, scale_B = operand(normalised(x_BD, norm_weight, norm_bias, epsilon), w1)
    tap_BD, tap_scale_B = operand(
        normalised(x_BD[: len(x_BD) if len(wd) else 0], tap_weight, tap_bias, tap_epsilon), wd
    )
    for p in prange(threads):
        first, last = count * p // threads, count * (p + 1) // threads
        sums_PBD[p] = 0
        some_neurons(first, last, units_N, mask_BN, h_BD, scale_B, w1, s1, b1, w2, s2, skip, sums_PBD[p], read_PC[p])
        some_rows(p, threads, tap_BD, tap_scale_B, wd, sd, bd, relu, hidden_BR)
    add_partial(sums_PBD, b2, x_BD)


@njit(**OPTIONS)
def spread(groups_N, mask_BN, together):
    """Groups of neighbouring heads as those heads."""
    heads_N = np.empty(len(groups_N) * together, dtype=np.int64)
    heads_BN = np.empty((len(mask_BN), len(heads_N)), dtype=np.bool_)
    for n in range(len(heads_N)):
        heads_N[n] = groups_N[n // together] * together + n % together
        for b in range(len(mask_BN)):
            heads_BN[b, n] = mask_BN[b, n // together]
    return heads_N, heads_BN


@njit(**OPTIONS)
def chosen(choice):
    """Whether no score was NaN, and the union of the sets that a predictor chooses from its hidden vectors.

    What it chooses may be groups of heads that are computed `together`.
    """
    hidden_BR, scores_BU, units_BK, active_B, w, s, b, threads, skip, together = choice
    fine = choose(hidden_BR, scores_BU, units_BK, w, s, b, threads, skip)
    units_N, mask_BN = union(units_BK, active_B, len(b))
    if together > 1:
        units_N, mask_BN = spread(units_N, mask_BN, together)
    return fine, units_N, mask_BN


@njit(**OPTIONS)
def choose_mlp(x_BD, choice, half):
    """`mlp` over the neurons that a predictor chooses, in one call; how many they are, -1 for a score that is NaN."""
    fine, units_N, mask_BN = chosen(choice)
    if not fine:
        return -1
    mlp(x_BD, units_N, mask_BN, *half)
    return len(units_N)

"""The attention half of a block: keys and values that catch up, queries, scores, rows of W_o.

A head's query and the keys and values of its group come from rows of their matrices that lie side by side. Rotary
positions turn values k and k + K / 2 of a query or key together, so those two rows are multiplied together.
Names and shapes as in `kernels`.
"""

import numpy as np
from numba import njit, prange
from numba.extending import overload

from dejavu.decode.kernels import ONE, PRANGE_ONLY, YES, ZERO, add_units, chosen, neighbours, some_rows
from dejavu.decode.kinds import normalised
from dejavu.decode.rows import OPTIONS, dot4
from dejavu.decode.vectors import add_partial, attend, operand


@njit(**OPTIONS)
def catch_up(first_row, begin, end, pending_WD, scale_W, w, s, bias, out_TK):
    """A head's rows times its pending inputs at positions `begin` to `end`: its keys, or values, or newest query.

    Rows outside, positions inside, so that a row is read once however many positions wait.
    """
    size, window = out_TK.shape[1], len(pending_WD)
    last = first_row + size
    for first in range(first_row, last, 4):
        rows, after = neighbours(first, last), neighbours(first + 4, last)
        slot = begin % window
        for position in range(begin, end):
            found = dot4(w, s, rows, after, pending_WD, slot, scale_W[slot])
            for g in range(min(4, last - first)):
                out_TK[position, first - first_row + g] = found[g] + bias[first + g]
            slot = slot + 1 if slot + 1 < window else 0


@njit(**OPTIONS)
def twins(k, half, first_row):
    """The rows of two pairs of values that turn together, not past the last pair."""
    a, b = first_row + min(k, half - 1), first_row + min(k + 1, half - 1)
    return a, b, a + half, b + half


@njit(**OPTIONS)
def catch_up_turned(first_row, begin, end, pending_WD, scale_W, w, s, bias, before, turns, out_TK):
    """As `catch_up`, each vector turned by its position, which is its number less `before`."""
    size, window = out_TK.shape[1], len(pending_WD)
    half = size // 2
    for first in range(0, half, 2):
        rows, after = twins(first, half, first_row), twins(first + 2, half, first_row)
        slot = begin % window
        for position in range(begin, end):
            found = dot4(w, s, rows, after, pending_WD, slot, scale_W[slot])
            for g in range(min(2, half - first)):
                k = first + g
                real, imaginary = found[g] + bias[rows[g]], found[g + 2] + bias[rows[g + 2]]
                cosine, sine = turns[position - before, k], turns[position - before, half + k]
                out_TK[position, k] = real * cosine - imaginary * sine
                out_TK[position, half + k] = imaginary * cosine + real * sine
            slot = slot + 1 if slot + 1 < window else 0


def placed(first_row, begin, end, pending_WD, scale_W, w, s, bias, before, turns, out_TK):
    """Keys or queries that know their position. Compiled per kind of positions below; Python never runs it."""
    raise NotImplementedError


@overload(placed)
def _placed(first_row, begin, end, pending_WD, scale_W, w, s, bias, before, turns, out_TK):
    def learned(first_row, begin, end, pending_WD, scale_W, w, s, bias, before, turns, out_TK):
        catch_up(first_row, begin, end, pending_WD, scale_W, w, s, bias, out_TK)

    def rotary(first_row, begin, end, pending_WD, scale_W, w, s, bias, before, turns, out_TK):
        catch_up_turned(first_row, begin, end, pending_WD, scale_W, w, s, bias, before, turns, out_TK)

    return rotary if turns.ndim == 2 else learned


@njit(**OPTIONS)
def complete(
    group, begin, end, start, pending_WD, scale_W, wk, sk, bk, wv, sv, bv, turns, keys_TK, values_TK
):  # fmt: skip
    """A group's keys and values at its pending positions. What is written is final, whoever else writes it too."""
    first_row = group * keys_TK.shape[1]
    placed(first_row, begin, end, pending_WD, scale_W, wk, sk, bk, start, turns, keys_TK)
    catch_up(first_row, begin, end, pending_WD, scale_W, wv, sv, bv, values_TK)


@njit(**OPTIONS)
def due(heads_N, mask_BN, sharing, filled_BG, length_B, period, offset):
    """(sequence, group) pairs, (count, 2), that catch up although no head of theirs is chosen: all once a period."""
    pairs = np.empty((filled_BG.size, 2), dtype=np.int64)
    count = 0
    for b in range(len(length_B)):
        if (length_B[b] + offset) % period != 0:
            continue
        chosen_G = np.zeros(filled_BG.shape[1], dtype=np.bool_)
        for n in range(len(heads_N)):
            chosen_G[heads_N[n] // sharing] |= mask_BN[b, n]
        for group in range(filled_BG.shape[1]):
            if not chosen_G[group] and filled_BG[b, group] < length_B[b]:
                pairs[count, 0], pairs[count, 1] = b, group
                count += 1
    return pairs[:count]


@njit(**OPTIONS)
def caught_up(heads_N, mask_BN, sharing, late, length_B, filled_BG):
    """Note whose keys and values are complete now."""
    for n in range(len(heads_N)):
        for b in range(len(length_B)):
            if mask_BN[b, n]:
                filled_BG[b, heads_N[n] // sharing] = length_B[b]
    for pair in range(len(late)):
        filled_BG[late[pair, 0], late[pair, 1]] = length_B[late[pair, 0]]


@njit(parallel=PRANGE_ONLY, **OPTIONS)
def attention(
    x_BD, heads_N, mask_BN, norm_weight, norm_bias, epsilon, wq, sq, bq, wk, sk, bk, wv, sv, bv, wo, so, bo,
    keys_BGTK, values_BGTK, pending_BWD, pending_scale_BW, start_B, length_B, filled_BG, period, offset, scaling, turns,
    sums_PBD, read_PC, tap_weight, tap_bias, tap_epsilon, wd, sd, bd, relu, hidden_BR,
):  # fmt: skip
    """x += sum_{h in A} W_o[:, h] head_h + b_o for each sequence's own A at its newest position.

    The newest normed input joins the pending ones. The key/value group of a chosen head first catches up on its keys
    and values; once in `period` tokens all do. A group whose heads two threads share is caught up by both, with the
    same numbers: waiting for each other would cost more. `read` counts rows of q, k and v together, and o. From
    `tap_weight` on: as in `mlp`.
    """
    threads, count, batch = sums_PBD.shape[0], len(heads_N), mask_BN.shape[0]
    size, window, sharing = keys_BGTK.shape[3], pending_BWD.shape[1], len(bq) // len(bk)
    h_BD, scale_B = operand(normalised(x_BD, norm_weight, norm_bias, epsilon), wq)
    for b in range(batch):
        slot = (length_B[b] - 1) % window
        pending_BWD[b, slot] = h_BD[b]
        pending_scale_BW[b, slot] = scale_B[b]
    tap_BD, tap_scale_B = operand(
        normalised(x_BD[: len(x_BD) if len(wd) else 0], tap_weight, tap_bias, tap_epsilon), wd
    )
    late = due(heads_N, mask_BN, sharing, filled_BG, length_B, period, offset)
    for p in prange(threads):
        sums_PBD[p] = 0
        query_TK, scores_T = np.empty((1, size), dtype=np.float32), np.empty(keys_BGTK.shape[2], dtype=np.float32)
        out_K = np.empty(size, dtype=np.float32)
        rows_K, values_KB = np.empty(size, dtype=np.int64), np.empty((size, batch), dtype=np.float32)
        ready_B = np.full(batch, -1, dtype=np.int64)  # the group that this thread has caught up last
        for n in range(count * p // threads, count * (p + 1) // threads):
            head = heads_N[n]
            group = head // sharing
            values_KB[:] = 0
            for b in range(batch):
                if not mask_BN[b, n]:
                    continue
                end, start = length_B[b], start_B[b]
                keys_TK, values_TK = keys_BGTK[b, group], values_BGTK[b, group]
                if ready_B[b] != group:
                    complete(
                        group, filled_BG[b, group], end, start, pending_BWD[b], pending_scale_BW[b], wk, sk, bk, wv, sv,
                        bv, turns, keys_TK, values_TK,
                    )  # fmt: skip
                    ready_B[b] = group
                    read_PC[p, 1] += 2 * size
                placed(
                    head * size, ZERO, ONE, h_BD[b : b + 1], scale_B[b : b + 1], wq, sq, bq, start - end + 1, turns,
                    query_TK,
                )  # fmt: skip
                attend(query_TK[0], keys_TK, values_TK, start, end, scaling, out_K, scores_T)
                for k in range(size):
                    values_KB[k, b] = out_K[k]
                read_PC[p, 0] += size
            for k in range(size):
                rows_K[k] = head * size + k
            add_units(wo, so, rows_K, values_KB, size, ZERO, wo.shape[1], YES, sums_PBD[p])
            read_PC[p, 2] += size
        for pair in range(len(late) * p // threads, len(late) * (p + 1) // threads):
            b, group = late[pair, 0], late[pair, 1]
            complete(
                group, filled_BG[b, group], length_B[b], start_B[b], pending_BWD[b], pending_scale_BW[b], wk, sk, bk,
                wv, sv, bv, turns, keys_BGTK[b, group], values_BGTK[b, group],
            )  # fmt: skip
            read_PC[p, 1] += 2 * size
        some_rows(p, threads, tap_BD, tap_scale_B, wd, sd, bd, relu, hidden_BR)
    caught_up(heads_N, mask_BN, sharing, late, length_B, filled_BG)
    add_partial(sums_PBD, bo, x_BD)


@njit(**OPTIONS)
def choose_attention(x_BD, choice, half):
    """`attention` over the heads that a predictor chooses, in one call; how many they are, -1 for a NaN."""
    fine, heads_N, mask_BN = chosen(choice)
    if not fine:
        return -1
    attention(x_BD, heads_N, mask_BN, *half)
    return len(heads_N)

"""What the sets of active units look like: how they overlap from token to token, who is in them, how unions grow.

A token's active set: its k units of largest contribution, of those that contribute at all.

Shape suffixes: N tokens, U units (neurons or heads).
"""

import numpy as np
import torch

from dejavu.models.topk import kept, top_k_mask

Array = np.ndarray


def active_sets(c_NU: Array, share: float) -> Array:
    """The active sets, bool (N, U), of at most `share` of the units each; `c_NU` are contributions, 0 or more."""
    most = kept(1 - share, c_NU.shape[1])
    active_NU = c_NU > 0
    more_N = active_NU.sum(axis=1) > most  # the others need no selection, and most rows of ReLU models are others
    active_NU[more_N] = top_k_mask(torch.from_numpy(c_NU[more_N]), most).numpy()
    return active_NU


def overlap(active_NU: Array, earlier_M: Array, later_M: Array) -> float:
    """Share of a token's active set that was active at another token too, mean over pairs of rows; NaN without any.

    A token whose set is empty counts in no pair.
    """
    earlier_MU, later_MU = active_NU[earlier_M], active_NU[later_M]
    sizes_M = later_MU.sum(axis=1)
    common_M = (earlier_MU & later_MU).sum(axis=1)
    return float(np.mean(common_M[sizes_M > 0] / sizes_M[sizes_M > 0])) if (sizes_M > 0).any() else float("nan")


def share_of_mass(c_NU: Array) -> tuple[Array, Array]:
    """Share of all contribution that 1, 2, ... U units carry: (a fixed set of units, each token's own), both (U,).

    The fixed set are the units of highest mean c. Tokens without active units count 1, as in recall of mass.
    """
    total_N1 = c_NU.sum(axis=1, keepdims=True)
    shares_NU = c_NU / np.where(total_N1 > 0, total_N1, 1)
    fixed_NU = shares_NU[:, np.argsort(-c_NU.mean(axis=0), kind="stable")]
    own_NU = -np.sort(-shares_NU, axis=1)
    silent = float((total_N1 == 0).mean())
    return np.cumsum(fixed_NU.mean(axis=0)) + silent, np.cumsum(own_NU.mean(axis=0)) + silent


def union_of_batch(frequency_U: Array, tokens: int, batch: int) -> float:
    """Expected share of units in the union of the sets of `batch` different ones of `tokens` tokens, drawn at random.

    `frequency_U` is the share of the tokens in whose set a unit is.
    """
    absent_U = np.round((1 - frequency_U) * tokens)
    drawn = np.arange(batch)[:, None]
    never_U = np.prod(np.maximum(absent_U - drawn, 0) / (tokens - drawn), axis=0)
    return float(1 - never_U.mean())


def unions_of_text(active_NU: Array, together_N: Array, sizes: list[int]) -> dict[int, float]:
    """Share of units in the union of the sets of consecutive tokens, mean over all places in the text; NaN without any.

    together_N   number of the stretch of text that a row is in; a window lies in one stretch
    sizes        how many tokens: powers of two, ascending, from 1
    """
    found, window_NU, width = {}, active_NU, 1
    for size in sizes:
        while width < size:
            window_NU, width = window_NU[:-width] | window_NU[width:], 2 * width
        whole_N = together_N[: len(window_NU)] == together_N[size - 1 :][: len(window_NU)]
        found[size] = float(window_NU[whole_N].mean()) if whole_N.any() else float("nan")
    return found

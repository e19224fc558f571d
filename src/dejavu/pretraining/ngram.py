"""A 5-gram model over token ids: what a table of counts knows of the text, the yardstick for the small neural model.

Interpolated modified Kneser-Ney smoothing, Chen & Goodman, "An Empirical Study of Smoothing Techniques for Language
Modeling" (Computer Speech & Language 13, 1999), section 3: for a word w after the history h, and h' = h without its
oldest word,

    p(w | h) = max(c(h w) - D(c(h w)), 0) / c(h .) + g(h) p(w | h'),   g(h) = (D1 N1(h) + D2 N2(h) + D3 N3+(h)) / c(h .)

where N_k(h) is the number of words seen k times after h, and the last p is uniform over the vocabulary. An n-gram is
one uint64 (its ids side by side, the newest lowest), so a level of the model is a sorted array and a look-up a search.
"""

from dataclasses import dataclass

import numpy as np

FALLBACK_DISCOUNTS = np.array([0.0, 0.5, 1.0, 1.5])  # KenLM's, for texts too small to estimate from


@dataclass(frozen=True)
class Level:
    """The n-grams of one order: p(w | h) = share of (h w) + weight of h * p(w | h')."""

    ngrams: np.ndarray  # sorted keys
    shares: np.ndarray  # (c - D(c)) / c(h .) of each n-gram
    histories: np.ndarray  # sorted keys
    weights: np.ndarray  # g(h) of each history

    def interpolate(self, ngrams: np.ndarray, bits: int, lower: np.ndarray) -> np.ndarray:
        """Probabilities at this order from those one order lower; an unseen history leaves them as they are."""
        shares = look_up(self.ngrams, self.shares, ngrams, 0.0)
        return shares + look_up(self.histories, self.weights, ngrams >> np.uint64(bits), 1.0) * lower


@dataclass(frozen=True)
class NgramModel:
    """A fitted model: `levels[n - 1]` holds the n-grams of order n."""

    vocabulary: int
    bits: int
    levels: list[Level]

    def log_probabilities(self, document: np.ndarray) -> np.ndarray:
        """Natural-log probability of tokens 1, 2, ... of a document, each given the tokens before it.

        The first token (the separator) is history only, so exactly the tokens that a neural model scores are scored.
        """
        tokens = checked(document, self.vocabulary)
        probabilities = np.full(len(tokens), 1 / self.vocabulary)
        for order, level in enumerate(self.levels, start=1):
            longer = slice(order - 1, None)  # earlier tokens have no history that long
            ngrams = pack_ngrams(tokens, order, self.bits)
            probabilities[longer] = level.interpolate(ngrams, self.bits, probabilities[longer])
        return np.log(probabilities[1:])


def fit(documents: list[np.ndarray], vocabulary: int, order: int = 5) -> NgramModel:
    """Count the documents (arrays of ids, the separator first) and smooth, highest order first."""
    bits = bits_per_id(vocabulary, order)
    tokens = checked(np.concatenate(documents) if documents else np.zeros(0, np.int64), vocabulary)
    numbers = np.repeat(np.arange(len(documents), dtype=np.int32), [len(document) for document in documents])
    levels, longer = [], None
    for length in range(order, 0, -1):
        ngrams, counts = adjusted_counts(tokens, numbers, length, bits, longer)
        levels.append(smoothed(ngrams, counts, bits))
        longer = ngrams
    return NgramModel(vocabulary, bits, levels[::-1])


def bits_per_id(vocabulary: int, order: int) -> int:
    """Bits that hold one id; an n-gram of `order` ids has to fit into 64."""
    if vocabulary < 1 or order < 1:
        raise ValueError(f"an n-gram model needs a vocabulary and an order of at least 1, not {vocabulary} and {order}")
    bits = max(1, (vocabulary - 1).bit_length())
    if order * bits > 64:
        raise ValueError(
            f"{order} ids of a vocabulary of {vocabulary} need {order * bits} bits, more than the 64 of a key: "
            f"lower the order to {64 // bits} or the vocabulary to {2 ** (64 // order)}"
        )
    return bits


def checked(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """The ids as uint64; an id outside the vocabulary would silently become part of its neighbour in a key."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary):
        raise ValueError(f"ids from {tokens.min()} to {tokens.max()} do not fit a vocabulary of {vocabulary}")
    return tokens.astype(np.uint64)


def pack_ngrams(tokens: np.ndarray, order: int, bits: int) -> np.ndarray:
    """Keys of all runs of `order` tokens, in order of their start."""
    runs = max(0, len(tokens) - order + 1)
    keys = np.zeros(runs, dtype=np.uint64)
    for place in range(order):
        keys = (keys << np.uint64(bits)) | tokens[place : place + runs]
    return keys


def adjusted_counts(
    tokens: np.ndarray, numbers: np.ndarray, order: int, bits: int, longer: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sorted distinct n-grams, counts): occurrences at the highest order, below it distinct left neighbours.

    `longer` are the distinct n-grams one order higher (None at the highest). An n-gram at the start of its document has
    no left neighbour: there each occurrence counts (Heafield et al., "Scalable Modified Kneser-Ney Language Model
    Estimation", ACL 2013, section 3.1). The first token alone is left out, because it is never predicted.
    """
    runs = max(0, len(tokens) - order + 1)
    inside = numbers[:runs] == numbers[len(numbers) - runs :]  # first and last token in one document
    starts = np.diff(numbers, prepend=-1)[:runs] != 0
    if order == 1:
        inside, starts = ~starts, np.zeros_like(starts)
    keys = pack_ngrams(tokens, order, bits)
    if longer is None:
        return np.unique(keys[inside], return_counts=True)
    oldest_removed = longer & np.uint64(2 ** (order * bits) - 1)
    return np.unique(np.concatenate([oldest_removed, keys[inside & starts]]), return_counts=True)


def discounts(counts: np.ndarray) -> np.ndarray:
    """D(0), D1, D2, D3+ of one order from how many n-grams have the counts 1 to 4 (Chen & Goodman, equation 26).

    Where these are too few for a discount in (0, k], which would make a probability zero or negative: the fallback.
    """
    _, n1, n2, n3, n4 = np.bincount(np.minimum(counts, 5), minlength=6)[:5].tolist()
    if 0 in (n1, n2, n3, n4):
        return FALLBACK_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    estimate = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    return estimate if (estimate[1:] > 0).all() else FALLBACK_DISCOUNTS


def smoothed(ngrams: np.ndarray, counts: np.ndarray, bits: int) -> Level:
    """Discount the counts of one order; what is taken from a history's n-grams is the weight of its shorter history."""
    taken = discounts(counts)[np.minimum(counts, 3)]
    # keys are sorted, so the n-grams of a history are neighbours
    histories, first, sizes = np.unique(ngrams >> np.uint64(bits), return_index=True, return_counts=True)
    if not len(ngrams):
        return Level(ngrams, taken, histories, taken)
    totals = np.add.reduceat(counts, first)
    weights = np.add.reduceat(taken, first) / totals
    return Level(ngrams, (counts - taken) / np.repeat(totals, sizes), histories, weights)


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float) -> np.ndarray:
    """The value of each wanted key in the sorted `keys`, `missing` where there is none."""
    if not len(keys):
        return np.full(len(wanted), missing)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], missing)

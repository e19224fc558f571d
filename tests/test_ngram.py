"""The n-gram yardstick: a proper distribution after any history, the textbook's numbers, documents kept apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.pretraining.ngram import NgramModel, discounts, fit

SEPARATOR = 2


def document(*ids: int) -> np.ndarray:
    return np.array([SEPARATOR, *ids], dtype=np.int32)


def distribution(model: NgramModel, history: np.ndarray) -> np.ndarray:
    """Probability of every id after a history of at least one token."""
    continued = (np.append(history, word).astype(np.int32) for word in range(model.vocabulary))
    return np.exp([model.log_probabilities(tokens)[-1] for tokens in continued])


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[np.ndarray], int]:
    """A few short documents over a vocabulary of 3 to 9; long runs of few ids, so that counts above 3 occur."""
    vocabulary = draw(st.integers(3, 9))
    body = st.lists(st.integers(0, vocabulary - 1), max_size=60)
    return [document(*ids) for ids in draw(st.lists(body, max_size=5))], vocabulary


@settings(max_examples=60, deadline=None)
@given(corpora(), st.integers(2, 5), st.data())
def test_probabilities_are_positive_and_sum_to_one(
    corpus: tuple[list[np.ndarray], int], order: int, data: st.DataObject
) -> None:
    documents, vocabulary = corpus
    model = fit(documents, vocabulary, order)
    unseen = document(*data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=6)))
    seen = [tokens[: data.draw(st.integers(1, len(tokens)))] for tokens in documents]
    for history in [unseen, *seen]:
        probabilities = distribution(model, history)
        assert (probabilities > 0).all()
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)


def test_sums_to_one_with_estimated_discounts() -> None:
    random = np.random.default_rng(0)
    ids = np.minimum(random.geometric(0.15, size=(20, 400)) - 1, 29)
    model = fit([document(*row) for row in ids], 30, 3)
    for history in (document(), document(0), document(0, 1), document(29, 28, 27)):
        assert distribution(model, history).sum() == pytest.approx(1, abs=1e-12)


def test_trigram_by_hand() -> None:
    # Counts: trigrams 201: 2, 010: 1. Bigrams 01: 1, 10: 1 (left neighbours), 20: 2 (starts). Unigrams 0: 2, 1: 1.
    # All are too few to estimate discounts from, so D1, D2 = 0.5, 1.
    model = fit([document(0, 1, 0), document(0, 1)], 3, 3)
    unigram = [(2 - 1) / 3 + 0.5 / 3, (1 - 0.5) / 3 + 0.5 / 3, 0.5 / 3]  # weight of uniform: (1 + 0.5) / 3
    after_separator = (2 - 1) / 2 + 0.5 * unigram[0]
    after_0 = (1 - 0.5) / 1 + 0.5 * unigram[1]
    after_1 = (1 - 0.5) / 1 + 0.5 * unigram[0]
    expected = [after_separator, (2 - 1) / 2 + 0.5 * after_0, (1 - 0.5) / 1 + 0.5 * after_1]
    np.testing.assert_allclose(np.exp(model.log_probabilities(document(0, 1, 0))), expected, rtol=1e-12)
    # the history 1 1 is unseen: the bigram 1 1 decides, itself unseen after a seen 1
    assert np.exp(model.log_probabilities(document(1, 1, 1))[-1]) == pytest.approx(0.5 * unigram[1])


def test_discounts_of_chen_and_goodman() -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [40, 10, 5, 3, 2])
    y = 40 / (40 + 2 * 10)
    np.testing.assert_allclose(discounts(counts), [0, y, 2 - 3 * y * 5 / 10, 3 - 4 * y * 3 / 5])
    np.testing.assert_allclose(discounts(np.array([1, 1, 2])), [0, 0.5, 1, 1.5])
    implausible = np.repeat([1, 2, 3, 4], [40, 1, 30, 1])  # D2 would be far below zero
    np.testing.assert_allclose(discounts(implausible), [0, 0.5, 1, 1.5])


def test_never_crosses_documents() -> None:
    documents = [document(0, 1, 3), document(4, 5), document(1, 1, 4)]
    orders = [fit([documents[place] for place in order], 6) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    scores = [model.log_probabilities(document(0, 1, 3, 4, 5, 1)) for model in orders]
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])
    seen_bigrams = {(key >> 3, key & 7) for key in orders[0].levels[1].ngrams.tolist()}
    assert seen_bigrams == {(2, 0), (0, 1), (1, 3), (2, 4), (4, 5), (2, 1), (1, 1), (1, 4)}


def test_beats_unigram_on_structured_text() -> None:
    random = np.random.default_rng(1)

    def text() -> np.ndarray:
        """Each id is the sum of the two before it modulo 20, a tenth of them replaced: one id alone tells little."""
        ids = [1, 1]
        while len(ids) < 300:
            ids.append(int(random.integers(20)) if random.random() < 0.1 else (ids[-1] + ids[-2]) % 20)
        return document(*ids)

    train, held_out = [text() for _ in range(40)], text()
    unigram, trigram, fivegram = (-fit(train, 20, order).log_probabilities(held_out).mean() for order in (1, 3, 5))
    assert trigram < unigram / 2
    assert fivegram < unigram / 2


def test_scores_all_but_the_separator() -> None:
    model = fit([document(0, 1), document()], 3)
    assert [len(model.log_probabilities(document(*range(length)))) for length in (0, 1, 2)] == [0, 1, 2]
    np.testing.assert_allclose(fit([], 4).log_probabilities(document(0, 3)), np.log([0.25, 0.25]))


def test_refuses_what_does_not_fit_a_key() -> None:
    with pytest.raises(ValueError, match="65 bits"):
        fit([document(0)], 4097)
    assert fit([document(4095)], 4096).bits == 12
    assert fit([document(4096)], 4097, order=4).bits == 13
    with pytest.raises(ValueError, match="vocabulary of 3"):
        fit([document(3)], 3)
    with pytest.raises(ValueError, match="vocabulary of 3"):
        fit([document(0)], 3).log_probabilities(document(-1))


def test_largest_ids_keep_their_place() -> None:
    model = fit([document(4095, 4094, 4095, 4094, 4095, 4094)], 4096)
    assert np.exp(model.log_probabilities(document(4095, 4094, 4095, 4094)))[1:].min() > 0.3


def test_same_text_same_model() -> None:
    documents = [np.append(SEPARATOR, np.random.default_rng(3).integers(20, size=500)) for _ in range(3)]
    first, second = (fit(documents, 20).log_probabilities(documents[0]) for _ in range(2))
    np.testing.assert_array_equal(first, second)

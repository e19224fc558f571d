"""Metrics and their error bars against direct formulas, and the rules of paired comparison."""

import math
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.errors import DataError
from dejavu.evaluation.metrics import OF_KIND, measure, metric_names, no_measurable_loss, paired


def text_samples(documents: int = 200, seed: int = 0, excess: float = 0.0) -> pd.DataFrame:
    """Documents of one rolling task; `excess` nats per token, a little different in each document, are added."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(50, 500, documents)
    hardness = rng.normal(3.0, 0.6, documents)
    worse = excess * np.random.default_rng(seed + 1).normal(1.0, 0.2, documents)
    return pd.DataFrame(
        {
            "task": "text",
            "document": [f"d{number}" for number in range(documents)],
            "loglikelihood": -tokens * (hardness + worse),
            "tokens": tokens,
            "bytes": tokens * 4,
            "words": tokens // 2,
            "correct": np.nan,
        }
    )


def choice_samples(correct: np.ndarray) -> pd.DataFrame:
    return text_samples(len(correct)).assign(task="choice", correct=correct.astype(float))


def test_rolling_values_are_the_direct_formulas():
    samples = text_samples()
    nats = -samples["loglikelihood"].sum()
    metrics = measure(samples, OF_KIND["rolling"])
    assert metrics["bits_per_byte"]["value"] == pytest.approx(nats / samples["bytes"].sum() / math.log(2))
    assert metrics["byte_perplexity"]["value"] == pytest.approx(math.exp(nats / samples["bytes"].sum()))
    assert metrics["word_perplexity"]["value"] == pytest.approx(math.exp(nats / samples["words"].sum()))
    assert {entry["n"] for entry in metrics.values()} == {200}


def test_token_perplexity_is_the_exponential_of_the_loss():
    samples = text_samples()
    metrics = measure(samples, OF_KIND["token_perplexity"])
    assert metrics["loss"]["value"] == pytest.approx(-samples["loglikelihood"].sum() / samples["tokens"].sum())
    assert metrics["token_perplexity"]["value"] == pytest.approx(math.exp(metrics["loss"]["value"]))


def test_accuracy_has_the_analytic_standard_error():
    correct = np.arange(300) % 3 == 0
    entry = measure(choice_samples(correct), OF_KIND["continuation"])["acc"]
    p = correct.mean()
    assert entry == {
        "value": pytest.approx(p),
        "stderr": pytest.approx(math.sqrt(p * (1 - p) / (len(correct) - 1))),
        "n": 300,
    }


def test_bootstrap_of_a_mean_agrees_with_the_analytic_error():
    samples = text_samples(300).assign(tokens=1)  # with equal weights the ratio is a mean over documents
    entry = measure(samples, OF_KIND["token_perplexity"])["loss"]
    assert entry["stderr"] == pytest.approx(samples["loglikelihood"].std() / math.sqrt(300), rel=0.15)


def test_a_paired_bootstrap_of_a_mean_agrees_with_the_analytic_error():
    dense, sparse = text_samples(300).assign(tokens=1), text_samples(300, excess=0.1).assign(tokens=1)
    difference = dense["loglikelihood"] - sparse["loglikelihood"]
    entry = paired(sparse, dense, OF_KIND["token_perplexity"])["loss"]
    assert entry["delta"] == pytest.approx(difference.mean())
    assert entry["delta_stderr"] == pytest.approx(difference.std() / math.sqrt(300), rel=0.15)


@pytest.mark.parametrize("kind", ["rolling", "token_perplexity"])
def test_pairing_removes_what_documents_share(kind):
    dense, sparse = text_samples(), text_samples(excess=0.1)
    names = OF_KIND[kind]
    before, after, difference = measure(dense, names), measure(sparse, names), paired(sparse, dense, names)
    assert set(difference) == set(OF_KIND[kind])
    for name, entry in difference.items():
        assert entry["delta"] == pytest.approx(after[name]["value"] - before[name]["value"])
        assert entry["delta"] > 0
        assert entry["delta_stderr"] < math.hypot(before[name]["stderr"], after[name]["stderr"]) / 3


def test_paired_accuracy_is_the_mean_change_per_question():
    dense, sparse = np.arange(200) % 2 == 0, np.arange(200) % 4 == 0
    entry = paired(choice_samples(sparse), choice_samples(dense), OF_KIND["continuation"])["acc"]
    change = sparse.astype(float) - dense
    assert entry == {"delta": pytest.approx(-0.25), "delta_stderr": pytest.approx(change.std(ddof=1) / math.sqrt(200))}


def test_a_run_paired_with_itself_differs_by_exactly_nothing():
    for entry in paired(text_samples(), text_samples(), OF_KIND["rolling"]).values():
        assert entry == {"delta": 0.0, "delta_stderr": 0.0}


def test_rows_in_another_order_are_paired_by_document():
    dense, sparse = text_samples(), text_samples(excess=0.1)
    assert paired(sparse.iloc[::-1], dense, OF_KIND["rolling"]) == paired(sparse, dense, OF_KIND["rolling"])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(2, 12), kind=st.sampled_from(["rolling", "token_perplexity"]))
def test_metrics_do_not_depend_on_the_order_of_documents(data, count, kind):
    samples = text_samples(count, seed=data.draw(st.integers(0, 99)))
    order = data.draw(st.permutations(range(count)))
    assert measure(samples.iloc[order], OF_KIND[kind]) == measure(samples, OF_KIND[kind])


def test_results_are_deterministic_and_fast():
    samples = text_samples(500)
    start = time.process_time()
    first = measure(samples, OF_KIND["rolling"])
    assert time.process_time() - start < 0.4  # about 0.05 s; room for a busy machine
    assert measure(samples, OF_KIND["rolling"]) == first


def test_a_single_document_has_no_standard_error():
    for kind, samples in (("rolling", text_samples(1)), ("continuation", choice_samples(np.ones(1)))):
        assert all(math.isnan(entry["stderr"]) for entry in measure(samples, OF_KIND[kind]).values())


def test_documents_that_differ_are_refused():
    dense = text_samples(20)
    with pytest.raises(DataError, match=r"1 documents of task text .*first: d19"):
        paired(text_samples(20).iloc[:19], dense, OF_KIND["rolling"])
    with pytest.raises(DataError, match="document d3: bytes differs"):
        paired(dense.assign(bytes=dense["bytes"].where(dense["document"] != "d3", 1)), dense, OF_KIND["rolling"])
    with pytest.raises(DataError, match="same task"):
        paired(dense.assign(task="other"), dense, OF_KIND["rolling"])


def test_samples_that_cannot_be_measured_are_refused():
    samples = text_samples(5)
    cases = [
        (samples.iloc[:0], "rolling", "no samples"),
        (samples.assign(bytes=0), "rolling", "no bytes"),
        (pd.concat([samples, samples]), "rolling", "twice"),
        (pd.concat([samples, samples.assign(task="b")]), "rolling", "one task at a time"),
        (samples.assign(loglikelihood=-np.inf), "rolling", "not finite"),
        (samples, "continuation", "correct is not finite"),
        (samples.drop(columns="bytes").rename(columns={"loglikelihood": "other"}), "rolling", "no loglikelihood"),
    ]
    for broken, kind, message in cases:
        with pytest.raises(DataError, match=message):
            measure(broken, OF_KIND[kind])


def test_a_task_names_metrics_that_exist():
    assert metric_names("rolling") == OF_KIND["rolling"]
    assert metric_names("lm_eval", ["acc", "f1"]) == ("acc", "f1")
    with pytest.raises(DataError, match="'bleu' is not known"):
        metric_names("lm_eval", ["acc", "bleu"])
    with pytest.raises(DataError, match="has to name its metrics"):
        metric_names("lm_eval")


def test_macro_f1_is_the_mean_of_three_classes():
    """As lm-eval's `cb`, whose classes are scored one against the rest by scikit-learn."""
    from sklearn.metrics import f1_score

    random = np.random.default_rng(0)
    predicted, label = random.integers(0, 3, 60), random.integers(0, 2, 60)  # nobody has label 2
    samples = text_samples(60).assign(predicted=predicted, label=label)
    samples = samples.assign(document=[f"{number:02d}" for number in range(60)])
    entry = measure(samples, ["f1"])["f1"]
    expected = np.mean([f1_score(label == number, predicted == number) for number in range(3)])
    assert entry["value"] == pytest.approx(expected) and 0 < entry["stderr"] < 0.1
    better = samples.assign(predicted=label)
    difference = paired(better, samples, ["f1"])["f1"]
    assert difference["delta"] == pytest.approx(measure(better, ["f1"])["f1"]["value"] - expected)


@pytest.mark.parametrize(
    ("metric", "value", "delta", "stderr", "expected"),
    [
        ("acc", 0.60, -0.002, 0.003, True),
        ("acc", 0.60, -0.002, 0.006, False),  # a loss of more than a point is not excluded
        ("acc", 0.60, -0.008, 0.001, False),  # small, but measurable
        ("token_perplexity", 20.05, 0.05, 0.05, True),
        ("token_perplexity", 20.05, 0.05, 0.09, False),
        ("token_perplexity", 19.5, -0.5, 0.05, False),  # better than dense: 0 is not inside
        ("loss", 3.002, 0.002, 0.003, True),
        ("loss", 3.002, 0.002, 0.005, False),
        ("bits_per_byte", 1.1, 0.0, math.nan, False),
    ],
)
def test_no_measurable_loss(metric, value, delta, stderr, expected):
    assert no_measurable_loss(metric, value, delta, stderr) is expected

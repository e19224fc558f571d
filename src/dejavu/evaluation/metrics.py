"""From samples to metrics with error bars, and paired differences to a dense run over the same documents.

Samples: a table with one row per scored document or question of one task (columns `task`, `document`,
`loglikelihood` in nats, `tokens`, `bytes`, `words`, `correct`). Rows are put in the order of their documents first, so
neither a value nor an error bar depends on the order in which they were scored.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dejavu.errors import DataError

RESAMPLES = 1000
SEED = 0  # one seed for all: a sparse run and its dense run see the same resamples
INTERVAL = 1.96  # standard errors on each side of a 95 % interval
COUNTS = ("tokens", "bytes", "words")

Array = np.ndarray


@dataclass(frozen=True)
class Ratio:
    """A metric `scale(nats lost / units)`, both summed over documents; `unit` is a column of the samples."""

    unit: str
    scale: Callable[[Array], Array]


def bits(nats: Array) -> Array:
    return nats / np.log(2)


def unchanged(nats: Array) -> Array:
    return nats


RATIOS = {
    "rolling": {
        "bits_per_byte": Ratio("bytes", bits),
        "byte_perplexity": Ratio("bytes", np.exp),
        "word_perplexity": Ratio("words", np.exp),
    },
    "token_perplexity": {"token_perplexity": Ratio("tokens", np.exp), "loss": Ratio("tokens", unchanged)},
    "continuation": {},
}


def measure(samples: pd.DataFrame, kind: str) -> dict[str, dict]:
    """{metric: {value, stderr, n}} of one task's samples; `n` counts documents, blocks or questions.

    Accuracies have lm-eval's analytic standard error, the others a bootstrap over documents; a single document has
    none (NaN). Raises DataError for an unknown kind, for no samples, and for values that cannot be scored.
    """
    rows = ordered(samples, kind)
    if kind == "continuation":
        correct = rows["correct"].to_numpy(dtype=np.float64)
        return {"acc": {"value": float(correct.mean()), "stderr": standard_error(correct), "n": len(rows)}}
    metrics = {}
    for name, ratio in RATIOS[kind].items():
        value, resampled = estimate(rows, ratio)
        metrics[name] = {"value": value, "stderr": spread(resampled, len(rows)), "n": len(rows)}
    return metrics


def paired(samples: pd.DataFrame, dense: pd.DataFrame, kind: str) -> dict[str, dict[str, float]]:
    """{metric: {delta, delta_stderr}}: sparse minus dense over the same documents.

    Both sides of a ratio are resampled with the same weights, so what is hard about a document cancels.
    Raises DataError when the two do not hold the same documents with the same counts.
    """
    rows, base = ordered(samples, kind), ordered(dense, kind)
    check_same_documents(rows, base)
    if kind == "continuation":
        change = rows["correct"].to_numpy(dtype=np.float64) - base["correct"].to_numpy(dtype=np.float64)
        return {"acc": {"delta": float(change.mean()), "delta_stderr": standard_error(change)}}
    metrics = {}
    for name, ratio in RATIOS[kind].items():
        value, resampled = estimate(rows, ratio)
        base_value, base_resampled = estimate(base, ratio)
        with np.errstate(invalid="ignore"):  # the difference of two infinite perplexities is NaN
            value, resampled = np.subtract(value, base_value), np.subtract(resampled, base_resampled)
        metrics[name] = {"delta": float(value), "delta_stderr": spread(resampled, len(rows))}
    return metrics


def no_measurable_loss(metric: str, value: float, delta: float, delta_stderr: float) -> bool:
    """Whether the 95 % interval of a paired difference contains 0 and excludes a loss that matters.

    What matters: above 1 point of accuracy or 1 % of the dense perplexity. `value` is the sparse one, as in a table's
    row. `loss` and `bits_per_byte` are logarithms: 1 % of the perplexity per token or byte that they stand for.
    A difference without a standard error proves nothing: False.
    """
    loss = -delta if higher_is_better(metric) else delta
    low, high = loss - INTERVAL * delta_stderr, loss + INTERVAL * delta_stderr
    return bool(low <= 0 <= high <= tolerance(metric, dense=value - delta))


def higher_is_better(metric: str) -> bool:
    """True for accuracies, False for perplexities, losses and bits."""
    return metric.startswith("acc")


def tolerance(metric: str, dense: float) -> float:
    """The largest loss that does not matter, in the metric's own unit."""
    if higher_is_better(metric):
        return 0.01
    logarithms = {"loss": np.log(1.01), "bits_per_byte": np.log2(1.01)}
    return float(logarithms.get(metric, 0.01 * dense))


def estimate(rows: pd.DataFrame, ratio: Ratio) -> tuple[float, Array]:
    """A ratio over all rows, and over each bootstrap resample of them: float64 (RESAMPLES,)."""
    nats = -rows["loglikelihood"].to_numpy(dtype=np.float64)
    units = rows[ratio.unit].to_numpy(dtype=np.float64)
    if units.sum() <= 0:
        task = rows["task"].iloc[0]
        raise DataError(f"the samples of task {task} hold no {ratio.unit} to divide by: evaluate the run again")
    weights = resamples(len(rows))
    resampled_units = weights @ units
    possible = resampled_units > 0  # a resample made only of empty documents has no value
    with np.errstate(over="ignore"):  # a broken model's perplexity may be infinite
        value = float(ratio.scale(nats.sum() / units.sum()))
        return value, ratio.scale((weights @ nats)[possible] / resampled_units[possible])


@functools.lru_cache(maxsize=4)
def resamples(documents: int) -> Array:
    """How often each resample draws each document: float64 (RESAMPLES, documents), multinomial, always the same."""
    draws = np.random.default_rng(SEED).integers(documents, size=(RESAMPLES, documents))
    draws += documents * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(draws.ravel(), minlength=RESAMPLES * documents)
    return counts.reshape(RESAMPLES, documents).astype(np.float64)


def spread(resampled: Array, documents: int) -> float:
    """Standard deviation over resamples; NaN where a single document leaves nothing to resample."""
    if documents < 2:
        return float("nan")
    with np.errstate(invalid="ignore"):
        return float(np.std(resampled, ddof=1))


def standard_error(values: Array) -> float:
    """Standard error of a mean, as lm-eval has it: std(ddof=1) / sqrt(n); NaN for a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def ordered(samples: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The samples of one task in the order of their documents. Raises DataError where they cannot be measured."""
    if kind not in RATIOS:
        raise DataError(f"task kind {kind!r} has no metrics: choose one of {', '.join(RATIOS)}")
    if samples.empty:
        raise DataError(f"there are no samples to measure for a task of kind {kind}: check its corpus and limit")
    tasks = sorted(set(samples["task"]))
    if len(tasks) > 1:
        raise DataError(f"the samples mix the tasks {', '.join(tasks)}: measure one task at a time")
    rows = samples.sort_values("document", ignore_index=True)
    twice = rows["document"].duplicated()
    if twice.any():
        raise DataError(f"task {tasks[0]} holds document {rows['document'][twice].iloc[0]} twice: evaluate it again")
    column = "correct" if kind == "continuation" else "loglikelihood"
    broken = ~np.isfinite(rows[column].to_numpy(dtype=np.float64))
    if broken.any():
        document = rows["document"][broken].iloc[0]
        raise DataError(f"task {tasks[0]}, document {document}: {column} is not finite; check the model's dtype")
    return rows


def check_same_documents(rows: pd.DataFrame, base: pd.DataFrame) -> None:
    """Raise DataError unless two ordered tables hold the same task, documents and counts."""
    task, base_task = rows["task"].iloc[0], base["task"].iloc[0]
    if task != base_task:
        raise DataError(f"task {task} cannot be paired with task {base_task}: compare runs of the same task")
    unpaired = sorted(set(rows["document"]) ^ set(base["document"]))
    if unpaired:
        raise DataError(
            f"{len(unpaired)} documents of task {task} are in one of two paired runs only (first: {unpaired[0]}): "
            "evaluate both on the same data and limit"
        )
    for column in COUNTS:
        differs = rows[column].to_numpy() != base[column].to_numpy()
        if differs.any():
            document = rows["document"][differs].iloc[0]
            raise DataError(
                f"task {task}, document {document}: {column} differs between two paired runs, evaluate both again"
            )

"""From samples to metrics with error bars, and paired differences to a dense run over the same documents.

Samples: a table with one row per scored document or question of one task (columns `task`, `document`,
`loglikelihood` in nats, `tokens`, `bytes`, `words`, `correct`, `correct_norm`, `predicted`, `label`; a metric needs
only its own). Rows are put in the order of their documents first, so neither a value nor an error bar depends on the
order in which they were scored.
"""

import functools
from collections.abc import Callable, Sequence
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
class Mean:
    """A column's mean, with lm-eval's analytic standard error."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)


@dataclass(frozen=True)
class Ratio:
    """A metric `scale(nats lost / units)`, both summed over documents; `unit` is a column, or "documents"."""

    unit: str
    scale: Callable[[Array], Array]
    columns: tuple[str, ...] = ("loglikelihood",)

    def resampled(self, rows: pd.DataFrame, weights_RN: Array) -> Array:
        """The metric under each row of weights, (R,); NaN where a resample holds only empty documents."""
        nats = -rows["loglikelihood"].to_numpy(dtype=np.float64)
        units = np.ones(len(rows)) if self.unit == "documents" else rows[self.unit].to_numpy(dtype=np.float64)
        if units.sum() <= 0:
            task = rows["task"].iloc[0]
            raise DataError(f"the samples of task {task} hold no {self.unit} to divide by: evaluate the run again")
        # A broken model's perplexity may be infinite.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return self.scale((weights_RN @ nats) / (weights_RN @ units))


@dataclass(frozen=True)
class MacroF1:
    """Mean over the classes 0 to `classes` - 1 of F1 (lm-eval's `cb`); a class that nobody names has F1 = 0."""

    classes: int
    columns: tuple[str, ...] = ("predicted", "label")

    def resampled(self, rows: pd.DataFrame, weights_RN: Array) -> Array:
        """The metric under each row of weights, (R,)."""
        predicted, label = (rows[column].to_numpy() for column in self.columns)
        scores = []
        for number in range(self.classes):
            hits = weights_RN @ ((predicted == number) & (label == number))
            named = weights_RN @ (predicted == number) + weights_RN @ (label == number)
            scores.append(np.divide(2 * hits, named, out=np.zeros_like(named), where=named > 0))
        return np.mean(scores, axis=0)


def bits(nats: Array) -> Array:
    return nats / np.log(2)


def unchanged(nats: Array) -> Array:
    return nats


METRICS: dict[str, Mean | Ratio | MacroF1] = {
    "bits_per_byte": Ratio("bytes", bits),
    "byte_perplexity": Ratio("bytes", np.exp),
    "word_perplexity": Ratio("words", np.exp),
    "token_perplexity": Ratio("tokens", np.exp),
    "loss": Ratio("tokens", unchanged),
    "perplexity": Ratio("documents", np.exp),  # of a last word, as lm-eval's LAMBADA has it
    "acc": Mean("correct"),
    "acc_norm": Mean("correct_norm"),
    "f1": MacroF1(classes=3),
}
OF_KIND = {  # tasks of kind lm_eval name their own
    "rolling": ("bits_per_byte", "byte_perplexity", "word_perplexity"),
    "token_perplexity": ("token_perplexity", "loss"),
    "continuation": ("acc",),
}


def metric_names(kind: str, named: Sequence[str] = ()) -> tuple[str, ...]:
    """The metrics of a task: its kind's, or those that it names. Raises DataError for one that does not exist."""
    names = OF_KIND.get(kind, tuple(named))
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        what = f"metric {unknown[0]!r} is not known" if unknown else f"a task of kind {kind!r} has to name its metrics"
        raise DataError(f"{what}: choose of {', '.join(METRICS)}")
    return names


def measure(samples: pd.DataFrame, names: Sequence[str]) -> dict[str, dict]:
    """{metric: {value, stderr, n}} of one task's samples; `n` counts documents, blocks or questions.

    Accuracies have lm-eval's analytic standard error, the others a bootstrap over documents; a single document has
    none (NaN). Raises DataError for no samples, and for values that cannot be scored.
    """
    rows = ordered(samples, names)
    metrics = {}
    for name in names:
        value, stderr = estimate(rows, name)
        metrics[name] = {"value": value, "stderr": stderr, "n": len(rows)}
    return metrics


def estimate(rows: pd.DataFrame, name: str) -> tuple[float, float]:
    """(value, standard error) of one metric over ordered samples."""
    metric = METRICS[name]
    if isinstance(metric, Mean):
        values = rows[metric.column].to_numpy(dtype=np.float64)
        return float(values.mean()), standard_error(values)
    value = float(metric.resampled(rows, np.ones((1, len(rows))))[0])
    return value, spread(metric.resampled(rows, resamples(len(rows))), len(rows))


def paired(samples: pd.DataFrame, dense: pd.DataFrame, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """{metric: {delta, delta_stderr}}: sparse minus dense over the same documents.

    Both sides are resampled with the same weights, so what is hard about a document cancels.
    Raises DataError when the two do not hold the same documents with the same counts.
    """
    rows, base = ordered(samples, names), ordered(dense, names)
    check_same_documents(rows, base)
    differences = {}
    for name in names:
        metric = METRICS[name]
        if isinstance(metric, Mean):
            change = rows[metric.column].to_numpy(dtype=np.float64) - base[metric.column].to_numpy(dtype=np.float64)
            differences[name] = {"delta": float(change.mean()), "delta_stderr": standard_error(change)}
            continue
        weights = np.vstack([np.ones((1, len(rows))), resamples(len(rows))])
        with np.errstate(invalid="ignore"):  # the difference of two infinite perplexities is NaN
            changes = metric.resampled(rows, weights) - metric.resampled(base, weights)
        differences[name] = {"delta": float(changes[0]), "delta_stderr": spread(changes[1:], len(rows))}
    return differences


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
    return metric.startswith(("acc", "f1"))


def tolerance(metric: str, dense: float) -> float:
    """The largest loss that does not matter, in the metric's own unit."""
    if higher_is_better(metric):
        return 0.01
    logarithms = {"loss": np.log(1.01), "bits_per_byte": np.log2(1.01)}
    return float(logarithms.get(metric, 0.01 * dense))


@functools.lru_cache(maxsize=4)
def resamples(documents: int) -> Array:
    """How often each resample draws each document: float64 (RESAMPLES, documents), multinomial, always the same."""
    draws = np.random.default_rng(SEED).integers(documents, size=(RESAMPLES, documents))
    draws += documents * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(draws.ravel(), minlength=RESAMPLES * documents)
    return counts.reshape(RESAMPLES, documents).astype(np.float64)


def spread(resampled: Array, documents: int) -> float:
    """Standard deviation over resamples; NaN where a single document leaves nothing to resample."""
    known = resampled[~np.isnan(resampled)]  # a resample made only of empty documents has no value
    if documents < 2 or len(known) < 2:
        return float("nan")
    with np.errstate(invalid="ignore"):
        return float(np.std(known, ddof=1))


def standard_error(values: Array) -> float:
    """Standard error of a mean, as lm-eval has it: std(ddof=1) / sqrt(n); NaN for a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def ordered(samples: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The samples of one task in the order of their documents. Raises DataError where they cannot be measured."""
    if samples.empty:
        raise DataError("there are no samples to measure: check the task's corpus and limit")
    tasks = sorted(set(samples["task"]))
    if len(tasks) > 1:
        raise DataError(f"the samples mix the tasks {', '.join(tasks)}: measure one task at a time")
    rows = samples.sort_values("document", ignore_index=True)
    twice = rows["document"].duplicated()
    if twice.any():
        raise DataError(f"task {tasks[0]} holds document {rows['document'][twice].iloc[0]} twice: evaluate it again")
    for column in dict.fromkeys(column for name in names for column in METRICS[name].columns):
        if column not in rows:
            raise DataError(f"the samples of task {tasks[0]} have no {column}: its file names a metric that it lacks")
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

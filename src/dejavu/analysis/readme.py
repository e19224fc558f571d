"""Tables of README and docs, written from runs' files: `python -m dejavu.analysis.readme RUN_DIR FILE.md [NAME]`.

Numbers are put there by this, between two marker lines, and by nothing else. NAME is `table` (a pipeline over the
embedded model, with its picture), `real` (a sweep over `tasks=real`), `engine` (sweeps/engine.yaml), `forms`, `ranks`,
`tokens`, `lookahead`, `on_policy` (evaluations of several bundles), or `calibrated` (sweeps/calibrated.yaml).
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from dejavu.analysis.bundles import bundles
from dejavu.analysis.calibration import calibrated
from dejavu.analysis.runs import load_runs
from dejavu.analysis.tables import in_order, markdown, percent, read_table, with_error
from dejavu.errors import DataError
from dejavu.evaluation.metrics import no_measurable_loss
from dejavu.schema import STORAGES
from dejavu.tracking.files import read_json

TASKS = [("pydocs", "bits_per_byte"), ("pydocs_token", "loss"), ("continuation_choice", "acc")]
HEADERS = ["pydocs, bits per byte", "pydocs, nats per token over dense", "continuation choice, accuracy"]
REAL = {
    ("openbookqa", "acc"): "OpenBookQA, acc",
    ("winogrande", "acc"): "WinoGrande, acc",
    ("piqa", "acc"): "PIQA, acc",
    ("lambada_openai", "acc"): "LAMBADA, acc",
    ("wikitext_token", "token_perplexity"): "WikiText-2, token perplexity",
    ("c4_token", "token_perplexity"): "C4, token perplexity",
}


def main(arguments: list[str]) -> None:
    """Replace the table between its markers; put the picture beside it where it is one of README's."""
    run, page = Path(arguments[0]), Path(arguments[1])
    name = arguments[2] if len(arguments) > 2 else "table"
    put(page, name, TABLES[name](run))
    if name == "table":
        images = page.parent / "docs" / "images"
        images.mkdir(exist_ok=True)
        shutil.copyfile(run / "sparsity_vs_quality.png", images / "sparsity_vs_quality.png")


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marker lines of `name`. Raises DataError when the page lacks them."""
    begin, end = markers(name)
    old = page.read_text("utf-8")
    if old.count(begin) != 1 or old.count(end) != 1:
        raise DataError(f"{page} must hold the lines {begin} and {end} once each")
    head, rest = old.split(begin)
    page.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}", "utf-8")


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def embedded(table: pd.DataFrame) -> str:
    """One row per ratio and selector, as a Markdown table."""
    lines = []
    for (_, selector), rows in in_order(table).groupby(["mlp", "selector"], sort=False):
        cells = [_cell(rows, task, metric) for task, metric in TASKS]
        lines.append([percent(float(rows["mlp"].iloc[0])), str(selector), *cells])
    return markdown(["heads and neurons skipped", "selector", *HEADERS], lines)


def real(table: pd.DataFrame) -> str:
    """One row per evaluation: what was asked for and measured, each task's value and paired difference; the verdict."""
    tasks = [pair for pair in REAL if ((table["task"] == pair[0]) & (table["metric"] == pair[1])).any()]
    counts = {pair: int(rows_of(table, *pair)["n"].max()) for pair in tasks}
    headers = [f"{REAL[pair]} (n = {counts[pair]:,})" for pair in tasks]
    lines = []
    keys = ["mlp", "heads", "selector", "rule"]
    for _, rows in in_order(table).groupby(keys, sort=False):
        first = rows.iloc[0]
        used = f"{percent(first['mlp_density'])}, {percent(first['head_density'])}"
        cells = [valued(rows_of(rows, *pair)) for pair in tasks]
        start = [f"{percent(first['mlp'])}, {percent(first['heads'])}", first["selector"], used]
        lines.append([*start, percent(first["sparse_token_share"]), *cells])
    titles = ["neurons, heads skipped", "selector", "used", "sparse share", *headers]
    return f"{markdown(titles, lines)}\n\n{verdict(table, tasks)}"


def verdict(table: pd.DataFrame, tasks: list[tuple[str, str]]) -> str:
    """One sentence: the largest ratio of each selector at which no task lost measurably, of those evaluated."""
    found = []
    sparse = table[table["selector"] != "dense"]
    for selector, rows in in_order(sparse).groupby("selector", sort=False):
        points = [point for _, point in rows.groupby(["mlp", "heads"])]
        held = [point.iloc[0] for point in points if all(_held(rows_of(point, *pair)) for pair in tasks)]
        best = max(held, key=lambda row: row["mlp"] + row["heads"], default=None)
        skipped = "none of its ratios"
        if best is not None:
            skipped = f"{percent(best['mlp'])} of neurons and {percent(best['heads'])} of heads"
        found.append(f"{selector}: {skipped}")
    return f"Skipped without measurable loss on every task ({len(tasks)}): " + "; ".join(found) + "."


def _held(rows: pd.DataFrame) -> bool:
    """Whether the one row of a task shows no measurable loss; a task that was not scored shows nothing."""
    if rows.empty:
        return False
    row = rows.iloc[0]
    return no_measurable_loss(str(row["metric"]), row["value"], row["delta"], row["delta_stderr"])


def rows_of(rows: pd.DataFrame, task: str, metric: str) -> pd.DataFrame:
    """The rows of one metric of one task."""
    return rows[(rows["task"] == task) & (rows["metric"] == metric)]


def valued(rows: pd.DataFrame) -> str:
    """Value with its error and, of a sparse model, the paired difference with its own."""
    if rows.empty:
        return ""
    row = rows.iloc[0]
    cell = with_error(row["value"], row["stderr"])
    return cell if pd.isna(row["delta"]) else f"{cell} ({with_error(row['delta'], row['delta_stderr'], sign='+')})"


def _cell(rows: pd.DataFrame, task: str, metric: str) -> str:
    """Value with its error; for the loss of a sparse model the paired difference to dense, which is what counts."""
    row = rows_of(rows, task, metric).iloc[0]
    if metric == "loss":
        if pd.isna(row["delta"]):
            return f"(dense: {with_error(row['value'], row['stderr'])})"
        return with_error(row["delta"], row["delta_stderr"], sign="+")
    return with_error(row["value"], row["stderr"])


def engine(run: Path) -> str:
    """Quality and speed of one object: for each storage and ratio perplexity, its paired difference, ms a token."""
    titles = ["storage", "selector", "neurons, heads skipped", "used", "nats a token over dense", "perplexity"]
    found = []
    for path in sorted(run.glob("*/result.json")):
        result, config = read_json(path), OmegaConf.load(path.parent / "config.yaml")
        scores, sparsity = result["metrics"]["pydocs_token"], result["sparsity"]
        measured, requested = sparsity["measured"], sparsity["requested"]
        loss = with_error(scores["loss"]["delta"], scores["loss"]["delta_stderr"], sign="+")
        cells = [
            config.decode.storage, sparsity["selector"], f"{percent(requested['mlp'])}, {percent(requested['heads'])}",
            f"{percent(measured['mlp_density'])}, {percent(measured['head_density'])}", loss,
            with_error(scores["token_perplexity"]["value"], scores["token_perplexity"]["stderr"]),
            f"{result['timing']['ms_per_token']:.2f}",
        ]  # fmt: skip
        found.append((STORAGES.index(config.decode.storage), requested["mlp"], cells))
    return markdown([*titles, "ms a token"], [cells for *_, cells in sorted(found)])


TABLES: dict[str, Callable[[Path], str]] = {
    "table": lambda run: embedded(read_table(run / "table.csv")),
    "real": lambda run: real(load_runs(run)),  # also of a sweep that is not complete
    "engine": engine,
    "calibrated": calibrated,
    **{name: partial(bundles, group=name) for name in ("forms", "ranks", "tokens", "lookahead", "on_policy")},
}

if __name__ == "__main__":
    main(sys.argv[1:])

"""The long table as files (table.csv, table.parquet) and as compact summaries for a terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from dejavu.analysis.runs import COLUMNS, typed
from dejavu.errors import DataError
from dejavu.evaluation.metrics import INTERVAL
from dejavu.tracking.files import by_rename

MAIN_METRICS = ("bits_per_byte", "token_perplexity", "acc")
SELECTORS = ("dense", "oracle", "predictor", "gate", "svd", "sign", "prompt", "static", "random")  # as they are shown
SETTINGS = [
    "backend",
    "positions",
    "budget",
    "rule",
    "tap",
    "rank",
    "corpus",
    "seed",
]  # shown where they vary, as swept keys are
HEADER_WIDTH = 14


def write_table(table: pd.DataFrame, folder: Path | str, parquet: bool = False) -> Path:
    """Write table.csv into `folder`, on request table.parquet too; returns the path of the CSV."""
    folder = Path(folder)
    if parquet:
        by_rename(folder / "table.parquet", lambda path: table.to_parquet(path, index=False))
    path = folder / "table.csv"
    by_rename(path, lambda temporary: table.to_csv(temporary, index=False))
    return path


def read_table(path: Path | str) -> pd.DataFrame:
    """A table written by write_table, with the types it had. Raises DataError when it is not one."""
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            return typed(pd.read_parquet(path))
        return typed(pd.read_csv(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a readable table: run the command that made it again") from error


def rich_table(table: pd.DataFrame, console: Console | None = None) -> Table:
    """One row per setting: dense first, then by fraction skipped; the main metric of every task, measured densities.

    Paired differences to dense are added, dim, when the console (default: the current terminal) is wide enough.
    """
    console = console or Console()
    wide = summary(table, deltas=True)
    needed = console.measure(wide, options=console.options.update(width=10_000)).maximum
    return wide if needed <= console.width else summary(table, deltas=False)


def summary(table: pd.DataFrame, deltas: bool) -> Table:
    """The table behind rich_table, with or without paired differences."""
    varying, tasks, groups = arranged(table)
    result = Table(title=title(table), box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("selector", "neurons\nskipped", "heads\nskipped", *varying):
        result.add_column(name, justify="left" if name == "selector" else "right", no_wrap=True)
    for task, metric in tasks:
        result.add_column(f"{broken(task)}\n[dim]{metric}[/]", justify="right", no_wrap=True)
    for name in ("neurons\nused", "heads\nused"):
        result.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        result.add_row(*summary_row(group, varying, tasks, "[dim]{}[/]" if deltas else ""))
    return result


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The same summary as text for a notebook, differences to dense in brackets."""
    varying, tasks, groups = arranged(table)
    names = ["selector", "neurons skipped", "heads skipped", *varying, *(f"{task}, {metric}" for task, metric in tasks)]
    cells = [summary_row(group, varying, tasks, "({})") for group in groups]
    unbroken = str.maketrans({" ": "\N{NO-BREAK SPACE}", "(": " ("})  # a line may end before a bracket only
    table = pd.DataFrame(cells, columns=[*names, "neurons used", "heads used"])
    return table.map(lambda cell: cell.replace(" (", "(").translate(unbroken))


def arranged(table: pd.DataFrame) -> tuple[list[str], list[tuple[str, str]], list[pd.DataFrame]]:
    """What a summary shows: the settings that vary, the tasks with their main metric, the rows of each setting."""
    rows = table[table["metric"].isin(MAIN_METRICS)]
    settings = [*SETTINGS, *(key for key in table.columns if key not in COLUMNS and key != "note")]
    varying = [key for key in ["model", *settings] if rows[key].nunique(dropna=False) > 1]
    tasks = list(dict.fromkeys(zip(rows["task"], rows["metric"], strict=True)))
    keys = ["model", "selector", "mlp", "heads", *settings]
    return varying, tasks, [group for _, group in in_order(rows).groupby(keys, sort=False, dropna=False)]


def summary_row(group: pd.DataFrame, varying: list[str], tasks: list[tuple[str, str]], delta: str) -> list[str]:
    """The cells of one setting; a task that it was not scored on stays empty. `delta` says how a difference is put."""
    first = group.iloc[0]
    cells = [first["selector"], percent(first["mlp"]), percent(first["heads"])]
    cells += ["" if pd.isna(first[key]) else str(first[key]) for key in varying]
    scores = {(row["task"], row["metric"]): row for row in reversed(group.to_dict("records"))}
    for task in tasks:
        cell = with_error(scores[task]["value"], scores[task]["stderr"]) if task in scores else ""
        if delta and task in scores and not pd.isna(scores[task]["delta"]):
            cell += " " + delta.format(with_error(scores[task]["delta"], scores[task]["delta_stderr"], sign="+"))
        cells.append(cell)
    return [*cells, percent(first["mlp_density"], 1), percent(first["head_density"], 1)]


def rich_neighbours(table: pd.DataFrame) -> Table:
    """Is each selector really better than the next? Paired differences of the main metrics from runs.neighbours."""
    result = Table(title="Neighbouring selectors, paired over the same documents", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "metric", "neurons\nskipped", "heads\nskipped", "better", "worse", "worse - better", "95 %"):
        result.add_column(name, justify="left" if name in ("task", "metric", "better", "worse", "95 %") else "right")
    rows = table[table["metric"].isin(MAIN_METRICS)]
    for row in rows.sort_values(["task", "metric", "mlp", "heads"], kind="stable").to_dict("records"):
        apart = abs(row["delta"]) > INTERVAL * row["delta_stderr"]
        result.add_row(
            row["task"], row["metric"], percent(row["mlp"]), percent(row["heads"]), row["better"], row["worse"],
            with_error(row["delta"], row["delta_stderr"], sign="+"), "apart" if apart else "[dim]not apart[/]",
        )  # fmt: skip
    return result


def title(table: pd.DataFrame) -> str:
    """What a summary shows: its models and how many runs."""
    models = ", ".join(dict.fromkeys(table["model"]))
    return f"{models}: {table['run'].nunique()} runs, value ± standard error"


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows sorted for reading: dense first, then by fraction skipped, then selectors in their fixed order."""
    keyed = rows.assign(_sparse=rows["selector"] != "dense", _selector=rows["selector"].map(selector_rank))
    ordered = keyed.sort_values(["model", "_sparse", "mlp", "heads", "_selector"], kind="stable")
    return ordered[rows.columns]


def selector_rank(name: str) -> int:
    """A selector's place in SELECTORS; unknown ones come last."""
    return SELECTORS.index(name) if name in SELECTORS else len(SELECTORS)


def broken(name: str) -> str:
    """A task's name on several lines, cut after underscores."""
    words = name.replace("_", "_ ")
    return "\n".join(line.replace("_ ", "_") for line in textwrap.wrap(words, HEADER_WIDTH, break_long_words=False))


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headers, *rows]
    written = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([written[0], "|" + "---|" * len(headers), *written[1:]])


def percent(fraction: float, digits: int = 0) -> str:
    """A fraction in percent, empty when it is not known."""
    return "" if pd.isna(fraction) else f"{100 * fraction:.{digits}f} %"


def with_error(value: float, stderr: float, sign: str = "") -> str:
    """`value ± stderr`, both to the error's second significant digit; very large numbers in powers of ten."""
    if not np.isfinite(value) or abs(value) >= 1e5:
        return f"{value:{sign}.3g}" + ("" if pd.isna(stderr) else f" ± {stderr:.2g}")
    if pd.isna(stderr) or stderr <= 0:
        return f"{value:{sign}.4g}" + ("" if pd.isna(stderr) else " ± 0")
    digits = int(np.clip(1 - np.floor(np.log10(stderr)), 0, 4))
    return f"{value:{sign}.{digits}f} ± {stderr:.{digits}f}"

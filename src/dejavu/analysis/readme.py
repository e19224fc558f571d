"""README's table, written from a pipeline's files: `python -m dejavu.analysis.readme RUN_DIR README.md`.

Numbers in the README are put there by this, between two marker lines, and by nothing else.
"""

import shutil
import sys
from pathlib import Path

import pandas as pd

from dejavu.analysis.tables import in_order, percent, read_table, with_error
from dejavu.errors import DataError

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TASKS = [("pydocs", "bits_per_byte"), ("pydocs_token", "loss"), ("continuation_choice", "acc")]
HEADERS = ["pydocs, bits per byte", "pydocs, nats per token over dense", "continuation choice, accuracy"]


def main(arguments: list[str]) -> None:
    """Replace README's table by the run's, and put its picture where README shows it."""
    run, readme = Path(arguments[0]), Path(arguments[1])
    table = read_table(run / "table.csv")
    text = readme.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise DataError(f"{readme} must hold the lines {BEGIN} and {END} once each")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{markdown(table)}\n{END}{tail}", "utf-8")
    images = readme.parent / "docs" / "images"
    images.mkdir(exist_ok=True)
    shutil.copyfile(run / "sparsity_vs_quality.png", images / "sparsity_vs_quality.png")


def markdown(table: pd.DataFrame) -> str:
    """One row per ratio and selector, as a Markdown table."""
    lines = [
        "| heads and neurons skipped | selector | " + " | ".join(HEADERS) + " |",
        "|---|---|" + "---|" * len(TASKS),
    ]
    for (_, selector), rows in in_order(table).groupby(["mlp", "selector"], sort=False):
        cells = [_cell(rows, task, metric) for task, metric in TASKS]
        lines.append(f"| {percent(float(rows['mlp'].iloc[0]))} | {selector} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: pd.DataFrame, task: str, metric: str) -> str:
    """Value with its error; for the loss of a sparse model the paired difference to dense, which is what counts."""
    row = rows[(rows["task"] == task) & (rows["metric"] == metric)].iloc[0]
    if metric == "loss":
        if pd.isna(row["delta"]):
            return f"(dense: {with_error(row['value'], row['stderr'])})"
        return with_error(row["delta"], row["delta_stderr"], sign="+")
    return with_error(row["value"], row["stderr"])


if __name__ == "__main__":
    main(sys.argv[1:])

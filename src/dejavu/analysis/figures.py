"""Figures of the long table, drawn without pyplot's global state and written as PNG and SVG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter, PercentFormatter
from matplotlib.typing import RcKeyType

from dejavu.analysis.tables import selector_rank
from dejavu.errors import DataError
from dejavu.evaluation.metrics import INTERVAL
from dejavu.tracking.files import by_rename

DPI = 150
WIDTH, HEIGHT = 6.0, 3.0  # inches of one row of panels: 900 x 450 pixels
LOG_RANGE = 5  # perplexities that span more than this factor get a logarithmic axis
CHANCE = {
    "continuation_choice": 0.25,
    "winogrande": 0.5,
    "openbookqa": 0.25,
    "piqa": 0.5,
    "copa": 0.5,
    "rte": 0.5,
}
GREY = "#5f5f5f"
# Okabe and Ito's colours, told apart under every common colour blindness; the marker says the same once more.
STYLES = {
    "oracle": ("#0072B2", "o"),
    "predictor": ("#D55E00", "s"),
    "gate": ("#000000", ">"),
    "svd": ("#E69F00", "v"),
    "sign": ("#56B4E9", "<"),
    "prompt": ("#F0E442", "P"),
    "static": ("#009E73", "^"),
    "random": ("#CC79A7", "D"),
}
# What a curve leaves out, in words and as a dash: a sweep may hold curves of several.
PARTS = {"both": ("both", "-"), "mlp": ("neurons", "--"), "heads": ("heads", ":")}
LABELS = {"bits_per_byte": "bits per byte", "token_perplexity": "perplexity per token", "acc": "accuracy"}
UNITS = {"bits_per_byte": "documents", "token_perplexity": "blocks", "acc": "questions"}
RC: dict[RcKeyType, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "dejavu",  # the same table gives the same file
}


def sparsity_vs_quality(table: pd.DataFrame, path: Path | str) -> Path:
    """Quality against the fraction skipped (rows with mlp = heads), a panel per task, a curve per selector.

    Writes `path` (PNG, 900 pixels wide at two panels a row) and an SVG beside it. Raises DataError when the table
    holds nothing to draw, several models, or several runs for one point of a curve.
    """
    diagonal = table[table["mlp"] == table["heads"]]
    return curves(diagonal.assign(x=diagonal["mlp"]), "heads and neurons skipped", path)


def density_vs_quality(table: pd.DataFrame, density: Mapping[str, float], path: Path | str) -> Path:
    """Quality against the share of the body's weights that were measured as skipped: selectors at equal cost.

    `density` maps a row's `run` to its `body_density`. Writes and raises as `sparsity_vs_quality`.
    """
    skipped = 1 - table["run"].map(dict(density)).astype(float)
    return curves(table.assign(x=skipped), "weights of heads and neurons skipped", path)


def curves(rows: pd.DataFrame, label: str, path: Path | str) -> Path:
    """The picture of a table whose column `x` is the fraction skipped; `label` says of what.

    A curve for each selector, and for each part (neurons, heads, both) that the selectors leave out.
    """
    path = Path(path).with_suffix(".png")
    rows = rows[np.isfinite(rows["value"]) & np.isfinite(rows["x"])]
    rows = rows.assign(part=np.where(rows["heads"] == 0, "mlp", np.where(rows["mlp"] == 0, "heads", "both")))
    panels = main_panels(rows)
    check_drawable(rows, panels)
    with matplotlib.rc_context(RC):
        figure = draw(rows, panels, label)
        save(figure, path)
    return path


def main_panels(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """The (task, metric) pairs worth a panel: perplexity per token, else bits per byte, and accuracies.

    Blind variants are a line in their task's panel, not a panel.
    """
    pairs = dict.fromkeys(zip(rows["task"], rows["metric"], strict=True))
    perplexities = [pair for pair in pairs if pair[1] == "token_perplexity"]
    perplexities = perplexities or [pair for pair in pairs if pair[1] == "bits_per_byte"]
    return perplexities + [pair for pair in pairs if pair[1] == "acc" and not pair[0].endswith("_blind")]


def check_drawable(rows: pd.DataFrame, panels: list[tuple[str, str]]) -> None:
    """Raise DataError for a table whose curves would be empty or ambiguous."""
    if not panels:
        raise DataError("the table holds no finite main metric to draw at mlp = heads: evaluate with sparsity.ratio")
    if rows["model"].nunique() > 1:
        raise DataError(f"the table holds several models ({', '.join(sorted(set(rows['model'])))}): filter it to one")
    repeated = rows[rows.duplicated(["selector", "part", "x", "task", "metric"])]
    if len(repeated):
        first = repeated.iloc[0]
        raise DataError(
            f"the table holds several runs of {first['selector']} at {first['x']:g} for {first['task']} "
            f"(one is {first['run']}): filter it to one run for each point"
        )


def draw(rows: pd.DataFrame, panels: list[tuple[str, str]], label: str) -> Figure:
    """The figure: panels in rows of two, one legend for all."""
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * lines), dpi=DPI, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (task, metric) in zip(axes, panels, strict=False):
        draw_panel(axis, rows, task, metric)
        axis.set_xlabel(label)
    for axis in axes[len(panels) :]:
        axis.remove()
    lines_by_name = {str(line.get_label()): line for axis in axes[: len(panels)] for line in axis.get_lines()}
    names = [name_of(series, rows) for series in all_series(rows)]
    handles = [lines_by_name[name] for name in names if name in lines_by_name]
    interval = Patch(facecolor=GREY, alpha=0.2, linewidth=0, label="95 % interval")
    across = 6 if max(map(len, names), default=0) < 10 else 3  # what fits the figure's width
    figure.legend(handles=[*handles, interval], loc="outside lower center", ncols=across, frameon=False)
    figure.suptitle(f"{rows['model'].iloc[0]}: quality when heads and neurons are skipped", fontsize=9, weight="bold")
    return figure


def draw_panel(axis: Axes, rows: pd.DataFrame, task: str, metric: str) -> None:
    """One task: a curve per selector, dense as a line, and for choices what chance and blind guessing reach."""
    panel = rows[(rows["task"] == task) & (rows["metric"] == metric)]
    dense = panel[panel["selector"] == "dense"]
    for series in all_series(panel):
        selector, part = series
        own = panel[(panel["selector"] == selector) & (panel["part"] == part)].sort_values("x")
        # Nothing skipped is dense by definition: every curve starts there.
        draw_curve(axis, pd.concat([dense, own]), series, name_of(series, rows))
    axis.set_xlim(0, max(0.5, panel["x"].max()) + 0.04)
    if len(dense):
        reference(axis, dense["value"].iloc[0], "dense", "-", above=metric == "acc")
    blind = rows[(rows["task"] == f"{task}_blind") & (rows["metric"] == metric) & (rows["selector"] == "dense")]
    guessing = CHANCE.get(task) if metric == "acc" else None
    lower = guessing is not None and len(blind) > 0 and blind["value"].iloc[0] < guessing
    if len(blind):
        reference(axis, blind["value"].iloc[0], "dense, without context", ":", above=not lower)
    if guessing is not None:
        reference(axis, guessing, "chance", "--", above=lower)
    scale(axis, panel, metric)
    axis.xaxis.set_major_locator(MultipleLocator(0.25))
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axis.set_ylabel(LABELS[metric])
    axis.set_title(f"{task} (n = {panel['n'].max():,} {UNITS[metric]})", loc="left")


def all_series(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(selector, part) of each curve, in the order they are shown in."""
    found = rows.loc[rows["selector"] != "dense", ["selector", "part"]].drop_duplicates()
    pairs = list(found.itertuples(index=False, name=None))
    return sorted(pairs, key=lambda pair: (selector_rank(pair[0]), list(PARTS).index(pair[1])))


def name_of(series: tuple[str, str], rows: pd.DataFrame) -> str:
    """What the legend calls a curve: its selector, and the part where the table has several."""
    selector, part = series
    several = rows.loc[rows["selector"] != "dense", "part"].nunique() > 1
    return f"{selector}, {PARTS[part][0]}" if several else selector


def draw_curve(axis: Axes, curve: pd.DataFrame, series: tuple[str, str], name: str) -> None:
    """A line, markers and 95 % band where it was measured; `curve` starts with the dense row, if any."""
    colour, marker = STYLES.get(series[0], (GREY, "x"))
    x, y, error = (curve[column].to_numpy(dtype=float) for column in ("x", "value", "stderr"))
    error = INTERVAL * np.nan_to_num(error)
    low, high = np.maximum(y - error, y / 100), y + error  # a logarithmic axis has no zero
    own = np.flatnonzero(curve["selector"] == series[0]).tolist()
    axis.fill_between(x[own], low[own], high[own], color=colour, alpha=0.15, linewidth=0)
    axis.plot(x, y, color=colour, linestyle=PARTS[series[1]][1], marker=marker, markevery=own, markersize=4,
              linewidth=1.4, label=name)  # fmt: skip


def reference(axis: Axes, value: float, label: str, style: str, above: bool) -> None:
    """A horizontal line with its name at the left end."""
    axis.axhline(value, color=GREY, linestyle=style, linewidth=0.9, zorder=1.5)
    axis.annotate(
        label, (0.015, value), xycoords=("axes fraction", "data"), xytext=(0, 2 if above else -2),
        textcoords="offset points", va="bottom" if above else "top", color=GREY, fontsize=7,
    )  # fmt: skip


def scale(axis: Axes, panel: pd.DataFrame, metric: str) -> None:
    """Accuracies from 0 to 1, perplexities logarithmic when they span much; numbers as people write them."""
    low, high = panel["value"].min(), panel["value"].max()
    if metric == "acc":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    elif metric == "token_perplexity" and high > LOG_RANGE * low:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.yaxis.set_major_formatter(FuncFormatter(plain))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.margins(y=0.1)


def plain(value: float, _: int | None = None) -> str:
    """2, 500, 10,000; powers of ten from a million on."""
    return f"{value:,.0f}" if value < 1e6 else f"$10^{{{np.log10(value):.0f}}}$"


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, and as SVG beside it, by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    by_rename(path, lambda temporary: figure.savefig(temporary, format="png", dpi=DPI))
    undated = {"Date": None}
    svg = path.with_suffix(".svg")
    by_rename(svg, lambda temporary: figure.savefig(temporary, format="svg", metadata=undated))

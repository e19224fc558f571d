"""Milliseconds a token: against the share computed (benchmark.csv), and against the quality of the same object."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dejavu.analysis.figures import DPI, GREY, LABELS, RC, WIDTH, main_panels, save, scale
from dejavu.analysis.runs import find_runs, long_table
from dejavu.analysis.tables import percent
from dejavu.errors import DataError
from dejavu.evaluation.metrics import INTERVAL

COLOURS = {"float32": "#0072B2", "bfloat16": "#009E73", "int8": "#D55E00"}  # Okabe and Ito
MARKERS = {"float32": "o", "bfloat16": "^", "int8": "s"}
BESIDE = {"float32": (5, 4, "left"), "bfloat16": (5, -10, "left"), "int8": (-5, 4, "right")}  # where a point's name is
STYLES = {"ctranslate2": ":", "hf-eager": "--", "hf-compile": "-."}


def read_benchmark(folder: Path | str) -> pd.DataFrame:
    """benchmark.csv of a run's folder. Raises DataError when there is none."""
    path = Path(folder) / "benchmark.csv"
    try:
        rows = pd.read_csv(path)
        return rows if "budget" in rows else rows.assign(budget="uniform")  # a file from before there were others
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing or damaged: `dejavu benchmark` makes it") from error


def benchmarks(folder: Path | str) -> dict[str, pd.DataFrame]:
    """Every benchmark.csv below a folder, by the path of its run."""
    runs = [path.parent for path in sorted(Path(folder).rglob("benchmark.csv"))]
    return {run.relative_to(folder).as_posix(): read_benchmark(run) for run in runs}


def latency(rows: pd.DataFrame, path: Path | str) -> Path:
    """Latency against the share computed: a curve per storage, its floor dotted, peers as lines; a panel per prompt.

    `rows` is benchmark.csv. Writes PNG and SVG.
    """
    path = Path(path).with_suffix(".png")
    prompts = sorted(rows["prompt_tokens"].unique())
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(3.4 * len(prompts) + 1.6, 3.4), dpi=DPI, layout="constrained")
        axes = figure.subplots(1, len(prompts), squeeze=False)[0]
        for axis, prompt in zip(axes, prompts, strict=True):
            panel(axis, rows[(rows["prompt_tokens"] == prompt) & rows["ms_per_token"].notna()])
            axis.set_title(f"{prompt} prompt tokens", loc="left")
        named = {str(line.get_label()): line for axis in axes for line in axis.get_lines()}
        figure.legend(handles=list(named.values()), loc="outside right upper", frameon=False)
        figure.suptitle(f"{rows['model'].iloc[0]}: milliseconds a token", fontsize=9, weight="bold", x=0.02, ha="left")
        save(figure, path)
    return path


def panel(axis: Axes, rows: pd.DataFrame) -> None:
    """One prompt length."""
    for storage, colour in COLOURS.items():
        own = rows[rows["contender"].str.startswith("dejavu") & (rows["storage"] == storage)].sort_values("mlp")
        for budget in dict.fromkeys(own.loc[own["mlp"] > 0, "budget"]) or dict.fromkeys(own["budget"]):
            curve = own[(own["budget"] == budget) | (own["mlp"] == 0)]  # the dense engine begins every curve
            told, marker = ("", "o") if budget == "uniform" else (f", {budget}", "s")
            axis.plot(
                1 - curve["mlp"], curve["ms_per_token"], color=colour, marker=marker, label=f"dejavu {storage}{told}"
            )
            axis.plot(
                1 - curve["mlp"], pd.to_numeric(curve["floor_ms"], errors="coerce"), color=colour, linewidth=0.9,
                linestyle=(0, (1, 1)), label=f"floor {storage}{told}",
            )  # fmt: skip
        for family, style in STYLES.items():
            for value in rows[(rows["contender"] == family) & (rows["storage"] == storage)]["ms_per_token"]:
                axis.axhline(value, color=colour, linestyle=style, linewidth=1, label=f"{family} {storage}")
    axis.set_xlabel("share of heads and neurons computed")
    axis.set_xlim(0, 1.03)
    axis.set_yscale("log")
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis="y", which="minor", labelsize=6, colors=GREY)


def speed_and_quality(folder: Path | str) -> pd.DataFrame:
    """The long table of the evaluations that decoded (backend=kernel), with the columns `storage` and `ms_per_token`.

    Raises DataError when there is none, and as `load_runs`.
    """
    runs = {run.name: run for run in find_runs(Path(folder)) if "ms_per_token" in run.result.get("timing", {})}
    if not runs:
        raise DataError(
            f"{folder} holds no evaluation that decoded: `dejavu evaluate -cn engine` measures quality and "
            "speed of one object"
        )
    table = long_table(list(runs.values()))
    return table.assign(
        storage=table["run"].map({name: run.config["decode"]["storage"] for name, run in runs.items()}),
        ms_per_token=table["run"].map({name: run.result["timing"]["ms_per_token"] for name, run in runs.items()}),
    )


def pareto(table: pd.DataFrame, path: Path | str) -> Path:
    """Milliseconds a token against perplexity (else bits per byte), of the same object; writes PNG and SVG.

    A curve per storage, each point named by the share skipped, with its 95 % interval; the grey steps join the points
    that no other beats in both, noise included.
    `table` is from `speed_and_quality`. Raises DataError when it holds no such metric or
    several models.
    """
    path = Path(path).with_suffix(".png")
    task, metric = next(((task, name) for task, name in main_panels(table) if name != "acc"), ("", ""))
    rows = table[(table["task"] == task) & (table["metric"] == metric) & np.isfinite(table["value"])]
    if rows.empty:
        raise DataError(f"the table holds no perplexity to draw in {path.name}: evaluate tasks=pydocs_token")
    if rows["model"].nunique() > 1:
        raise DataError(f"the table holds several models ({', '.join(sorted(set(rows['model'])))}): filter it to one")
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH, 3.6), dpi=DPI, layout="constrained")
        axis = figure.subplots()
        best = frontier(rows)
        axis.plot(
            best["ms_per_token"], best["value"], drawstyle="steps-post", color=GREY, linewidth=4, alpha=0.3, zorder=1,
            label="beaten in neither",
        )  # fmt: skip
        for storage, colour in COLOURS.items():
            own = rows[rows["storage"] == storage].sort_values("mlp")
            axis.errorbar(
                own["ms_per_token"], own["value"], yerr=INTERVAL * own["stderr"], color=colour, linewidth=1.2,
                marker=MARKERS[storage], markersize=5, elinewidth=0.8, capsize=2, label=storage,
            )  # fmt: skip
            for row in own.to_dict("records"):
                right, up, side = BESIDE[storage]
                axis.annotate(
                    name_of(row), (row["ms_per_token"], row["value"]), xytext=(right, up), textcoords="offset points",
                    ha=side, color=colour, fontsize=7,
                )  # fmt: skip
        axis.set_xlim(left=0, right=1.12 * rows["ms_per_token"].max())
        axis.set_xlabel("milliseconds a token")
        scale(axis, rows, metric)
        axis.set_ylabel(LABELS[metric])
        axis.set_title(
            f"{rows['model'].iloc[0]}, {task}, the engine's own quality and speed", loc="left", weight="bold"
        )
        axis.legend(loc="upper right", frameon=False)
        save(figure, path)
    return path


def skipped(row: Mapping[Any, Any]) -> str:
    """The share NOT computed of a row of benchmark.csv, and the kind of budget where it is not the same everywhere."""
    return percent(row["mlp"]) + ("" if row["budget"] == "uniform" else f" ({row['budget']})")


def frontier(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that no other beats in both milliseconds and value, the fastest first."""
    ordered = rows.sort_values(["ms_per_token", "value"])
    before = ordered["value"].cummin().shift(fill_value=np.inf)
    return ordered[ordered["value"] < before]


def name_of(row: dict[Any, Any]) -> str:
    """The share skipped, of neurons and heads where they differ; dense is called so."""
    if row["selector"] == "dense":
        return "dense"
    shares = dict.fromkeys(percent(row[kind]) for kind in ("mlp", "heads"))
    return ", ".join(shares)

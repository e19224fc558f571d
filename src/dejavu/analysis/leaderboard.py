"""What a sweep found: one table of all its evaluations, pictures at equal sparsity and at equal cost, heat maps."""

import logging
from pathlib import Path

import pandas as pd
from rich.console import Console

from dejavu.analysis.figures import density_vs_quality, sparsity_vs_quality
from dejavu.analysis.heatmaps import KINDS, MEASURES, selector_heat_map
from dejavu.analysis.runs import Run, find_runs, load_runs, read_result
from dejavu.analysis.tables import rich_table, selector_rank, write_table
from dejavu.errors import DataError

log = logging.getLogger("dejavu")

HEAT_MAPS = ("density", "recall_of_mass")


def leaderboard(root: Path | str) -> list[Path]:
    """Write table.csv, table.parquet and the pictures into the sweep's folder, print the table; the files written.

    Evaluations that finished before are in it as well. Raises DataError when there is none at all.
    """
    root = Path(root)
    table = load_runs(root)
    written = [write_table(table, root, parquet=True), *pictures(root, root)]
    console = Console(width=None if Console().is_terminal else 160)
    console.print(rich_table(table, console))
    for path in written:
        console.print(str(path), soft_wrap=True)
    return written


def pictures(root: Path | str, folder: Path | str) -> list[Path]:
    """Every picture that the evaluations below `root` allow, written into `folder`; the files (an SVG beside each).

    Raises as `load_runs`.
    """
    folder = Path(folder)
    table, runs = load_runs(root), find_runs(Path(root))
    density = {run.name: run.result["sparsity"]["measured"].get("body_density", float("nan")) for run in runs}
    written = []
    for draw in (
        lambda: sparsity_vs_quality(table, folder / "sparsity_vs_quality.png"),
        lambda: density_vs_quality(table, density, folder / "density_vs_quality.png"),
        *(lambda kind=kind, key=key: heat_map(runs, kind, key, folder) for kind in KINDS for key in HEAT_MAPS),
    ):
        try:
            written.append(draw())
        except DataError as error:  # a sweep over other keys has no such picture; its table is there all the same
            log.debug("%s", error)
    return written


def failures(root: Path | str) -> pd.DataFrame:
    """Evaluations below `root` that failed: columns run, error."""
    rows = []
    for path in sorted(Path(root).rglob("result.json")):
        result = read_result(path)
        if result.get("stage") == "evaluate" and result.get("status") == "failed":
            error = result.get("error") or {}
            rows.append((path.parent.relative_to(root).as_posix(), f"{error.get('type')}: {error.get('message')}"))
    return pd.DataFrame(rows, columns=["run", "error"])


def heat_map(runs: list[Run], kind: str, key: str, folder: Path) -> Path:
    """One quantity of one kind of unit: a row per sparse evaluation, in the order of the table."""
    shown = sorted(
        (run for run in runs if run.result["sparsity"]["selector"] != "dense"),
        key=lambda run: (selector_rank(run.result["sparsity"]["selector"]), *requested(run), run.name),
    )
    rows = {label(run, shown): run.result["sparsity"]["measured"] for run in shown}
    title = f"{MEASURES[key]} of {KINDS[kind]} per layer"
    return selector_heat_map(rows, f"{kind}_{key}_per_layer", title, folder / f"{key}_{KINDS[kind]}.png")


def requested(run: Run) -> tuple[float, float]:
    """(neurons, heads) fractions asked not to be computed."""
    asked = run.result["sparsity"]["requested"]
    return float(asked["mlp"]), float(asked["heads"])


def label(run: Run, runs: list[Run]) -> str:
    """Selector and ratio; the run's name where that is not enough to tell it from another."""

    def short(each: Run) -> str:
        mlp, heads = requested(each)
        ratio = f"{mlp:g}" if mlp == heads else f"{mlp:g} / {heads:g}"
        return f"{each.result['sparsity']['selector']} {ratio}"

    return short(run) if sum(short(run) == short(other) for other in runs) == 1 else run.name

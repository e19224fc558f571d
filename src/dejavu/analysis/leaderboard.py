"""What a sweep found: one table of all its evaluations, pictures at equal sparsity and at equal cost, heat maps."""

import logging
from pathlib import Path

from rich.console import Console

from dejavu.analysis.figures import density_vs_quality, sparsity_vs_quality
from dejavu.analysis.heatmaps import KINDS, MEASURES, selector_heat_map
from dejavu.analysis.runs import Run, find_runs, load_runs
from dejavu.analysis.tables import rich_table, selector_rank, write_table
from dejavu.errors import DataError

log = logging.getLogger("dejavu")

HEAT_MAPS = ("density", "recall_of_mass")


def leaderboard(root: Path | str) -> list[Path]:
    """Write table.csv, table.parquet and the pictures into the sweep's folder, print the table; the files written.

    Evaluations that finished before are in it as well. Raises DataError when there is none at all.
    """
    root = Path(root)
    table, runs = load_runs(root), find_runs(root)
    written = [write_table(table, root, parquet=True)]
    density = {run.name: run.result["sparsity"]["measured"].get("body_density", float("nan")) for run in runs}
    for draw in (
        lambda: sparsity_vs_quality(table, root / "sparsity_vs_quality.png"),
        lambda: density_vs_quality(table, density, root / "density_vs_quality.png"),
        *(lambda kind=kind, key=key: heat_map(runs, kind, key, root) for kind in KINDS for key in HEAT_MAPS),
    ):
        try:
            written.append(draw())
        except DataError as error:  # a sweep over other keys has no such picture; its table is there all the same
            log.debug("%s", error)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(rich_table(table, console))
    for path in written:
        console.print(str(path), soft_wrap=True)
    return written


def heat_map(runs: list[Run], kind: str, key: str, root: Path) -> Path:
    """One quantity of one kind of unit: a row per sparse evaluation, in the order of the table."""
    shown = sorted(
        (run for run in runs if run.result["sparsity"]["selector"] != "dense"),
        key=lambda run: (selector_rank(run.result["sparsity"]["selector"]), *requested(run), run.name),
    )
    rows = {label(run, shown): run.result["sparsity"]["measured"] for run in shown}
    title = f"{MEASURES[key]} of {KINDS[kind]} per layer"
    return selector_heat_map(rows, f"{kind}_{key}_per_layer", title, root / f"{key}_{KINDS[kind]}.png")


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

"""Predictors side by side: how they were made, how well they choose, what they cost and what is lost with them.

python -m dejavu.analysis.bundles DIR    # evaluations of several bundles: DIR/bundles.csv, bundles.png, bundles.svg
"""

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from dejavu.analysis.figures import DPI, GREY, RC, STYLES, WIDTH, save
from dejavu.analysis.tables import markdown, percent, with_error
from dejavu.errors import DataError
from dejavu.evaluation.metrics import INTERVAL
from dejavu.models.anatomy import KINDS
from dejavu.tracking.files import by_rename, read_json

PARTS = {"both": "both", "mlp": "neurons alone", "heads": "heads alone"}
COLOURS = {"both": STYLES["predictor"][0], "mlp": STYLES["oracle"][0], "heads": STYLES["static"][0]}
TASK = "pydocs_token"


def main(arguments: list[str]) -> None:
    """Write table and picture into the folder of the evaluations."""
    run = Path(arguments[0])
    table = bundle_table(run)
    by_rename(run / "bundles.csv", lambda path: table.to_csv(path, index=False))
    print(run / "bundles.csv")
    print(picture(table, run / "bundles.png"))


def bundle_table(run: Path) -> pd.DataFrame:
    """One row for each bundle, and one for the oracle where it was evaluated.

    name, group (the folder that the bundle's run lies in), tap, rank, first_rank, label, tokens (trained on),
    recall_of_mass_{mlp,heads} on held-out documents of the cache, bytes (share of the body's that choosing reads),
    {both,mlp,heads} (nats a token over dense with that part left out) and {both,mlp,heads}_stderr, ratio.
    Raises DataError when no evaluation in the folder used predictors, or they left out different shares.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    ratios = set()
    for path in sorted(run.glob("*/result.json")):
        result, config = read_json(path), OmegaConf.load(path.parent / "config.yaml")
        selector, part = config.sparsity.selector, config.sparsity.part
        if result["status"] != "ok" or selector not in ("predictor", "oracle"):
            continue
        new = {"name": "oracle"} if selector == "oracle" else described(Path(config.predictors))
        row = rows.setdefault((new.get("group", ""), new["name"]), new | {"ratio": config.sparsity.ratio})
        ratios.add(config.sparsity.ratio)
        loss = result["metrics"][TASK]["loss"]
        row |= {part: loss["delta"], f"{part}_stderr": loss["delta_stderr"]}
        if part == "both" and selector == "predictor":
            row["bytes"] = result["sparsity"]["measured"]["cost"]["predictors"]
    if not any(row["name"] != "oracle" for row in rows.values()):
        raise DataError(f"{run} has no evaluation with predictors: `dejavu evaluate -m predictors=A,B run_dir={run}`")
    if len(ratios) > 1:
        raise DataError(f"{run} has evaluations at several ratios: {sorted(ratios)}, use one")
    ordered: list[dict[str, Any]] = sorted(rows.values(), key=lambda row: place_of(row["name"]))
    return pd.DataFrame(ordered)


def place_of(name: str) -> tuple[bool, bool, list[tuple[bool, int, str]]]:
    """The oracle first, then the default, then by name, numbers in it by their size."""
    words = [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in re.split(r"(\d+)", name)]
    return name != "oracle", name != "default", words


def described(named: Path) -> dict[str, Any]:
    """What a bundle says of itself."""
    config = read_json(bundle_folder(named) / "config.json")
    metrics = config["metrics"]
    return {
        "name": name_of(named),
        "group": run_of(named).parent.name,
        "tap": config["tap"],
        "rank": config["rank"],
        "first_rank": config.get("first_rank", config["rank"]),
        "label": config.get("label", "contribution"),
        "tokens": metrics.get("tokens"),
        **{f"recall_of_mass_{kind}": value for kind, value in metrics["recall_of_mass"].items()},
    }


def bundles(run: Path, group: str) -> str:
    """`bundle_table` in Markdown: the bundles of one group, below the oracle and the default."""
    table = bundle_table(run)
    table = table[(table["group"] == group) | table["name"].isin(["oracle", "default"])]
    shown = [part for part in PARTS if part in table]
    titles = ["predictors", "tap", "rank", "tokens", "recall of mass, neurons", "heads", "bytes, share of the body"]
    titles += [f"nats over dense, {PARTS[part]}" for part in shown]
    lines = []
    for row in table.to_dict("records"):
        made = [""] * 6
        if row["name"] != "oracle":
            ranks = f"{row['rank']:.0f}" + ("" if row["first_rank"] == row["rank"] else f" ({row['first_rank']:.0f})")
            recalls = [f"{row[f'recall_of_mass_{kind}']:.3f}" for kind in KINDS]
            made = [row["tap"], ranks, f"{row['tokens']:,.0f}", *recalls, percent(row.get("bytes", float("nan")), 1)]
        pairs = [(row[part], row[f"{part}_stderr"]) for part in shown]
        losses = ["" if pd.isna(loss) else with_error(loss, error, sign="+") for loss, error in pairs]
        lines.append([row["name"], *made, *losses])
    ending = f"At {percent(table['ratio'].iloc[0])} skipped; in brackets the rank in the first layer where it differs."
    return f"{markdown(titles, lines)}\n\n{ending}"


def picture(table: pd.DataFrame, path: Path) -> Path:
    """A line for each bundle: recall of mass on the left, loss over dense on the right, the oracle's dashed."""
    made = table[table["name"] != "oracle"]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH * 1.3, 1.1 + 0.26 * len(made)), dpi=DPI, layout="constrained")
        recall, loss = figure.subplots(1, 2, sharey=True)
        places = range(len(made))
        for kind, unit in (("mlp", "neurons"), ("heads", "heads")):
            shape = {"marker": "o" if kind == "mlp" else "s", "color": COLOURS[kind], "linestyle": "", "label": unit}
            recall.plot(made[f"recall_of_mass_{kind}"], places, **shape)
        recall.set_yticks(list(places), list(made["name"]))
        recall.set_xlabel("recall of mass, held-out documents")
        recall.set_ylim(len(made) - 0.5, -0.5)
        draw_losses(loss, table, made)
        handles = dict(zip(*reversed(recall.get_legend_handles_labels()), strict=True))
        handles |= dict(zip(*reversed(loss.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
        save(figure, path)
    return path


def draw_losses(axis: Axes, table: pd.DataFrame, made: pd.DataFrame) -> None:
    """Nats a token over dense of every bundle with its 95 % interval; what the oracle loses is a line."""
    oracle = table[table["name"] == "oracle"]
    for part in (part for part in PARTS if part in table):
        error = INTERVAL * made[f"{part}_stderr"].to_numpy(float)
        axis.errorbar(made[part], range(len(made)), xerr=error, fmt="D", markersize=4, color=COLOURS[part],
                      label=f"{PARTS[part]} skipped")  # fmt: skip
        if len(oracle):
            axis.axvline(oracle[part].iloc[0], color=COLOURS[part], linestyle="--", linewidth=0.9)
    axis.axvline(0, color=GREY, linewidth=0.6)
    axis.set_xlabel(f"nats a token over dense, {percent(table['ratio'].iloc[0])} skipped (dashed: oracle)")


def bundle_folder(named: Path) -> Path:
    """The bundle meant by predictors=DIR: itself, or what a run's folder holds."""
    return named if (named / "config.json").is_file() and not (named / "bundle").is_dir() else named / "bundle"


def name_of(named: Path) -> str:
    """What a bundle's run was called: a sweep names it from the values that differ."""
    return run_of(named).name.removeprefix("predictor=").replace("predictor.", "")


def run_of(named: Path) -> Path:
    """The folder of the run that made a bundle."""
    return named.parent if named.name == "bundle" else named


if __name__ == "__main__":
    main(sys.argv[1:])

"""Figures of trained predictors: how training went, and how much of what matters they choose in each layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dejavu.analysis.activity_figures import UNITS
from dejavu.analysis.bundles import bundle_folder
from dejavu.analysis.figures import DPI, HEIGHT, RC, STYLES, WIDTH, save
from dejavu.analysis.tables import percent
from dejavu.errors import DataError
from dejavu.tracking.files import read_json

DENSITY = "0.25"  # of those at which a bundle's recall was measured


def read_bundle(folder: Path | str) -> dict[str, Any]:
    """What a bundle says of itself; `folder` is a train's or the bundle's. Raises DataError when there is none."""
    return read_json(bundle_folder(Path(folder)) / "config.json")


def recall_of_layers(bundle: Mapping[str, Any], path: Path | str) -> Path:
    """Recall of mass on held-out documents, layer by layer, of the predictors and of a fixed set. Writes PNG and SVG.

    `bundle` is from `read_bundle`. Raises DataError for one that holds no measures per layer.
    """
    path = Path(path).with_suffix(".png")
    layers = bundle.get("metrics", {}).get("layers")
    if not layers:
        raise DataError(f"the bundle holds no recall per layer to draw in {path.name}: train it again")
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        for axis, (kind, units) in zip(figure.subplots(1, 2, sharey=True), UNITS.items(), strict=True):
            measured = {int(name.split(".")[1]): each for name, each in layers.items() if name.startswith(f"{kind}.")}
            for name, key in (("predictor", "recall_of_mass"), ("static", "static_recall_of_mass")):
                colour, marker = STYLES[name]
                values = [each[key][DENSITY] for each in measured.values()]
                axis.plot(list(measured), values, color=colour, marker=marker, markersize=4, linewidth=1.3, label=name)
            axis.axhline(float(DENSITY), color=STYLES["random"][0], linestyle="--", linewidth=0.9, label="equal shares")
            axis.set_title(f"{units}, {percent(float(DENSITY))} chosen", loc="left")
            axis.set_xlabel("layer")
            axis.set_ylim(0, 1.02)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.axes[0].set_ylabel("recall of mass")
        handles = figure.axes[0].get_legend_handles_labels()[0]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)
    return path


def training_curve(folder: Path | str, path: Path | str) -> Path:
    """Loss by step, and recall of mass on held-out documents by epoch, from a train's metrics.csv. PNG and SVG.

    Raises DataError when the file is missing or damaged.
    """
    path, source = Path(path).with_suffix(".png"), Path(folder) / "metrics.csv"
    try:
        rows = pd.read_csv(source)
        losses, epochs = rows.dropna(subset="loss"), rows.dropna(subset="recall_of_mass")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source} is missing or damaged: `dejavu train` makes it") from error
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        loss, recall = figure.subplots(1, 2)
        loss.plot(losses["step"], losses["loss"], color=STYLES["predictor"][0], marker=".", linewidth=1.2)
        loss.set_title("training loss", loc="left")
        loss.set_xlabel("step")
        loss.set_ylim(bottom=0)
        for kind, (colour, marker) in zip(UNITS, (STYLES["predictor"], STYLES["oracle"]), strict=True):
            values = epochs[f"recall_of_mass/{kind}"]
            recall.plot(epochs["epoch"] + 1, values, color=colour, marker=marker, markersize=4, label=UNITS[kind])
        recall.set_title("recall of mass, held-out documents", loc="left")
        recall.set_xlabel("epoch")
        recall.set_ylim(0, 1.02)
        recall.xaxis.set_major_locator(MaxNLocator(integer=True))
        recall.legend(loc="lower right")
        save(figure, path)
    return path

"""Heat maps over the layers: how much each computes, and how much of what matters its choice takes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dejavu.analysis.figures import DPI, RC, WIDTH, save
from dejavu.errors import DataError

KINDS = {"mlp": "neurons", "head": "heads"}
LETTER = 0.075  # inches of a letter of a row's name
MEASURES = {"density": "density", "recall_of_mass": "recall of mass", "recall": "recall"}


def layer_heat_map(measured: Mapping[str, Any], path: Path | str) -> Path:
    """One run: a row per measure and kind of unit, a column per layer. Writes PNG and SVG.

    `measured` is `sparsity.measured` of a result.json. Raises DataError when it holds nothing per layer.
    """
    rows = {
        f"{title}, {unit}": values
        for kind, unit in KINDS.items()
        for measure, title in MEASURES.items()
        if (values := measured.get(f"{kind}_{measure}_per_layer")) and any(value is not None for value in values)
    }
    return draw_rows(rows, "density and recall per layer", Path(path))


def predictor_heat_map(layers: Mapping[str, Mapping[str, Any]], density: str, path: Path | str) -> Path:
    """How well a bundle's predictors choose, by kind: recall of mass, the static order's, and recall. PNG and SVG.

    `layers` is `metrics.layers` of a bundle's config, such as {"mlp.3": {"recall_of_mass": {"0.25": 0.9}}}.
    """
    measures = {
        "recall_of_mass": "recall of mass",
        "static_recall_of_mass": "recall of mass, static",
        "recall": "recall",
    }
    last = max(int(name.split(".")[1]) for name in layers)
    rows = {
        f"{unit}: {title}": [layers.get(f"{kind}.{layer}", {}).get(key, {}).get(density) for layer in range(last + 1)]
        for kind, unit in (("mlp", "neurons"), ("heads", "heads"))
        for key, title in measures.items()
    }
    return draw_rows(rows, f"held-out tokens, {float(density):.0%} of the units chosen", Path(path))


def selector_heat_map(runs: Mapping[str, Mapping[str, Any]], key: str, title: str, path: Path | str) -> Path:
    """One measure (such as `mlp_recall_of_mass_per_layer`) of several runs: a row per run. Writes PNG and SVG."""
    rows = {name: measured[key] for name, measured in runs.items() if any(v is not None for v in measured.get(key, []))}
    return draw_rows(rows, title, Path(path))


def draw_rows(rows: Mapping[str, Sequence[float | None]], title: str, path: Path) -> Path:
    """The picture: 0 to 1 in shades, numbers where they fit; layers without a value stay white."""
    if not rows:
        raise DataError(f"there is nothing per layer to draw in {path.name}: evaluate a sparse selector")
    path = path.with_suffix(".png")
    values = np.array([[np.nan if value is None else value for value in row] for row in rows.values()], dtype=float)
    layers = values.shape[1]
    width = max(WIDTH, 0.6 * WIDTH + LETTER * max(map(len, rows)))  # names of a sweep's jobs are as long as they need
    with matplotlib.rc_context({**RC, "axes.grid": False}):
        figure = Figure(figsize=(width, 1.0 + 0.28 * len(rows)), dpi=DPI, layout="constrained")
        axis = figure.subplots()
        image = axis.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set_xticks(range(0, layers, max(1, layers // 12)))
        axis.set_xlabel("layer")
        axis.set_title(title, loc="left")
        if layers <= 16:
            for (row, layer), value in np.ndenumerate(values):
                if np.isfinite(value):
                    colour = "white" if value < 0.5 else "black"
                    axis.text(layer, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
        figure.colorbar(image, ax=axis, pad=0.01, fraction=0.04)
        save(figure, path)
    return path

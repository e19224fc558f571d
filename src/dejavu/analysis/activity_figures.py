"""Figures of activity.parquet: overlap from token to token, hot and cold units, growing unions, why lookahead works."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from dejavu.analysis.figures import DPI, GREY, HEIGHT, RC, STYLES, WIDTH, save
from dejavu.errors import DataError

UNITS = {"mlp": "neurons", "heads": "heads"}
TAPS = {"overlap": STYLES["oracle"], "previous": STYLES["predictor"]}  # colour and marker
UNIONS = {"batch": ("tokens of different places", "predictor"), "text": ("consecutive tokens", "oracle")}
LAYERS = colormaps["viridis"]

Colour = str | tuple[float, float, float, float]


def overlap_of_tokens(table: pd.DataFrame, path: Path | str) -> Path:
    """Share of a token's active set that was active some tokens before, a curve per layer. Writes PNG and SVG.

    Marks at the right: the same for tokens of other documents, which is what always hot units give. `table` is
    activity.parquet, here and below; each function raises DataError when the table lacks what it draws.
    """
    path, rows = prepared(table, path, "overlap")
    with matplotlib.rc_context(RC):
        figure, axes = panels("overlap of a token's active set with an earlier token's")
        for axis, (kind, units) in zip(axes, UNITS.items(), strict=True):
            own = rows[rows["kind"] == kind]
            apart = sorted(own["x"].dropna().unique())
            other = 2.5 * max(apart)
            for colour, curve in by_layer(own, rows):
                near = curve[curve["variant"] == "same text"]
                axis.plot(near["x"], near["value"], color=colour, marker=".", linewidth=1.2)
                axis.plot([other], curve[curve["variant"] == "other text"]["value"], color=colour, marker="D", ms=3.5)
            powers_of_two(axis, apart)
            axis.axvline(np.sqrt(other * max(apart)), color=GREY, linewidth=0.6)
            axis.set_xticks([*apart, other], [*(f"{x:g}" for x in apart), "other\ntext"])
            axis.set_xlabel("tokens apart")
            shares(axis, "share of the active set")
            axis.set_title(units, loc="left")
        layer_bar(figure, axes, rows)
        save(figure, path)
    return path


def hot_and_cold(table: pd.DataFrame, path: Path | str) -> Path:
    """How often each unit is active, and what share of the contribution a fixed set carries. Writes PNG and SVG."""
    path, rows = prepared(table, path, "frequency", "mass")
    with matplotlib.rc_context(RC):
        figure, axes = panels("hot and cold units", lines=2)
        for column, (kind, units) in enumerate(UNITS.items()):
            for line, measure in enumerate(("frequency", "mass")):
                axis = axes[2 * line + column]
                for colour, curve in by_layer(rows[(rows["kind"] == kind) & (rows["measure"] == measure)], rows):
                    for variant, one in curve.groupby("variant"):
                        style = "--" if variant == "fixed set" else "-"
                        axis.plot(one["x"], one["value"], color=colour, linewidth=1.1, linestyle=style)
                shares(axis, ("tokens in whose active set it is", "share of recorded contribution")[line])
                axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
                axis.set_xlim(0, 1)
                axis.set_xlabel((f"{units}, the most active first", f"share of the {units}")[line])
                axis.set_title(units, loc="left")
        names = {"-": "each token's own best", "--": "the same units for every token"}
        handles = [Line2D([], [], color=GREY, ls=style, label=name) for style, name in names.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
        layer_bar(figure, axes, rows)
        save(figure, path)
    return path


def union_growth(table: pd.DataFrame, path: Path | str) -> Path:
    """Share of units that some of B tokens activate, the median layer and the range of layers. Writes PNG and SVG.

    Consecutive tokens of a text, tokens drawn from the whole sample (a batch), and what it would be if each token drew
    as many units at random (dotted, at the median layer's density).
    """
    path, rows = prepared(table, path, "union")
    with matplotlib.rc_context(RC):
        figure, axes = panels("units active in at least one of B tokens: median and range of the layers")
        for axis, (kind, units) in zip(axes, UNITS.items(), strict=True):
            own = rows[rows["kind"] == kind]
            alone = own[(own["x"] == 1) & (own["variant"] == "batch")].set_index("layer")["value"]
            sizes = np.sort(own["x"].unique())
            expected = [1 - (1 - alone.median()) ** size for size in sizes]
            axis.plot(sizes, expected, color=GREY, linestyle=":", label="drawn at random, as many")
            for variant, (name, looks) in UNIONS.items():
                values = own[own["variant"] == variant].pivot(index="layer", columns="x", values="value")
                band(axis, values, *STYLES[looks], name)
            powers_of_two(axis, sizes)
            axis.set_xlabel("B, tokens decoded together")
            shares(axis, "share of units in the union")
            axis.set_title(units, loc="left")
        handles = axes[0].get_legend_handles_labels()[0][::-1]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)
    return path


def lookahead_cosine(table: pd.DataFrame, path: Path | str) -> Path:
    """How little the residual turns from layer to layer, and how near a tap is to what the layer itself reads.

    Means over tokens; bands are quartiles. Writes PNG and SVG.
    """
    path, rows = prepared(table, path, "cosine", "tap")
    with matplotlib.rc_context(RC):
        figure, axes = panels("why a layer can be foreseen: cosine of the tensors", columns=3)
        residuals = rows[(rows["measure"] == "cosine") & rows["value"].notna()]
        steps = sorted(residuals["x"].unique())
        for number, ahead in enumerate(steps):
            colour = LAYERS(number / max(1, len(steps) - 0.6))
            for variant, style in (("raw", "-"), ("centred", ":")):
                one = residuals[(residuals["x"] == ahead) & (residuals["variant"] == variant)]
                name = f"{ahead:g} block{'s' if ahead > 1 else ''} ahead" if variant == "raw" else "_"
                quartiles(axes[0], one, colour, ".", name, style)
        axes[0].set_title("residual r against later ones", loc="left")
        handles = axes[0].get_legend_handles_labels()[0]
        legend(axes[0], [*handles, Line2D([], [], color=GREY, linestyle=":", label="mean taken off")])
        for axis, (kind, units) in zip(axes[1:], UNITS.items(), strict=True):
            for tap, (shade, marker) in TAPS.items():
                own = rows[(rows["measure"] == "tap") & (rows["kind"] == kind) & (rows["variant"] == tap)]
                quartiles(axis, own, shade, marker, f"tap {tap}", "-")
            axis.set_title(f"tap of {units} against direct", loc="left")
            legend(axis, axis.get_legend_handles_labels()[0])
        lowest = min(0.0, float(rows["low"].min()))
        for axis in axes:
            axis.set_xlabel("layer")
            axis.set_ylim(lowest - 0.03, 1.03)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].set_ylabel("cosine")
        save(figure, path)
    return path


def prepared(table: pd.DataFrame, path: Path | str, *measures: str) -> tuple[Path, pd.DataFrame]:
    """The picture's path and the rows of its measures. Raises DataError when one is missing."""
    path = Path(path).with_suffix(".png")
    for measure in measures:
        if not (table["measure"] == measure).any():
            raise DataError(f"the table holds no {measure} to draw in {path.name}: collect the cache again")
    return path, table[table["measure"].isin(measures)]


def panels(title: str, columns: int = 2, lines: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with a title and panels side by side."""
    width = WIDTH + 0.5 if columns == 2 else 1.4 * WIDTH
    figure = Figure(figsize=(width, HEIGHT * lines), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=9, weight="bold")
    return figure, list(figure.subplots(lines, columns, squeeze=False).ravel())


def by_layer(own: pd.DataFrame, rows: pd.DataFrame) -> Iterator[tuple[Colour, pd.DataFrame]]:
    """(a layer's colour, its rows in order of x); the colours run over all layers of the picture."""
    norm = Normalize(*layer_range(rows))
    for layer, curve in own.groupby("layer"):
        yield LAYERS(norm(float(str(layer)))), curve.sort_values("x", kind="stable")


def layer_range(rows: pd.DataFrame) -> tuple[float, float]:
    """First and last layer, stretched a little so that the last is not too light to see on white."""
    first, last = float(rows["layer"].min()), float(rows["layer"].max())
    return first, last + 0.12 * max(1.0, last - first)


def layer_bar(figure: Figure, axes: list[Axes], rows: pd.DataFrame) -> None:
    """The colours of the layers, at the right."""
    first, last = rows["layer"].min(), rows["layer"].max()
    bar = figure.colorbar(ScalarMappable(Normalize(*layer_range(rows)), LAYERS), ax=axes, pad=0.01, aspect=30)
    bar.ax.set_ylim(first - 0.001, last)
    bar.set_label("layer")
    bar.locator = MaxNLocator(integer=True, nbins=8)
    bar.update_ticks()


def band(axis: Axes, values: pd.DataFrame, colour: Colour, marker: str, name: str) -> None:
    """The median layer as a line and the range of layers as a band; `values` has a row per layer, a column per x."""
    x = values.columns.to_numpy(dtype=float)
    axis.fill_between(x, values.min(), values.max(), color=colour, alpha=0.15, linewidth=0)
    axis.plot(x, values.median(), color=colour, marker=marker, markersize=4, linewidth=1.3, label=name)


def quartiles(axis: Axes, rows: pd.DataFrame, colour: Colour, marker: str, name: str, style: str) -> None:
    """A mean by layer as a line, quartiles as a band."""
    layer = rows["layer"].to_numpy()
    axis.fill_between(layer, rows["low"], rows["high"], color=colour, alpha=0.15, linewidth=0)
    axis.plot(
        layer, rows["value"], color=colour, marker=marker, markersize=4, linewidth=1.3, linestyle=style, label=name
    )


def legend(axis: Axes, handles: list[Artist]) -> None:
    """A legend inside a panel, on a ground that hides the grid."""
    axis.legend(handles=handles, loc="lower right", fontsize=7, frameon=True, framealpha=0.9, edgecolor="none")


def shares(axis: Axes, label: str) -> None:
    """A vertical axis of shares, 0 to 100 %."""
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axis.set_ylabel(label)


def powers_of_two(axis: Axes, ticks: object) -> None:
    """A horizontal axis on which doubling is one step."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(ticks)))  # type: ignore[call-overload]
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")

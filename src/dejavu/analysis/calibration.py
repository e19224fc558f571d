"""What calibration found: loss against the share of the body's bytes skipped, and what each layer keeps."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from dejavu.analysis.figures import DPI, RC, WIDTH, save


def calibration_curve(table: pd.DataFrame, path: Path | str) -> Path:
    """Loss over dense of every method by share of bytes skipped; beside it what the layers keep. PNG and SVG.

    `table` is calibration.csv: target, method, skipped, increase, mlp and heads (units kept in each layer).
    """
    path = Path(path).with_suffix(".png")
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(2 * WIDTH, 3.2), dpi=DPI, layout="constrained")
        loss, neurons, heads = figure.subplots(1, 3)
        for method, rows in table.groupby("method", sort=False):
            loss.plot(rows["skipped"], rows["increase"], marker="o", label=method)
        loss.set_xlabel("share of the body's bytes skipped")
        loss.set_ylabel("nats a token over dense")
        loss.set_title("loss on calibration text", loc="left")
        loss.legend()
        first = table[table["method"] == table["method"].iloc[0]]
        for axis, kind, title in ((neurons, "mlp", "neurons kept"), (heads, "heads", "heads kept")):
            for target, kept in zip(first["target"], first[kind], strict=True):
                counts = counts_of(kept)
                axis.plot(range(len(counts)), counts, marker="o", label=f"{target:.0%} skipped")
            axis.set_xlabel("layer")
            axis.set_title(f"{title}, method {first['method'].iloc[0]}", loc="left")
            axis.set_ylim(bottom=0)
        heads.legend()
        save(figure, path)
    return path


def counts_of(kept: str) -> Sequence[int]:
    """Units kept in each layer, from a cell of the table."""
    return [int(count) for count in kept.split()]

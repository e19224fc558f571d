"""What calibration found: loss against the share of the body's bytes skipped, and what each layer keeps; and what the
budgets cost on held-out text.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from dejavu.analysis.bundles import TASK, bundle_folder, name_of
from dejavu.analysis.figures import DPI, RC, WIDTH, save
from dejavu.analysis.tables import markdown, percent, with_error
from dejavu.errors import DataError
from dejavu.tracking.files import read_json

ASKED = "max_perplexity_increase"


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


def calibrated_table(run: Path) -> pd.DataFrame:
    """One row for each evaluation below a folder (sweeps/calibrated.yaml): what was given up, what it cost where.

    name (of the run that calibrated), selector, budget, ratio (asked for), found (calibrate.max_perplexity_increase
    where that gave the ratio, else NaN), calibration (nats a token over dense on calibration text, of that share only),
    heldout and heldout_stderr (the same on held-out text), gross (share of the body's bytes skipped), predictors (what
    choosing reads), net.
    """
    rows = []
    for path in sorted(run.glob("**/result.json")):
        result, config = read_json(path), OmegaConf.load(path.parent / "config.yaml")
        sparsity = config.sparsity
        if result["status"] != "ok" or sparsity.selector == "dense":
            continue
        loss = result["metrics"][TASK]["loss"]
        measured, bundle = result["sparsity"]["measured"], Path(config.predictors)
        asked = read_json(bundle_folder(bundle) / "config.json")["calibration"].get(ASKED, {})
        found = sparsity.budget == "calibrated" and abs(sparsity.ratio - asked.get("skipped", math.inf)) < 1e-4
        increase = (asked["asked"], asked["increase"]) if found else (math.nan, math.nan)
        gross = 1 - measured["body_density"]
        cost = measured["cost"]["predictors"] if "cost" in measured else 0.0
        rows.append({
            "name": name_of(bundle), "selector": sparsity.selector, "budget": sparsity.budget, "ratio": sparsity.ratio,
            "found": increase[0], "calibration": increase[1],
            "heldout": loss["delta"], "heldout_stderr": loss["delta_stderr"],
            "gross": gross, "predictors": cost, "net": gross - cost,
        })  # fmt: skip
    if not rows:
        raise DataError(
            f"{run} has no evaluation with a calibrated bundle: `dejavu evaluate -cn calibrated` makes some"
        )
    order = ["selector", "name", "found", "ratio", "budget"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, True, True, True, False], ignore_index=True)


def calibrated(run: Path) -> str:
    """`calibrated_table` in Markdown, and how the found shares of predictors and oracle compare."""
    table = calibrated_table(run)
    titles = ["calibrated", "budget", "skipped", "predictors read", "net", "calibration text, nats over dense"]
    titles += ["held-out text, nats over dense", "held-out perplexity"]
    lines = []
    for row in table.to_dict("records"):
        budget = row["budget"] if pd.isna(row["found"]) else f"found for +{percent(row['found'])} perplexity"
        lines.append([
            row["name"], budget,
            *(percent(row[share], 1) for share in ("gross", "predictors", "net")),
            "" if pd.isna(row["calibration"]) else f"{row['calibration']:+.4f}",
            with_error(row["heldout"], row["heldout_stderr"], sign="+"), f"{100 * math.expm1(row['heldout']):+.1f} %",
        ])  # fmt: skip
    return f"{markdown(titles, lines)}\n\n{verdict(table)}"


def verdict(table: pd.DataFrame) -> str:
    """The net shares with predictors beside the oracle's, where both were found."""
    found = table[table["found"].notna()]
    best = found.loc[found["selector"] == "oracle", "net"].max()
    others = found[found["selector"] != "oracle"]
    if pd.isna(best) or others.empty:
        return ""
    shares = (
        f"{row['name']} {percent(row['net'], 1)} ({percent(row['net'] / best)} of that)"
        for row in others.to_dict("records")
    )
    return f"Left out net at the share found: oracle {percent(best, 1)} of the body, {', '.join(shares)}."

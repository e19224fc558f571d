"""Predictors side by side: how they were made, how well they choose, what they cost and what is lost with them."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dejavu.analysis.tables import percent, with_error
from dejavu.errors import DataError
from dejavu.tracking.files import read_json

PARTS = {"both": "both", "mlp": "neurons alone", "heads": "heads alone"}


def bundles(run: Path) -> str:
    """A Markdown table over a sweep of evaluations: one row for each bundle, a column for each part left out.

    Raises DataError when no evaluation in the folder used predictors, or they left out different shares.
    """
    rows: dict[str, dict[str, Any]] = {}
    ratios = set()
    for path in sorted(run.glob("*/result.json")):
        result, config = read_json(path), OmegaConf.load(path.parent / "config.yaml")
        if result["status"] != "ok" or config.sparsity.selector != "predictor":
            continue
        described = read_json(bundle_folder(Path(config.predictors)) / "config.json")
        new = {"bundle": described, "name": name_of(Path(config.predictors)), "loss": {}}
        row = rows.setdefault(described["id"], new)
        loss = result["metrics"]["pydocs_token"]["loss"]
        row["loss"][config.sparsity.part] = with_error(loss["delta"], loss["delta_stderr"], sign="+")
        if config.sparsity.part == "both":
            row["cost"] = result["sparsity"]["measured"]["cost"]["predictors"]
        ratios.add(config.sparsity.ratio)
    if len(ratios) != 1:
        raise DataError(
            f"{run} has evaluations with predictors at the ratios {sorted(ratios)}: give it one ratio alone"
        )
    shown = [part for part in PARTS if any(part in row["loss"] for row in rows.values())]
    titles = ["predictors", "tap", "rank", "recall of mass, neurons", "heads", "bytes, share of the body"]
    lines = [
        "| " + " | ".join([*titles, *(f"nats over dense, {PARTS[part]}" for part in shown)]) + " |",
        "|---" * (len(titles) + len(shown)) + "|",
    ]
    for row in rows.values():
        described = row["bundle"]
        recall = described["metrics"]["recall_of_mass"]
        cells = [
            row["name"], described["tap"], str(described["rank"]), f"{recall['mlp']:.3f}", f"{recall['heads']:.3f}",
            percent(row["cost"]) if "cost" in row else "", *(row["loss"].get(part, "") for part in shown),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"At {percent(ratios.pop())} skipped."])


def bundle_folder(named: Path) -> Path:
    """The bundle meant by predictors=DIR: itself, or what a run's folder holds."""
    return named if (named / "config.json").is_file() and not (named / "bundle").is_dir() else named / "bundle"


def name_of(named: Path) -> str:
    """What a bundle's run was called: a sweep names it from the values that differ."""
    place = named.parent if named.name == "bundle" else named
    return place.name.removeprefix("predictor=").replace("predictor.", "")

"""`dejavu calibrate`: a bundle in, a new bundle out that knows how much each layer can leave out, and where to cut.

Everything is found on text of the train split; nothing that a task scores is looked at.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from dejavu.analysis.calibration import calibration_curve
from dejavu.evaluation.bench import Bench, largest, make_plan
from dejavu.evaluation.sparsified import make_selector
from dejavu.models.load import load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.bundle import load_bundle, recalibrated
from dejavu.sparsity.calibration import Point, by_recall
from dejavu.stages.collect import corpus_blocks
from dejavu.tracking.run import Run


def run(run: Run) -> None:
    """Probe the groups, make the curve of budgets, measure each, find what was asked for, save the new bundle."""
    keep_freed_memory()
    config, settings = run.config, run.config.calibrate
    loaded = load_model(config)
    bundle = load_bundle(Path(str(config.predictors)))
    selector, tap = make_selector(loaded, config, bundle), str(bundle.config["tap"])
    texts, blocks_NT, _ = corpus_blocks(config, loaded, settings.tokens)
    bench = Bench(loaded, selector, tap, blocks_NT, config.batch_size)
    run.say(
        f"calibrating {selector.name} on {blocks_NT.size:,} tokens of {config.corpus.name}: dense {bench.dense:.4f}"
    )
    plan = make_plan(bench, settings, run.say)
    curve = [bench.measured(plan(target)) for target in sorted(settings.targets)]
    rows = [row(point, target, settings.method) for point, target in zip(curve, sorted(settings.targets), strict=True)]
    uniform = [bench.measured(bench.uniform(target)) for target in sorted(settings.targets)]
    rows += [row(point, t, "uniform") for point, t in zip(uniform, sorted(settings.targets), strict=True)]
    curve = [min(pair, key=lambda point: point.increase or 0.0) for pair in zip(curve, uniform, strict=True)]
    found: dict[str, Any] = {}
    if settings.target_recall is not None:
        point = bench.measured(by_recall(bench.recalls(), settings.target_recall, loaded.anatomy))
        found["target_recall"] = {"asked": settings.target_recall, **point.as_json()}
        run.say(f"recall of mass {settings.target_recall:g}: {point.skipped:.1%} of the body skipped, {told(point)}")
    if settings.max_perplexity_increase is not None:
        point = largest(bench, plan, settings.max_perplexity_increase)
        found["max_perplexity_increase"] = {"asked": settings.max_perplexity_increase, **point.as_json()}
        run.say(
            f"perplexity at most {settings.max_perplexity_increase:.2%} up: {point.skipped:.1%} of the body skipped, "
            f"{told(point)}; use it with sparsity.budget=calibrated sparsity.ratio={point.skipped:.4f}"
        )
        curve = sorted([*curve, point], key=lambda each: each.skipped)
    table = pd.DataFrame(rows)
    table.to_csv(run.folder / "calibration.csv", index=False)
    calibration = {
        "selector": selector.name, "method": settings.method, "tokens": int(blocks_NT.size), "dense_loss": bench.dense,
        "corpus": config.corpus.name, "curve": [point.as_json() for point in curve], **found,
    }  # fmt: skip
    made = recalibrated(bundle, run.folder / "bundle", calibration, [document.hash for document in texts])
    run.wandb.image("calibration", calibration_curve(table, run.folder / "calibration.png"))
    show(table)
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "bundle": {"id": made.id, "of": bundle.id},
        "metrics": {"calibration": {f"increase@{r['target']:g}/{r['method']}": entry(r) for r in rows}},
    }


def row(point: Point, target: float, method: str) -> dict[str, Any]:
    """A line of calibration.csv."""
    budget = point.budget
    kept_units = {kind: " ".join(map(str, budget.of(kind))) for kind in ("mlp", "heads")}
    return {"target": target, "method": method, "skipped": point.skipped, "increase": point.increase, **kept_units}


def entry(r: dict[str, Any]) -> dict[str, Any]:
    """A figure of result.json."""
    return {"value": r["increase"], "stderr": None, "n": None}


def told(point: Point) -> str:
    """What a point costs, for people."""
    return f"{point.increase:+.4f} nats a token on calibration text"


def show(table: pd.DataFrame) -> None:
    """The curve on the terminal."""
    printed = Table(title="loss over dense on calibration text, nats a token")
    for name in table.columns:
        printed.add_column(name, justify="right")
    for values in table.itertuples(index=False):
        printed.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in values))
    Console(width=140).print(printed)

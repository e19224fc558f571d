"""`dejavu calibrate`: a bundle in, a new bundle out that knows how much each layer can leave out, and where to cut.

Everything is found on text of the train split; nothing that a task scores is looked at.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from dejavu.analysis.calibration import calibration_curve
from dejavu.evaluation.bench import Bench, Plan, largest, make_plan
from dejavu.evaluation.sparsified import make_selector
from dejavu.models.anatomy import KINDS
from dejavu.models.load import load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.bundle import discard, load_bundle, recalibrated
from dejavu.schema import Calibrate
from dejavu.sparsity.accounting import choosing_costs
from dejavu.sparsity.calibration import Point, by_recall
from dejavu.stages.collect import corpus_blocks
from dejavu.tracking.files import by_rename
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
    costs = choosing_costs(bundle) if selector.name == "predictor" else {}
    partial = run.folder / "losses.partial.csv"  # a run that was killed goes on from here, one made again does not
    plan = make_plan(bench, settings, costs, partial, run.say)
    curve, table = measured_curve(bench, plan, settings)
    found = what_was_asked(bench, plan, settings, run)
    points = sorted([*curve, *found.values()], key=lambda point: point.skipped)
    calibration = {
        "selector": selector.name, "method": settings.method, "tokens": int(blocks_NT.size), "dense_loss": bench.dense,
        "corpus": config.corpus.name, "curve": [point.as_json() for point in points],
        **{name: {"asked": getattr(settings, name), **point.as_json()} for name, point in found.items()},
    }  # fmt: skip
    discard(run.folder / "bundle")
    made = recalibrated(bundle, run.folder / "bundle", calibration, [document.hash for document in texts])
    if partial.exists():
        partial.replace(run.folder / "losses.csv")
    by_rename(run.folder / "calibration.csv", lambda path: table.to_csv(path, index=False))
    run.wandb.image("calibration", calibration_curve(table, run.folder / "calibration.png"))
    show(table)
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "bundle": {"id": made.id, "of": bundle.id},
        "metrics": {
            "calibration": {
                f"increase@{row.target:g}/{row.method}": {"value": row.increase, "stderr": None, "n": None}
                for row in table.itertuples()
            }
        },
    }


def measured_curve(bench: Bench, plan: Plan, settings: Calibrate) -> tuple[list[Point], pd.DataFrame]:
    """For each target the better of the plan's budget and the uniform one; and a table of both."""
    curve, rows = [], []
    plans = {settings.method: plan} | ({} if settings.method == "uniform" else {"uniform": bench.uniform})
    for target in sorted(settings.targets):
        points = {method: bench.measured(plan(target)) for method, plan in plans.items()}
        curve.append(min(points.values(), key=lambda point: point.increase or 0.0))
        rows += [row(point, target, method) for method, point in points.items()]
    return curve, pd.DataFrame(rows).sort_values("method", key=lambda names: names == "uniform", kind="stable")


def what_was_asked(bench: Bench, plan: Plan, settings: Calibrate, run: Run) -> dict[str, Point]:
    """The points for `calibrate.target_recall` and `calibrate.max_perplexity_increase`, where they are set."""
    found = {}
    if settings.target_recall is not None:
        point = bench.measured(by_recall(bench.recalls(), settings.target_recall, bench.loaded.anatomy))
        found["target_recall"] = point
        run.say(f"recall of mass {settings.target_recall:g}: {told(point)}")
    if settings.max_perplexity_increase is not None:
        point = largest(bench, plan, settings.max_perplexity_increase)
        found["max_perplexity_increase"] = point
        run.say(f"perplexity at most {settings.max_perplexity_increase:.2%} up: {told(point)}")
    return found


def row(point: Point, target: float, method: str) -> dict[str, Any]:
    """A line of calibration.csv."""
    kept_units = {kind: " ".join(map(str, point.budget.of(kind))) for kind in KINDS}
    return {"target": target, "method": method, "skipped": point.skipped, "increase": point.increase, **kept_units}


def told(point: Point) -> str:
    """What a point skips and costs, and how to use it."""
    return (
        f"{point.skipped:.1%} of the body skipped, {point.increase:+.4f} nats a token on calibration text; use it with "
        f"sparsity.budget=calibrated sparsity.ratio={point.skipped:.4f}"
    )


def show(table: pd.DataFrame) -> None:
    """The curve on the terminal."""
    printed = Table(title="loss over dense on calibration text, nats a token")
    for name in table.columns:
        printed.add_column(name, justify="right")
    for values in table.itertuples(index=False):
        printed.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in values))
    Console(width=140).print(printed)

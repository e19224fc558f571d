"""`dejavu pipeline`: collect, train, evaluate a grid on the diagonal mlp = heads, then one table and one picture.

Each step is a run of its own below the pipeline's folder, with its own result.json, and is skipped when it is
complete: a pipeline that was killed goes on where it stopped.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dejavu.activations.manifest import cache_id
from dejavu.analysis.figures import sparsity_vs_quality
from dejavu.analysis.runs import load_runs, neighbours
from dejavu.analysis.tables import rich_neighbours, rich_table, write_table
from dejavu.models.load import load_model
from dejavu.predictors.manifest import bundle_id
from dejavu.schema import Config
from dejavu.stages import collect, evaluate, train
from dejavu.tracking.files import write_json
from dejavu.tracking.run import Run, execute


def run(run: Run) -> None:
    """Run the steps, then read their files and show what they say."""
    root = run.folder
    config = copy.deepcopy(run.config)
    config.tracking.group = config.tracking.group or root.name
    execute("collect", collect.run, step(config), root / "collect", {"cache": None, "bundle": None})
    config.cache = str(root / "collect" / "cache")
    inputs = {"cache": cache_id(Path(config.cache)), "bundle": None}
    execute("train", train.run, step(config), root / "train", inputs)
    config.predictors = str(root / "train" / "bundle")
    loaded = load_model(config)
    grid = list(points(config))
    for number, (selector, ratio) in enumerate(grid, 1):
        job = step(config, selector, ratio)
        needs_bundle = selector in ("predictor", "static")
        bundle = bundle_id(Path(config.predictors)) if needs_bundle else None
        name = selector if selector == "dense" else f"{selector}-{ratio:g}"
        run.say(f"evaluation {number} of {len(grid)}: {name}")
        body = partial(evaluate.run, loaded=loaded)
        execute("evaluate", body, job, root / "evaluate" / name, {"cache": None, "bundle": bundle})
    show(run)


def points(config: Config) -> Iterator[tuple[str, float]]:
    """(selector, ratio) of each evaluation; dense first, since the others are paired with it."""
    yield "dense", 0.0
    for selector in config.pipeline.selectors:
        for ratio in config.pipeline.ratios:
            yield selector, ratio


def step(config: Config, selector: str | None = None, ratio: float = 0.0) -> Config:
    """The config of one step: an evaluation at a point of the grid, or (without a selector) collect and train."""
    changed = copy.deepcopy(config)
    changed.run_dir = None
    if selector is not None:
        changed.sparsity.selector, changed.sparsity.ratio = selector, ratio
    return changed


def show(run: Run) -> None:
    """table.csv, neighbours.csv and sparsity_vs_quality.png from the runs' files; the table on the terminal."""
    root = run.folder / "evaluate"
    table, pairs = load_runs(root), neighbours(load_runs(root), root)
    write_table(table, run.folder, parquet=True)
    pairs.to_csv(run.folder / "neighbours.csv", index=False)
    figure = run.folder / "sparsity_vs_quality.png"
    sparsity_vs_quality(table, figure)
    run.wandb.image("sparsity_vs_quality", figure)
    excess = excess_losses(table)
    write_json(run.folder / "excess_loss.json", excess)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(rich_table(table))
    console.print(rich_neighbours(pairs))
    console.print(f"table: {run.folder / 'table.csv'}\npicture: {figure}")
    run.record["metrics"] = {
        "pipeline": {key: {"value": value, "stderr": None, "n": None} for key, value in excess.items()}
    }


def excess_losses(table: Any) -> dict[str, float]:
    """Excess loss over dense (nats per token, held-out pydocs) of each selector and ratio: `selector@ratio`."""
    rows = table[(table["metric"] == "loss") & (table["selector"] != "dense")]
    return {f"{row.selector}@{row.mlp:g}": float(row.delta) for row in rows.itertuples()}

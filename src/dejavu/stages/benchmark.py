"""`dejavu benchmark`: how long a token takes, dense and sparse, here and with the peers, beside the memory's floor."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from dejavu.benchmark import peers, report
from dejavu.benchmark.floor import Bandwidth
from dejavu.benchmark.measure import fastest, measure
from dejavu.errors import DataError
from dejavu.models.load import model_source
from dejavu.tracking.files import read_json
from dejavu.tracking.run import Run

TABLE_WIDTH = 150  # numbers must not be cut; a narrower terminal wraps lines


def run(run: Run) -> None:
    """Find each peer's best setting, measure everybody in turns, and say what it cost and what it could not beat."""
    config, settings = run.config, run.config.benchmark
    source, architecture = model(run)
    threads = config.decode.threads or os.cpu_count() or 1
    memory_mb = peers.available_mb() if settings.memory_gb is None else settings.memory_gb * 1024
    chosen = peers.specs(config, source, architecture, threads, lambda specs: fastest(specs, memory_mb, run.say))
    results = measure(
        chosen, settings.prompts, settings.new_tokens, settings.repeats, memory_mb, config.seed,
        Bandwidth(threads).gb_s, run.say,
    )  # fmt: skip
    rows = report.frame(results, config.model.name, settings.new_tokens, settings.repeats)
    report.write(rows, run.folder)
    Console(width=max(Console().width, TABLE_WIDTH)).print(report.rich_table(rows))
    for line in report.headlines(rows):
        run.say(line)
    if rows["ms_per_token"].isna().all():
        raise DataError(f"no contender could be measured: {rows['note'].iloc[0]}")
    run.record |= {
        "model": {"name": config.model.name},
        "sparsity": {"selector": config.sparsity.selector},
        "metrics": {"benchmark": metrics(rows)},
    }
    if (run.folder / "latency.png").exists():
        run.wandb.image("latency", run.folder / "latency.png")


def metrics(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Milliseconds a token of all that ran, by contender, storage, fraction NOT computed and prompt.

    A fraction that is not uniform says so: `0.5@calibrated`.
    """
    found = {}
    for entry in rows[rows["ms_per_token"].notna()].to_dict("records"):
        left_out = f"{entry['mlp']:g}" + ("" if entry["budget"] == "uniform" else f"@{entry['budget']}")
        name = f"{entry['contender']}/{entry['storage']}/{left_out}/{entry['prompt_tokens']}"
        count = int(entry["new_tokens"] * entry["repeats"])
        found[f"ms_per_token/{name}"] = {"value": float(entry["ms_per_token"]), "stderr": None, "n": count}
    return found


def model(run: Run) -> tuple[str | None, dict[str, Any]]:
    """(folder of the weights, None for random ones; the architecture). Raises DataError for weights on the hub."""
    config = run.config
    if config.model.random_init:
        return None, dict(config.model.architecture)
    source = model_source(config)
    if not (Path(source) / "config.json").is_file():
        raise DataError(
            f"model {config.model.name} is on the hub: give its folder as model.path=DIR, or model.random_init=true"
        )
    return source, read_json(Path(source) / "config.json")

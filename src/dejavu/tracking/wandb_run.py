"""The W&B side of a run: one W&B run per stage run, offline by default, closed with the state the run ended in."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejavu.schema import Tracking
from dejavu.tracking.artifacts import declare_inputs, declare_outputs

if TYPE_CHECKING:
    import pandas as pd

LAYER = "layer/index"  # the axis of everything that is logged a layer
# Keys of result.json that stand in the W&B run's summary, under `result`.
SUMMARISED = (
    "stage", "status", "error", "config_hash", "overrides", "model", "sparsity", "predictor", "metrics", "timing",
    "seed",
)  # fmt: skip


class WandbRun:
    """A W&B run, or nothing at all (`tracking=off`): every call is then without effect."""

    def __init__(self, run: Any = None) -> None:
        self.run = run

    def log(self, values: Mapping[str, Any]) -> None:
        """Log metrics as `task/metric`."""
        if self.run is not None:
            self.run.log(dict(values))

    def image(self, name: str, path: Path) -> None:
        """Log a figure file."""
        if self.run is not None:
            import wandb

            self.run.log({name: wandb.Image(str(path))})

    def table(self, name: str, rows: "pd.DataFrame") -> None:
        """Log a table, each value in a type that W&B shows."""
        if self.run is not None:
            import wandb

            self.run.log({name: wandb.Table(dataframe=rows)})

    def close(self, record: Mapping[str, Any], folder: Path) -> None:
        """Log the record's metrics and what was made in the folder, and finish: exit code 0 only for status `ok`."""
        if self.run is None:
            return
        for row in layer_values(record):
            self.run.log(row)
        self.run.log(final_values(record))
        # Error bars, counts and paired differences too, so that the long table can be had from W&B alone.
        self.run.summary["result"] = {key: record[key] for key in SUMMARISED if key in record}
        if record["status"] == "ok":
            declare_outputs(self.run, record, folder)
        self.run.finish(exit_code=0 if record["status"] == "ok" else 1)
        self.run = None


def final_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a run logs last: `task/metric`, `requested/mlp` (fraction NOT computed), `sparsity/...`, `timing/...`."""
    sparsity = record.get("sparsity", {})
    dense = sparsity.get("selector") == "dense"  # skips nothing, whatever ratios its config names
    values = {
        f"{task}/{metric}": entry["value"]
        for task, metrics in record.get("metrics", {}).items()
        for metric, entry in metrics.items()
    }
    values |= {f"requested/{kind}": 0.0 if dense else ratio for kind, ratio in sparsity.get("requested", {}).items()}
    values |= {f"sparsity/{name}": value for name, value in measured(record).items() if not isinstance(value, list)}
    return values | {f"timing/{name}": value for name, value in record.get("timing", {}).items()}


def layer_values(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per layer with its number and its densities and recalls, such as `layer/mlp_density`; none where dense."""
    ending = "_per_layer"
    columns = {name.removesuffix(ending): values for name, values in measured(record).items() if name.endswith(ending)}
    rows = [
        {f"layer/{name}": value for name, value in zip(columns, row, strict=True) if value is not None}
        for row in zip(*columns.values(), strict=True)
    ]
    return [{LAYER: number} | row for number, row in enumerate(rows)]


def measured(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sparsity.measured` of a result, empty where a stage measures none."""
    found: Mapping[str, Any] = record.get("sparsity", {}).get("measured", {})
    return found


def open_wandb(
    tracking: Tracking, stage: str, folder: Path, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> WandbRun:
    """A new W&B run in the run's own folder, never one resumed or shared: two runs must not be merged."""
    if tracking.mode == "off":
        return WandbRun()
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
        entity=tracking.entity,
        project=tracking.project,
        group=tracking.group,
        job_type=stage,
        name="/".join(folder.parts[-2:]),
        tags=tracking.tags or None,
        config={**config, "inputs": dict(inputs)},
        dir=str(folder.resolve()),  # W&B's service may be another process's, with another working directory
        mode="online" if tracking.mode == "online" else "offline",
        reinit="create_new",
        settings=wandb.Settings(
            console="off", disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
        ),
    )
    run.define_metric(LAYER, hidden=True)
    run.define_metric("layer/*", step_metric=LAYER, summary="none")
    declare_inputs(run, config, inputs)
    return WandbRun(run)

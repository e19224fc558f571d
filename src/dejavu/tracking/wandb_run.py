"""The W&B side of a run: one W&B run per stage run, offline by default, closed with the state the run ended in."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejavu.schema import Tracking

if TYPE_CHECKING:
    import pandas as pd


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

    def close(self, record: Mapping[str, Any]) -> None:
        """Log the record's metrics and finish: exit code 0 only for status `ok`."""
        if self.run is None:
            return
        for task, metrics in record.get("metrics", {}).items():
            self.run.log({f"{task}/{metric}": entry["value"] for metric, entry in metrics.items()}, commit=False)
        measured = record.get("sparsity", {}).get("measured", {})
        self.run.log({f"sparsity/{name}": value for name, value in measured.items()})
        self.run.finish(exit_code=0 if record["status"] == "ok" else 1)
        self.run = None


def open_wandb(
    tracking: Tracking, stage: str, folder: Path, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> WandbRun:
    """A new W&B run in the run's own folder, never one resumed or shared: two runs must not be merged."""
    if tracking.mode == "off":
        return WandbRun()
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
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
    return WandbRun(run)

"""The long table from a W&B project: for runs whose folders are on another machine."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dejavu.analysis.runs import Run, long_table
from dejavu.errors import DataError

log = logging.getLogger("dejavu")


def load_wandb(project: str, filters: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """The long table of the finished evaluations in a W&B project, columns and types as `load_runs` has them.

    project   `entity/project`
    filters   W&B's own, such as {"group": "sparsity_grid"}

    Needs a network and an account (`wandb login`). The column `run` is the W&B run's name, with its id where a name is
    there twice; a run's tasks come in alphabetical order. Runs without a `result` in their summary are left out and
    counted in a warning. Tested against a stub of W&B's server that answers with what real offline runs recorded, not
    against the server. Raises DataError when the project has no finished evaluation, and what W&B raises when it cannot
    be reached.
    """
    import wandb

    wanted = {"jobType": "evaluate", "state": "finished", **(filters or {})}
    found = list(wandb.Api().runs(project, filters=wanted, lazy=False))
    recorded = [run for run in found if "result" in run.summary_metrics]
    if len(recorded) < len(found):
        log.warning("%s: %d evaluations without a result in their summary", project, len(found) - len(recorded))
    if not recorded:
        raise DataError(f"the W&B project {project} holds no finished evaluation: check its name and the filters")
    names = Counter(run.name for run in recorded)
    return long_table([as_run(run, unique=names[run.name] == 1) for run in recorded])


def as_run(run: Any, unique: bool) -> Run:
    """A W&B run in the form of a run's folder; it has no samples, so its paired differences are the result's own."""
    name = run.name if unique else f"{run.name}@{run.id}"
    return Run(Path(*run.path), name, dict(run.summary_metrics["result"]), dict(run.config))

"""Finished runs as one table: `load_runs` from folders, `load_wandb` from a W&B project; figures are in the modules."""

from dejavu.analysis.online import load_wandb
from dejavu.analysis.runs import load_runs

__all__ = ["load_runs", "load_wandb"]

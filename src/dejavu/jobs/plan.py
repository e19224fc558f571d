"""From a composed config to a job: checked, its inputs and its folder found; nothing heavy is imported for it."""

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dejavu.config import from_config
from dejavu.errors import ConfigError
from dejavu.schema import Config
from dejavu.stages.inputs import STAGES, check_data, resolve_inputs
from dejavu.tracking.identity import config_hash, resolved
from dejavu.tracking.run import finished

# Overrides that say where, not what: no part of a job's name unless they are what the jobs differ in.
UNNAMED = ("run_dir", "runs", "force", "tracking", "launcher", "cache", "predictors", "data_root", "hydra")
LONGEST = 200  # characters of a folder's name; file systems take 255


@dataclass(frozen=True)
class Job:
    """One run to be made: its stage, config, the ids of its inputs, its folder, and in a sweep its overrides."""

    stage: str
    config: Config
    inputs: dict[str, str | None]
    folder: Path
    overrides: tuple[str, ...] = ()

    def result(self) -> dict[str, Any] | None:
        """The complete result of this very config, if its folder has one. Raises ConfigError as `finished` does."""
        return finished(self.folder, self.inputs, resolved(self.config), self.config.force)


def plan(stage: str, composed: DictConfig) -> Job:
    """A single run, in `run_dir` or a folder under `runs`. Raises ConfigError or DataError."""
    config = settled(composed)
    inputs = checked_inputs(stage, config)
    named = f"{config.model.name}-{config_hash(resolved(config), inputs)}"
    return Job(stage, config, inputs, Path(config.run_dir or f"{config.runs}/{stage}/{named}"))


def plan_of_sweep(stage: str, composed: DictConfig, overrides: Sequence[str], varying: Collection[str]) -> Job:
    """One job of a sweep, in a folder below the sweep's own, named from its values. Raises ConfigError or DataError."""
    config = settled(composed)
    require_named_inputs(stage, config)
    if config.trainer.devices > 1:
        raise ConfigError(
            "trainer.strategy=ddp_spawn starts processes of its own, which a multirun's jobs cannot: run it without -m"
        )
    root = Path(config.run_dir or f"{config.runs}/sweep/{stage}")
    inputs = checked_inputs(stage, config)
    config.tracking.group = config.tracking.group or root.name
    return Job(stage, config, inputs, root / job_name(config, overrides, varying), tuple(overrides))


def settled(composed: DictConfig) -> Config:
    """The typed config, its model named as in results."""
    config = from_config(composed)
    if config.model.random_init:
        config.model.name += "-random"
    if config.model.path is not None:
        config.model.name = Path(config.model.path).resolve().name
    return config


def checked_inputs(stage: str, config: Config) -> dict[str, str | None]:
    """The ids of what the stage reads, its text checked first."""
    check_data(stage, config)
    return resolve_inputs(stage, config)


def require_named_inputs(stage: str, config: Config) -> None:
    """The newest bundle may change while a sweep runs, so a sweep says which one it means."""
    needed = STAGES[stage][1]
    if "cache" in needed and config.cache is None:
        raise ConfigError("a multirun must name its cache: add cache=DIR")
    if "bundle" in needed and config.predictors is None and config.sparsity.selector in ("predictor", "static"):
        raise ConfigError("a multirun must name its predictors: add predictors=DIR")


def job_name(config: Config | None, overrides: Sequence[str], varying: Collection[str]) -> str:
    """A folder name from a job's overrides: short keys, no characters that shells or file systems mind."""
    kept = [item for item in overrides if key_of(item) in varying or group_of(item) not in UNNAMED]
    if config is not None and config.sparsity.selector == "dense":  # the same job whatever else is said of sparsity
        said = ("sparsity.selector", "sparsity.point", "sparsity.positions")
        kept = [item for item in kept if not key_of(item).startswith("sparsity.") or key_of(item) in said]
    name = spelled(kept) or "job"
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def spelled(overrides: Sequence[str]) -> str:
    """Overrides as they stand in names of folders and in messages."""
    parts = [f"{key_of(item).split('.')[-1]}={item.partition('=')[2]}" for item in overrides]
    return re.sub(r"[^\w.=,+-]", "_", ",".join(parts))


def key_of(override: str) -> str:
    """The dotted key of an override."""
    return override.lstrip("+~").partition("=")[0]


def group_of(override: str) -> str:
    """The first word of an override's key."""
    return re.split(r"[./]", key_of(override))[0]


def varying_keys(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys in which the overrides of a sweep's jobs differ, in their order."""
    keys = dict.fromkeys(key_of(item) for job in jobs for item in job)
    return [key for key in keys if len({tuple(item for item in job if key_of(item) == key) for job in jobs}) > 1]

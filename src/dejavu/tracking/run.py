"""A run: one folder that holds config.yaml, log.txt, what the stage makes and, last, result.json.

No result.json = not finished. A complete result of the same config is not computed again; another config in the same
folder is refused, so a folder never mixes two experiments.
"""

import logging
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dejavu.errors import ConfigError, DejavuError
from dejavu.schema import Config
from dejavu.tracking.files import read_json, write_json, write_text
from dejavu.tracking.identity import config_hash, differing_keys, resolved
from dejavu.tracking.lock import Lock, locked
from dejavu.tracking.peak import peak_memory
from dejavu.tracking.wandb_run import WandbRun, open_wandb

log = logging.getLogger("dejavu")
log.setLevel(logging.DEBUG)  # handlers choose: the terminal shows INFO, log.txt keeps everything

PACKAGES = ("dejavu", "torch", "transformers", "pytorch-lightning", "lm-eval", "datasets", "numpy")


class RunFailed(DejavuError):
    """A stage failed and its record is written; the message has been shown."""


class Interrupted(RunFailed):
    """A stage was stopped by the person who started it."""


@dataclass
class Run:
    """What a stage is given: its folder, its config, and the record it fills."""

    stage: str
    folder: Path
    config: Config
    inputs: dict[str, str | None]
    record: dict[str, Any] = field(default_factory=dict)
    wandb: WandbRun = field(default_factory=WandbRun)

    def say(self, text: str) -> None:
        """One line for the person watching, also kept in log.txt."""
        log.info(text)


Stage = Callable[[Run], None]


def execute(
    stage: str,
    body: Stage,
    config: Config,
    folder: Path,
    inputs: dict[str, str | None],
    overrides: list[str] | None = None,
) -> dict[str, Any]:
    """Run a stage in its folder unless that is done already, and return its result.

    Raises RunFailed after a failure was recorded (result.json with status `failed`, the traceback in log.txt), Busy
    when another process is at work in the folder, and ConfigError when the folder belongs to another config.
    """
    values = resolved(config)
    identity = config_hash(values, inputs)
    done = finished(folder, inputs, values, config.force)
    if done is None:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder) as lock:
            done = finished(folder, inputs, values, config.force)  # by another process, until a moment ago
            if done is None:
                return _begun(Run(stage, folder, config, inputs), body, identity, overrides, lock)
    log.info("%s: already done in %s (force=true runs it again)", stage, folder)
    return done


def _begun(run: Run, body: Stage, identity: str, overrides: list[str] | None, lock: Lock) -> dict[str, Any]:
    (run.folder / "result.json").unlink(missing_ok=True)
    write_text(run.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved(run.config))))
    run.record = {"stage": run.stage, "status": "failed", "error": None, "config_hash": identity, "inputs": run.inputs}
    if overrides:
        run.record["overrides"] = overrides
    with log_file(run.folder):
        if lock.taken_from is not None:
            run.record["taken_from"] = lock.taken_from
            run.say(f"{run.folder} was left unfinished by {lock.taken_from}: going on")
        return _recorded(run, body, lock)


def _recorded(run: Run, body: Stage, lock: Lock) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        with peak_memory() as memory:
            seed_everything(run.config.seed)
            run.wandb = open_wandb(run.config.tracking, run.stage, run.folder, resolved(run.config), run.inputs)
            body(run)
        run.record["status"] = "ok"
    except (Exception, KeyboardInterrupt) as error:
        run.record["error"] = {"type": type(error).__name__, "message": str(error) or "interrupted"}
        log.debug("%s", traceback.format_exc())
    run.record["timing"] = {**run.record.get("timing", {}), "total_seconds": round(time.perf_counter() - started, 3)}
    run.record |= {"memory": memory, "versions": versions(), "seed": run.config.seed}
    if not lock.held():
        lost = f"{run.folder} was taken by another process, to which this one seemed dead"
        run.record |= {"status": "failed", "error": {"type": "Busy", "message": lost}}
    run.wandb.close(run.record, run.folder)
    if lock.held():
        _write_record(run)
    if run.record["error"] is not None:
        raise _failure(run)
    return run.record


def _failure(run: Run) -> RunFailed:
    """Tell what went wrong, unless a step of this run has told it already."""
    kind, message = run.record["error"]["type"], run.record["error"]["message"]
    if kind not in ("ConfigError", "DataError", "Busy", "RunFailed", "Interrupted"):  # others need their type
        message = f"{kind}: {message}"
    if kind not in ("RunFailed", "Interrupted"):
        log.error("dejavu %s failed: %s (log: %s)", run.stage, message, run.folder / "log.txt")
    return Interrupted(message) if kind in ("KeyboardInterrupt", "Interrupted") else RunFailed(message)


def seed_everything(seed: int) -> None:
    """Start every generator that a library may draw from anew, so that a run does not depend on those before it."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # for libraries; this project's own draws have generators of their own
    torch.manual_seed(seed)


def _write_record(run: Run) -> None:
    """The record of a failed run may be impossible to write (no space left): then the message alone has to do."""
    try:
        write_json(run.folder / "result.json", run.record)
    except DejavuError as error:
        if run.record["status"] == "ok":
            run.record |= {"status": "failed", "error": {"type": "DataError", "message": str(error)}}
        log.debug("%s", error)


def finished(folder: Path, inputs: dict[str, str | None], values: dict[str, Any], force: bool) -> dict[str, Any] | None:
    """The complete result of this very config, if the folder has one.

    Raises ConfigError, naming the keys that differ, when the folder holds another config (with `force` as well).
    """
    if not (folder / "config.yaml").exists():
        return None
    old = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(old, dict)
    result = read_json(folder / "result.json") if (folder / "result.json").exists() else None
    keys = differing_keys(old, values)  # type: ignore[arg-type]  # keys of a config file are strings
    keys = [key for key in keys if key not in ("cache", "predictors")]
    if not keys and result is not None and result["inputs"] != inputs:
        keys = ["inputs (another cache or bundle)"]
    if keys:
        raise ConfigError(
            f"{folder} holds a run with another config ({', '.join(keys)} differ): choose another run_dir"
        )
    return result if result is not None and result["status"] == "ok" and not force else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python} | {name: metadata.version(name) for name in PACKAGES}


@contextmanager
def log_file(folder: Path) -> Iterator[None]:
    """Everything that is logged, tracebacks included, goes to the folder's log.txt while the run lasts."""
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def log_to_terminal() -> None:
    """Messages of this project on stderr, once, as plain lines."""
    if not any(isinstance(handler, logging.StreamHandler) for handler in log.handlers):
        handler = logging.StreamHandler()
        handler.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.propagate = False


@contextmanager
def silence() -> Iterator[None]:
    """Nothing of this project's on the terminal; log files keep everything."""
    terminal = [handler for handler in log.handlers if not isinstance(handler, logging.FileHandler)]
    nothing = logging.NullHandler()  # without any handler, Python would write errors to the terminal
    log.addHandler(nothing)
    levels = [handler.level for handler in terminal]
    for handler in terminal:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in zip(terminal, levels, strict=True):
            handler.setLevel(level)
        log.removeHandler(nothing)


def interactive() -> bool:
    """Whether a person watches this very process: progress bars on a terminal, plain lines elsewhere."""
    return sys.stderr.isatty() and "CI" not in os.environ and multiprocessing.parent_process() is None

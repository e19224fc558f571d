"""One job: its stage run in its folder, and in a sweep what became of it."""

import importlib
import logging
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.errors import DejavuError
from dejavu.jobs.plan import Job
from dejavu.tracking.files import write_json
from dejavu.tracking.lock import Busy
from dejavu.tracking.run import Interrupted, Run, RunFailed, execute, log_file, silence, versions

log = logging.getLogger("dejavu")

STATES = ("ok", "already done", "failed", "died", "interrupted", "busy")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """What became of a job: one of STATES, how long it took, its error and its main metrics in words."""

    state: str
    seconds: float = 0.0
    error: str | None = None
    metrics: str = ""


def perform(job: Job) -> tuple[dict[str, Any], bool]:
    """Run a job unless it is done: its record, and whether it ran now. Raises as `execute` does."""
    ran = False

    def body(run: Run) -> None:  # imported only if there is something to do
        nonlocal ran
        ran = True
        importlib.import_module(f"dejavu.stages.{job.stage}").run(run)

    record = execute(job.stage, body, job.config, job.folder, job.inputs, list(job.overrides))
    return record, ran


def work(job: Job, threads: int | None = None) -> Outcome:
    """One job of a sweep, in whatever process; the terminal belongs to the sweep, so nothing is said here."""
    if threads is not None:  # read by the libraries when they are imported, which is not yet
        os.environ |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    started = time.perf_counter()

    def outcome(state: str, error: str | None = None, record: Mapping[str, Any] | None = None) -> Outcome:
        return Outcome(state, time.perf_counter() - started, error, "" if record is None else headline(record))

    with silence():
        try:
            record, ran = perform(job)
        except Busy as error:
            return outcome("busy", str(error))
        except (Interrupted, KeyboardInterrupt):
            return outcome("interrupted", "interrupted")
        except RunFailed as error:
            return outcome("failed", f"{error} (log: {job.folder / 'log.txt'})")
        except DejavuError as error:
            return outcome("failed", str(error))
        except Exception as error:
            return outcome("failed", f"{type(error).__name__}: {error}")
    return outcome("ok" if ran else "already done", None, record)


def headline(record: Mapping[str, Any]) -> str:
    """The first metric of each task, of the first four; whose unfinished work it was, if that was so."""
    firsts = [(task, *next(iter(entries.items()))) for task, entries in record.get("metrics", {}).items() if entries]
    after = f"  (left unfinished by {record['taken_from']})" if "taken_from" in record else ""
    return ", ".join(f"{task} {metric} {entry['value']:.4g}" for task, metric, entry in firsts[:4]) + after


def record_refusal(stage: str, folder: Path, overrides: list[str], error: Exception) -> None:
    """A job that was refused before it began leaves result.json and log.txt as well, unless another run is there."""
    if (folder / "config.yaml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with silence(), log_file(folder):
        log.error("dejavu %s: %s", stage, error)
        log.debug("%s", "".join(traceback.format_exception(error)))
    record = {"stage": stage, "status": "failed", "error": {"type": type(error).__name__, "message": str(error)}}
    write_json(folder / "result.json", record | {"overrides": overrides, "versions": versions()})

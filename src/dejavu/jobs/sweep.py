"""A sweep: all jobs of a multirun, a line for each as it ends, and at the end what failed, the table and the pictures.

Several processes may run the same sweep at once: each takes jobs that nobody is at work on, and waits at the end for
those that another has.
"""

import importlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dejavu.errors import ConfigError, DejavuError
from dejavu.jobs.launchers import launch
from dejavu.jobs.plan import Job, job_name, key_of, plan_of_sweep, varying_keys
from dejavu.jobs.work import Outcome, headline, record_refusal
from dejavu.schema import Config
from dejavu.tracking.identity import config_hash, resolved
from dejavu.tracking.lock import living_holder

log = logging.getLogger("dejavu")

WAIT_SECONDS = 2
GOOD = ("ok", "already done")

Composed = tuple[list[str], DictConfig | Exception]
Refused = tuple[list[str], Exception]


def run_sweep(stage: str, composed: Sequence[Composed]) -> int:
    """Run every job of a multirun; the exit code: 1 if one has no result, 130 after an interrupt.

    Raises ConfigError when not a single job can begin, with what they lack.
    """
    varying = varying_keys([overrides for overrides, _ in composed])
    jobs, refused = plans(stage, composed, varying)
    if not jobs:
        raise ConfigError("; ".join(dict.fromkeys(str(error) for _, error in refused)))
    board = Board(jobs[0].folder.parent, len(jobs) + len(refused), varying)
    log.info("%s in %s, launcher=%s", counted(board.total), board.root, jobs[0].config.launcher.name)
    for overrides, error in refused:
        folder = board.root / job_name(None, overrides, varying)
        record_refusal(stage, folder, overrides, error)
        board.report(None, overrides, Outcome("failed", error=str(error)))
    interrupted = False
    try:
        run_all(jobs, board)
    except KeyboardInterrupt:
        interrupted = True
    complete = board.summary()
    if stage == "evaluate" and not interrupted:
        show({job.folder.parent for job in jobs}, complete)
    return 130 if interrupted else 0 if complete else 1


def plans(stage: str, composed: Sequence[Composed], varying: Sequence[str]) -> tuple[list[Job], list[Refused]]:
    """The jobs that can begin, those that would be the same run once, and the others with their errors."""
    jobs: dict[tuple[Path, str], Job] = {}
    refused: list[Refused] = []
    for overrides, config in composed:
        try:
            if isinstance(config, Exception):
                raise config
            job = plan_of_sweep(stage, config, overrides, varying)
            jobs.setdefault((job.folder, config_hash(resolved(job.config), job.inputs)), job)
        except (DejavuError, OmegaConfBaseException) as error:
            refused.append((overrides, error))
    return list(jobs.values()), refused


def run_all(jobs: Sequence[Job], board: "Board") -> None:
    """Until every job has an outcome: those that nobody is at work on, then again those that another process had."""
    waiting, told = list(jobs), ""
    while waiting:
        ready, elsewhere = sorted_out(waiting, board)
        outcomes = launch(ready, jobs[0].config.launcher, board.root) if ready else ()
        for job, outcome in outcomes:
            if outcome.state == "busy":
                elsewhere.append(job)
                continue
            board.report(job.config, job.overrides, outcome)
            if outcome.state == "interrupted":
                raise KeyboardInterrupt
        if elsewhere and not ready:
            told = say_who_is_at_work(elsewhere, told)
            time.sleep(WAIT_SECONDS)
        waiting = elsewhere


def say_who_is_at_work(jobs: Sequence[Job], told: str) -> str:
    """Say which processes have the jobs that are left, unless that was `told` last; what was said."""
    holders = sorted({str(holder) for job in jobs if (holder := living_holder(job.folder)) is not None})
    text = f"waiting for {counted(len(jobs))} of {', '.join(holders)}"
    if holders and text != told:
        log.info(text)
    return text if holders else told


def sorted_out(jobs: Sequence[Job], board: "Board") -> tuple[list[Job], list[Job]]:
    """(jobs to run, jobs that another process is at work on); those that are done, or must not be, are reported."""
    ready: list[Job] = []
    elsewhere: list[Job] = []
    for job in jobs:
        try:
            done = job.result()
        except DejavuError as error:
            board.report(job.config, job.overrides, Outcome("failed", error=str(error)))
            continue
        if done is not None:
            board.report(job.config, job.overrides, Outcome("already done", metrics=headline(done)))
        else:
            (elsewhere if living_holder(job.folder) else ready).append(job)
    return ready, elsewhere


def counted(jobs: int) -> str:
    """How many jobs, in words."""
    return "1 job" if jobs == 1 else f"{jobs} jobs"


@dataclass
class Board:
    """What became of a sweep's jobs, and the lines that say it."""

    root: Path
    total: int
    varying: Sequence[str]
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)

    def report(self, config: Config | None, overrides: Sequence[str], outcome: Outcome) -> None:
        """Keep an outcome and say it in one line, the job named by what tells it from the others."""
        label = job_name(config, [item for item in overrides if key_of(item) in self.varying], self.varying)
        self.outcomes.append((label, outcome))
        number = f"[{len(self.outcomes):{len(str(self.total))}}/{self.total}]"
        took = "" if outcome.seconds == 0 else f"{outcome.seconds:.0f} s"
        log.info("  ".join(filter(None, (number, label, outcome.state, took, outcome.error or outcome.metrics))))

    def summary(self) -> bool:
        """Say how many jobs ended how, and each that has no result; whether all have one."""
        counts = Counter("done before" if each.state == "already done" else each.state for _, each in self.outcomes)
        counts["not run"] = self.total - len(self.outcomes)
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        log.info("%s in %s: %s", counted(self.total), self.root, said)
        bad = [(label, outcome) for label, outcome in self.outcomes if outcome.state not in GOOD]
        for label, outcome in bad:
            log.error("  %s  %s: %s", label, outcome.state, outcome.error)
        return not bad and len(self.outcomes) == self.total


def show(roots: set[Path], complete: bool) -> None:
    """Table and pictures of the evaluations in each sweep's folder; one of which all jobs failed has said enough."""
    for root in sorted(roots):
        try:
            importlib.import_module("dejavu.analysis.leaderboard").leaderboard(root)
        except DejavuError as error:
            if complete:
                log.error("dejavu evaluate: %s", error)

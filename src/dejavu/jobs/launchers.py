"""Where a sweep's jobs run: in this process, in processes of this machine, or on a cluster.

Every launcher gives back (job, outcome) as jobs end. A job whose process dies is an outcome too and takes no other with
it: that is why each has a process of its own, not one of a pool that ends with its first casualty.
"""

import importlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from dejavu.errors import ConfigError
from dejavu.jobs.plan import Job
from dejavu.jobs.work import Outcome, work
from dejavu.schema import Launcher

POLL_SECONDS = 0.5
SLURM = ("partition", "array_parallelism", "setup", "additional_parameters")  # submitit's names begin with slurm_
RESOURCES = ("timeout_min", "cpus_per_task", "mem_gb", "gpus_per_node")

Work = Callable[..., Outcome]
Outcomes = Iterator[tuple[Job, Outcome]]


def launch(jobs: Sequence[Job], launcher: Launcher, root: Path, do: Work = work) -> Outcomes:
    """Run jobs with `do`; outcomes in the order in which they end. Raises ConfigError when a package is missing."""
    if launcher.name == "local":
        return ((job, do(job)) for job in jobs)
    joblib = needed("joblib", launcher)
    cores = joblib.cpu_count()
    slots = min(cores if launcher.jobs == -1 else launcher.jobs, len(jobs))
    shared = launcher.threads or max(1, cores // slots)
    if launcher.name == "joblib":
        return with_joblib(joblib, jobs, slots, shared, do)
    submitit = needed("submitit", launcher)
    executor = submitit_executor(submitit, launcher, root, jobs[0].stage)
    if launcher.name == "submitit_slurm":  # one array, whose width Slurm keeps
        return submitted(executor, jobs, len(jobs), launcher.threads, do)
    return submitted(executor, jobs, slots, shared, do)


def needed(package: str, launcher: Launcher) -> ModuleType:
    """Import a launcher's package. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = f"launcher={launcher.name} needs the package {package}: pip install {package}"
        raise ConfigError(message) from error


def with_joblib(joblib: ModuleType, jobs: Sequence[Job], slots: int, threads: int, do: Work) -> Outcomes:
    """`slots` threads of joblib's, each waiting for the process of one job."""
    run = joblib.delayed(lambda job: (job, in_own_process(do, job, threads)))
    pool = joblib.Parallel(n_jobs=slots, backend="threading", return_as="generator_unordered", batch_size=1)
    yield from pool(run(job) for job in jobs)


def in_own_process(do: Work, job: Job, threads: int) -> Outcome:
    """What `do` returns in a fresh process, or that this process died."""
    started = time.perf_counter()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
        try:
            return one.submit(do, job, threads).result()
        except BrokenProcessPool:
            return Outcome("died", time.perf_counter() - started, "its process was killed and ended without a result")


def submitit_executor(submitit: ModuleType, launcher: Launcher, root: Path, stage: str) -> Any:
    """submitit's executor with what the config asks for; what is null is left to the cluster. Raises ConfigError."""
    cluster = launcher.name.removeprefix("submitit_")
    if cluster == "slurm" and shutil.which("srun") is None:
        raise ConfigError("launcher=submitit_slurm needs Slurm: srun is not on this machine's path")
    executor = submitit.AutoExecutor(folder=root / ".submitit" / "%j", cluster=cluster)
    asked = {name: getattr(launcher, name) for name in RESOURCES}
    if cluster == "slurm":
        asked |= {f"slurm_{name}": getattr(launcher, name) for name in SLURM}
    executor.update_parameters(
        name=f"dejavu-{stage}", **{key: value for key, value in asked.items() if value not in (None, [], {})}
    )
    return executor


def submitted(executor: Any, jobs: Sequence[Job], slots: int, threads: int | None, do: Work) -> Outcomes:
    """At most `slots` jobs in the executor's hands at a time."""
    waiting = deque(jobs)
    running: list[tuple[Job, Any, float]] = []
    while waiting or running:
        batch = [waiting.popleft() for _ in range(min(slots - len(running), len(waiting)))]
        if batch:
            handles = executor.map_array(do, batch, [threads] * len(batch))
            running += list(zip(batch, handles, [time.perf_counter()] * len(batch), strict=True))
        ended = [entry for entry in running if entry[1].done()]
        running = [entry for entry in running if entry not in ended]
        for job, handle, started in ended:
            yield job, submitted_outcome(handle, time.perf_counter() - started)
        if not ended:
            time.sleep(POLL_SECONDS)


def submitted_outcome(handle: Any, seconds: float) -> Outcome:
    """What a job returned, or how it ended without a result and where its output is."""
    if handle.exception() is None:
        return handle.result()
    return Outcome("died", seconds, f"it ended without a result ({handle.state}); its output: {handle.paths.stderr}")

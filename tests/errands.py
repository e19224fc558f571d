"""Light stand-ins for a job's work, in a module of their own: processes of launchers import it."""

import os
import signal

from dejavu.jobs.plan import Job
from dejavu.jobs.work import Outcome


def errand(job: Job, threads: int | None = None) -> Outcome:
    """Says which process it ran in and how many threads it was given; the job `killed` is killed as the kernel does."""
    if job.folder.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome("ok", metrics=f"{os.getpid()} {threads}")

"""Lightning's loggers for a run, and Lightning without its noise: what is silenced is named, one by one."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger

    from dejavu.tracking.run import Run

NOISY = ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.accelerators.cuda")
WARNINGS = (
    r".*treespec, LeafSpec.*",  # Lightning 2.6 on torch 2.13
    r".*does not have many workers.*",  # batches come from memory; workers would only copy
    r".*Checkpoint directory .* exists and is not empty.*",  # a resumed run's own
    r".*recommended to use `self.log.*sync_dist=True`.*",  # what is logged is the same in every process
    r".*The `srun` command is available.*",  # on a cluster, where a launcher starts the processes
    r".*Experiment logs directory .* exists.*",
)


def lightning_loggers(run: "Run") -> "list[Logger]":
    """metrics.csv in the run's folder, and the run's W&B run where there is one."""
    from pytorch_lightning.loggers import CSVLogger, WandbLogger

    loggers: list[Logger] = [CSVLogger(str(run.folder), name="", version="")]
    if run.wandb.run is not None:
        loggers.append(WandbLogger(experiment=run.wandb.run, log_model=False))
    return loggers


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without tips, lists of devices, the notice of the end and warnings that do not apply here."""
    loggers = [logging.getLogger(name) for name in NOISY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in WARNINGS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)

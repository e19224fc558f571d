"""Lightning without its noise: what is silenced is named, one by one."""

import logging
import warnings

LOGGERS = ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.accelerators.cuda")
WARNINGS = (
    r".*treespec, LeafSpec.*",  # Lightning 2.6 on torch 2.13
    r".*`IterableDataset` has `__len__` defined.*",  # there are no worker processes
    r".*does not have many workers.*",  # batches come from memory maps; workers would only copy
    r".*is smaller than the logging interval.*",  # small runs on purpose
    r".*Checkpoint directory .* exists and is not empty.*",  # a resumed run's own
    r".*Experiment logs directory .* exists.*",
)


def quiet_lightning() -> None:
    """Silence tips, device lists and warnings that do not apply here."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)

"""Does reading keep the training step fed? Seconds of some steps of `dejavu train`, reading the cache and all the rest.

    python benchmarks/loader.py runs/demo/collect

Batches are read when they are needed, layer by layer. Before the first round the system is asked to drop the cache's
pages, so that it reads from the disk. Measure on a machine that does nothing else.
"""

import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dejavu.activations.cache import ActivationCache
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.data import Batch, CacheData
from dejavu.predictors.labels import loss
from dejavu.predictors.statistics import collect_statistics
from dejavu.predictors.train import new_predictors
from dejavu.schema import Config

STEPS, ROUNDS = 8, 3


class Timed(Batch):
    """A batch that knows how long it took to be read."""

    seconds = 0.0

    def __getitem__(self, key: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
        started = time.perf_counter()
        pair = super().__getitem__(key)
        Timed.seconds += time.perf_counter() - started
        return pair


def main(folder: Path) -> None:
    """Train on a few batches, from the disk and from memory, and print where the time went."""
    keep_freed_memory()
    cache, config = ActivationCache(folder), Config(device="cpu")
    data = CacheData(cache, cache.recorded, config.predictor.tap, config.trainer, config.seed)
    statistics = collect_statistics(cache, data.train_rows[:4096], cache.recorded)
    predictors = new_predictors(cache, config, cache.recorded)
    optimizer = torch.optim.AdamW([p for each in predictors.values() for p in each.parameters()], fused=True)
    rows = [rows for _, rows in zip(range(STEPS), data.sampler, strict=False)]
    table = Table(title=f"{folder}: {cache.layers} layers, {config.trainer.batch_tokens} tokens a step")
    for header in ("round", "seconds a step", "of it reading", "tokens/s"):
        table.add_column(header, justify="right")
    for number in range(ROUNDS):
        if number == 0:
            forget(folder)
        Timed.seconds, started = 0.0, time.perf_counter()
        for rows_N in rows:
            optimizer.zero_grad()
            for key, (tap_ND, c_NU) in Timed(cache, list(predictors), config.predictor.tap, rows_N).items():
                loss(predictors[key](tap_ND), c_NU, statistics[key], config.predictor).backward()
            optimizer.step()
        each, tokens = (time.perf_counter() - started) / STEPS, sum(map(len, rows)) / STEPS
        share = Timed.seconds / STEPS / each
        name = "from disk" if number == 0 else "from memory"
        table.add_row(name, f"{each:.3f}", f"{share:.0%}", f"{tokens / each:,.0f}")
    Console(width=100).print(table)


def forget(folder: Path) -> None:
    """Ask the system to drop the cache's pages."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "cache" if (Path(sys.argv[1]) / "cache").is_dir() else Path(sys.argv[1]))

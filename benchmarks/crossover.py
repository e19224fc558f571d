"""Where a batch's union is so large that a layer may as well run whole: `python benchmarks/crossover.py opt-1.3b int8`.

A sequence takes a quarter of the neurons, shared with others so that the union has the share wanted; beside it the same
layers with every neuron for every sequence. Random weights; run it on a free machine. The times are interleaved.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from dejavu.decode import ops
from dejavu.decode.engine import Engine, kernel_threads
from dejavu.decode.random_weights import random_weights

CONF = Path(__file__).resolve().parents[1] / "conf" / "model"
LAYERS, KEPT, REPEATS, THREADS = 8, 0.25, 15, 2  # layers enough that none stays in the cache
SHARES, BATCHES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0), (2, 4, 8)


def main(model: str, storage: str) -> None:
    """Print the time over a union of each share as a part of the time of the whole layer."""
    architecture = OmegaConf.to_container(OmegaConf.load(CONF / f"{model}.yaml").architecture)
    assert isinstance(architecture, dict)
    architecture |= {"num_hidden_layers": LAYERS, "vocab_size": 512}
    engine = Engine(random_weights(architecture, storage, (8, 8)), threads=THREADS, skip_zeros=False)
    table = Table(title=f"{model} {storage}: MLP halves over a union, as a part of the whole", box=box.SIMPLE_HEAD)
    for header in ("sequences", *(f"{share:.0%}" for share in SHARES), "whole, ms a layer"):
        table.add_column(header, justify="right")
    for batch in BATCHES:
        table.add_row(*row(engine, batch))
    Console().print(table)


def row(engine: Engine, batch: int) -> list[str]:
    """One batch size, all shares."""
    neurons, random = engine.weights.neurons, np.random.default_rng(0)
    engine.prefill(np.full((batch, 1), 5), capacity=8)
    sets = {share: some_sets(random, neurons, batch, share) for share in SHARES if share * neurons >= KEPT * neurons}
    whole = torch.arange(neurons), torch.ones(batch, neurons, dtype=torch.bool)
    spent: dict[float | None, list[float]] = {share: [] for share in (*sets, None)}
    for _ in range(REPEATS):
        for share in spent:
            spent[share].append(milliseconds(engine, *(whole if share is None else sets[share])))
    middle = {share: float(np.median(times)) for share, times in spent.items()}
    return [str(batch), *(f"{middle[share] / middle[None]:.2f}" for share in sets), f"{middle[None]:.2f}"]


def some_sets(random: np.random.Generator, neurons: int, batch: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets of KEPT of the neurons for each sequence, drawn from a union that has the share wanted."""
    union = np.sort(random.permutation(neurons)[: round(share * neurons)])
    chance = random.random((batch, len(union)))
    mask = chance <= np.sort(chance, 1)[:, round(KEPT * neurons) - 1 : round(KEPT * neurons)]
    return torch.from_numpy(union), torch.from_numpy(mask)


def milliseconds(engine: Engine, units: torch.Tensor, mask: torch.Tensor) -> float:
    """Of one layer's MLP half, over all layers in turn."""
    x = torch.randn(len(mask), engine.weights.width)
    with kernel_threads(THREADS):
        started = time.perf_counter()
        for half in engine.halves:
            if half.kind == "mlp":
                ops.mlp(x, units, mask, half.bound.number)
        return (time.perf_counter() - started) * 1e3 / LAYERS


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

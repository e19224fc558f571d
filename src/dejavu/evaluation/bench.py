"""What a budget costs on calibration text, and budgets that cost as little as can be.

A plan goes from a share of the body's bytes to a budget.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from dejavu.errors import ConfigError
from dejavu.evaluation import probe
from dejavu.models.anatomy import KINDS
from dejavu.models.load import LoadedModel
from dejavu.models.topk import kept
from dejavu.schema import Calibrate
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.calibration import Group, Point, by_loss, by_recall_to_target, check_reached, skipped_share
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Selector
from dejavu.tracking.files import by_rename

Plan = Callable[[float], Budget]
STEPS = 7  # of a bisection: a hundredth of the body's bytes
ONE_FOR_ALL = ("random", "static", "prompt")  # selectors whose scores have no cut


class Bench:
    """The model, a selector and calibration text: what a budget costs there."""

    def __init__(
        self, loaded: LoadedModel, selector: Selector, tap: str, blocks_NT: np.ndarray, batch_size: int
    ) -> None:
        self.loaded, self.selector, self.tap, self.blocks_NT = loaded, selector, tap, blocks_NT
        self.batch_size = batch_size
        self.dense = probe.loss(loaded, blocks_NT, batch_size)

    def increase(self, budget: Budget) -> float:
        """Nats a token over dense."""
        sparsifier = Sparsifier(self.loaded.anatomy, self.selector, budget, tap=self.tap)
        return probe.loss(self.loaded, self.blocks_NT, self.batch_size, sparsifier) - self.dense

    def measured(self, budget: Budget) -> Point:
        """A budget with its increase and its thresholds."""
        cuts = {}
        if self.selector.name not in ONE_FOR_ALL:
            ruled = Sparsifier(self.loaded.anatomy, self.selector, budget, rule="threshold", tap=self.tap)
            cuts = probe.thresholds(ruled, self.loaded, self.blocks_NT[: self.batch_size])
        return Point(skipped_share(budget, self.loaded.anatomy), budget, self.increase(budget), cuts)

    def recalls(self) -> dict[Group, np.ndarray]:
        """Recall of mass of every group by units kept."""
        return probe.recalls(self.loaded, self.blocks_NT, self.batch_size, self.selector, self.tap)

    def uniform(self, target: float) -> Budget:
        """The same ratio everywhere."""
        parts = self.loaded.anatomy
        return Budget((kept(target, parts.neurons),) * parts.layers, (kept(target, parts.heads),) * parts.layers)

    def alone(self, group: Group, count: int) -> float:
        """Nats a token over dense when one group alone keeps so many units."""
        every = self.uniform(0.0)
        counts = {kind: list(every.of(kind)) for kind in KINDS}
        counts[group[0]][group[1]] = count
        return self.increase(Budget(tuple(counts["mlp"]), tuple(counts["heads"])))


def make_plan(
    bench: Bench, settings: Calibrate, costs: Mapping[Group, float], kept_in: Path, say: Callable[[str], None]
) -> Plan:
    """From a share of the body's bytes to a budget, by `calibrate.method`; `costs` as in `by_loss`.

    Losses of groups go into the file `kept_in` one by one: what stands there already is not measured again.
    Raises ConfigError for a target that the levels do not reach.
    """
    parts = bench.loaded.anatomy
    if settings.method == "uniform":
        return bench.uniform
    if settings.method == "recall":
        reached = bench.recalls()
        return lambda target: by_recall_to_target(reached, target, parts)
    counts = {kind: sorted({kept(1 - level, parts.units(kind)) for level in settings.levels}) for kind in KINDS}
    lowest = Budget(*((counts[kind][0],) * parts.layers for kind in KINDS))
    check_reached(settings.targets, lowest, parts)
    losses = read_losses(kept_in)
    for group in ((kind, layer) for kind in KINDS for layer in range(parts.layers)):
        if group not in losses:
            losses[group] = {count: bench.alone(group, count) for count in counts[group[0]]}
            write_losses(losses, kept_in)
        say(f"{group[0]} {group[1]}: " + ", ".join(f"{k} kept {v:+.4f}" for k, v in losses[group].items()))
    return lambda target: by_loss(losses, target, parts, costs)


def read_losses(path: Path) -> dict[Group, dict[int, float]]:
    """Of each group the loss over dense when it alone keeps k units, from a file of `write_losses`; {} without one."""
    losses: dict[Group, dict[int, float]] = {}
    if path.is_file():
        for kind, layer, count, increase in pd.read_csv(path).itertuples(index=False):
            losses.setdefault((kind, layer), {})[count] = increase
    return losses


def write_losses(losses: Mapping[Group, Mapping[int, float]], path: Path) -> None:
    """The losses as CSV: kind, layer, kept, increase."""
    rows = [(*group, count, increase) for group, found in losses.items() for count, increase in found.items()]
    frame = pd.DataFrame(rows, columns=["kind", "layer", "kept", "increase"])
    by_rename(path, lambda partial: frame.to_csv(partial, index=False))


def largest(bench: Bench, plan: Plan, increase: float) -> Point:
    """The largest share of the body's bytes whose budget raises perplexity by at most `increase`, by bisection.

    0.01 is one per cent.
    """
    low, high, best = 0.0, 1.0, bench.measured(bench.uniform(0.0))
    for _ in range(STEPS):
        middle = (low + high) / 2
        try:
            point = bench.measured(plan(middle))
        except ConfigError:  # further than the levels reach
            high = middle
            continue
        if (point.increase or 0.0) <= math.log1p(increase):
            low, best = middle, point
        else:
            high = middle
    return best

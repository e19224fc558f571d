"""What a budget costs on calibration text, and budgets that cost as little as can be.

A plan goes from a share of the body's bytes to a budget.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from dejavu.errors import ConfigError
from dejavu.evaluation import probe
from dejavu.models.anatomy import KINDS
from dejavu.models.load import LoadedModel
from dejavu.models.topk import kept
from dejavu.schema import Calibrate
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.calibration import Group, Point, by_loss, by_recall_to_target, skipped_share
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Selector

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


def make_plan(bench: Bench, settings: Calibrate, costs: Mapping[Group, float], say: Callable[[str], None]) -> Plan:
    """From a share of the body's bytes to a budget, by `calibrate.method`; `costs` as in `by_loss`."""
    parts = bench.loaded.anatomy
    if settings.method == "uniform":
        return bench.uniform
    if settings.method == "recall":
        reached = bench.recalls()
        return lambda target: by_recall_to_target(reached, target, parts)
    losses: dict[Group, dict[int, float]] = {}
    for kind in KINDS:
        for layer in range(parts.layers):
            counts = sorted({kept(1 - level, parts.units(kind)) for level in settings.levels})
            losses[kind, layer] = {count: bench.alone((kind, layer), count) for count in counts}
            say(f"{kind} {layer}: " + ", ".join(f"{k} kept {v:+.4f}" for k, v in losses[kind, layer].items()))
    return lambda target: by_loss(losses, target, parts, costs)


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

"""Budgets that differ from layer to layer: how many units of each kind every layer keeps, so that together a share of
the body's bytes is not read.

By loss: every group (a kind in a layer) was thinned out alone at a few densities and the loss measured. Losses of
groups are taken to add up, and the target is met by always giving up next what costs least per byte saved, where what a
predictor reads is not saved: a group that gains little is left whole and its predictor is not read. By recall: every
group keeps as many units as it takes for the same recall of mass.

Units of a group are counted as kept, k; a group's bytes are k times those of a unit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dejavu.errors import ConfigError, DataError
from dejavu.models.anatomy import KINDS, Anatomy
from dejavu.models.shape import Shape
from dejavu.schema import Sparsity
from dejavu.sparsity.budget import Budget, everything, make_budget, requested_ratios

Group = tuple[str, int]  # kind, layer
SHORT = 0.005  # of the body's bytes: how far a budget may stay below its target, as heads are large


@dataclass(frozen=True)
class Point:
    """A budget of a curve, and what was found with it on calibration text.

    skipped      share of the body's bytes that is not read
    increase     loss over the dense model, nats a token
    thresholds   for sparsity.rule=threshold: {kind: a cut for each layer}
    """

    skipped: float
    budget: Budget
    increase: float | None = None
    thresholds: dict[str, list[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a bundle's config."""
        kept = {kind: list(self.budget.of(kind)) for kind in KINDS}
        return {"skipped": self.skipped, **kept, "increase": self.increase, "thresholds": self.thresholds}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Point":
        """The other way round."""
        budget = Budget(tuple(entry["mlp"]), tuple(entry["heads"]))
        return cls(entry["skipped"], budget, entry["increase"], entry["thresholds"])


def skipped_share(budget: Budget, anatomy: Anatomy | Shape) -> float:
    """The share of the body's bytes that a budget does not read."""
    read = sum(sum(budget.of(kind)) * anatomy.unit_weights(kind) for kind in KINDS)
    return 1 - read / body_weights(anatomy)


def body_weights(anatomy: Anatomy | Shape) -> float:
    """Weights of all units of the body."""
    return anatomy.layers * sum(anatomy.units(kind) * anatomy.unit_weights(kind) for kind in KINDS)


def by_loss(
    losses: Mapping[Group, Mapping[int, float]], target: float, anatomy: Anatomy | Shape, costs: Mapping[Group, float]
) -> Budget:
    """The budget that skips a share of the body's bytes at the least sum of the groups' losses.

    losses   of each group the loss over dense when it alone keeps k units, for some k
    costs    of each group the weights that choosing its units reads; none where nothing is read
    Raises ConfigError for a target that the lowest k measured do not reach.
    """
    steps = sorted(
        (slope, group, first, last)
        for group, measured in losses.items()
        for slope, first, last in _descent(
            measured, anatomy.units(group[0]), anatomy.unit_weights(group[0]), costs.get(group, 0.0)
        )
    )
    kept = {group: anatomy.units(group[0]) for group in losses}
    wanted = target * body_weights(anatomy)
    for _, group, first, last in steps:
        weight = anatomy.unit_weights(group[0])
        units = min(first - last, int(wanted / weight + 1e-9))  # what a head is too large for, neurons make up
        if kept[group] == first:  # a group that stopped within a step is not taken further
            kept[group] -= units
            wanted -= units * weight
    if wanted > SHORT * body_weights(anatomy):
        raise too_far(target, skipped_share(_budget(kept, anatomy), anatomy))
    return _budget(kept, anatomy)


def check_reached(targets: Sequence[float], lowest: Budget, anatomy: Anatomy | Shape) -> None:
    """Raise ConfigError for a target that is not met even when every group keeps the fewest units it is tried with."""
    reach = skipped_share(lowest, anatomy)
    for target in targets:
        if target > reach + SHORT:
            raise too_far(target, reach)


def too_far(target: float, reach: float) -> ConfigError:
    """What is wrong with a target beyond the levels."""
    return ConfigError(
        f"calibrate.targets has {target:g}, but at the lowest of calibrate.levels no more than {reach:.3f} of the "
        "body's bytes are left out: lower one of them"
    )


def _descent(measured: Mapping[int, float], units: int, weight: float, cost: float) -> list[tuple[float, int, int]]:
    """(loss a weight saved, from k, to k) of steps down from all units, each dearer than the one before.

    Noise aside, fewer units lose more; of the rest the lower convex hull is kept, since a cheap step behind a dear one
    is reached by taking both. `cost` comes off the first step's savings. A group that never saves as much comes last.
    """
    points, worst = [(0.0, 0.0, units)], 0.0  # saved, loss, k
    for kept in sorted((kept for kept in measured if kept < units), reverse=True):
        worst = max(worst, measured[kept])
        points.append(((units - kept) * weight - cost, worst, kept))
    worth = [point for point in points[1:] if point[0] > 0]
    if not worth:
        return [(math.inf, units, points[-1][2])] if len(points) > 1 else []
    hull = points[:1]
    for point in worth:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(_slope(before, after), before[2], after[2]) for before, after in pairwise(hull)]


def _slope(before: tuple[float, float, int], after: tuple[float, float, int]) -> float:
    """Loss for each weight saved."""
    return (after[1] - before[1]) / (after[0] - before[0])


def by_recall(recalls: Mapping[Group, np.ndarray], wanted: float, anatomy: Anatomy) -> Budget:
    """The fewest units with which every group has the wanted recall of mass; at least one each.

    recalls   of each group the recall of mass of the best k, k = 0 to all
    """
    kept = {group: max(1, int(np.searchsorted(recall, wanted - 1e-9))) for group, recall in recalls.items()}
    return _budget({group: min(count, anatomy.units(group[0])) for group, count in kept.items()}, anatomy)


def by_recall_to_target(recalls: Mapping[Group, np.ndarray], target: float, anatomy: Anatomy) -> Budget:
    """The budget of one recall of mass for all groups that skips at least a share of the body's bytes."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if skipped_share(by_recall(recalls, middle, anatomy), anatomy) >= target:
            low = middle
        else:
            high = middle
    return by_recall(recalls, low, anatomy)


def _budget(kept: Mapping[Group, int], anatomy: Anatomy | Shape) -> Budget:
    layers = range(anatomy.layers)
    return Budget(*(tuple(kept[kind, layer] for layer in layers) for kind in KINDS))


def at_target(points: Sequence[Point], target: float, anatomy: Anatomy | Shape) -> Point:
    """The point of a curve at a share of bytes between those measured, counts and thresholds in proportion.

    Raises ConfigError for a share beyond the curve.
    """
    curve = [Point(0.0, everything(anatomy))]
    for point in sorted(points, key=lambda point: point.skipped):
        if point.skipped > curve[-1].skipped + 1e-6:  # two ways to the same share: the first is as good
            curve.append(point)
    if target > curve[-1].skipped + 0.005:
        raise ConfigError(
            f"sparsity.ratio={target:g} is beyond the bundle's calibrated curve, which ends at "
            f"{curve[-1].skipped:.3f}: calibrate with a larger one of calibrate.targets"
        )
    place = max(1, min(int(np.searchsorted([point.skipped for point in curve], target)), len(curve) - 1))
    before, after = curve[place - 1], curve[place]
    share = min(1.0, max(0.0, (target - before.skipped) / (after.skipped - before.skipped)))
    kept = (_between(before.budget.of(kind), after.budget.of(kind), share, 0) for kind in KINDS)
    thresholds = {}
    if before.thresholds and after.thresholds:
        thresholds = {kind: _between(before.thresholds[kind], after.thresholds[kind], share, None) for kind in KINDS}
    elif share == 1:
        thresholds = after.thresholds
    budget = Budget(*(tuple(max(1, int(count)) for count in counts) for counts in kept))
    return Point(skipped_share(budget, anatomy), budget, None, thresholds)


def _between(before: Sequence[float], after: Sequence[float], share: float, digits: int | None) -> list[float]:
    """Values in proportion; rounded where `digits` is given."""
    values = [a + share * (b - a) for a, b in zip(before, after, strict=True)]
    return values if digits is None else [float(np.floor(value + 0.5)) for value in values]


class Calibrated(Protocol):
    """What holds a curve: a bundle."""

    @property
    def folder(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...


def choose_budget(sparsity: Sparsity, anatomy: Anatomy | Shape, bundle: Calibrated | None) -> Point:
    """The budget of a config; of a calibrated one with its thresholds.

    Raises ConfigError for a calibrated budget of anything but one ratio, DataError without calibration in the bundle.
    """
    if sparsity.budget == "uniform" or sparsity.selector == "dense":
        return Point(0.0, make_budget(sparsity, anatomy))
    mlp, heads = requested_ratios(sparsity)
    by_layer = (sparsity.mlp_layers, sparsity.heads_layers, sparsity.mlp_schedule, sparsity.heads_schedule)
    if mlp != heads or any(by_layer) or sparsity.dense_layers:
        raise ConfigError(
            "sparsity.budget=calibrated shares out one ratio of the body's bytes between neurons, heads and layers: "
            "give sparsity.ratio, with sparsity.part=both and no lists or schedules"
        )
    if bundle is None or not bundle.config.get("calibration"):
        where = "DIR" if bundle is None else bundle.folder
        raise DataError(
            f"sparsity.budget=calibrated needs a bundle with calibrated budgets: `dejavu calibrate predictors={where}` "
            "makes one"
        )
    curve = [Point.from_json(entry) for entry in bundle.config["calibration"]["curve"]]
    return at_target(curve, mlp, anatomy)

"""How many units each layer computes: from the fractions NOT computed in the config to counts."""

from bisect import bisect
from dataclasses import dataclass
from typing import Protocol

from dejavu.errors import ConfigError
from dejavu.models.anatomy import Anatomy
from dejavu.models.shape import Shape
from dejavu.models.topk import kept
from dejavu.schema import NEURONS_ONLY, Sparsity


class Counted(Protocol):
    """What has units: an Anatomy, a Shape, the engine's weights."""

    def units(self, kind: str) -> int: ...


@dataclass(frozen=True)
class Budget:
    """Units kept per layer; a layer that keeps all of a kind is dense for it and is not touched."""

    mlp: tuple[int, ...]
    heads: tuple[int, ...]

    def of(self, kind: str) -> tuple[int, ...]:
        return self.mlp if kind == "mlp" else self.heads

    def is_whole(self, model: Counted) -> bool:
        """Whether every layer keeps all units of both kinds, so that nobody has to choose."""
        return all(kept == model.units(kind) for kind in ("mlp", "heads") for kept in self.of(kind))


def requested_ratios(sparsity: Sparsity) -> tuple[float, float]:
    """(mlp, heads) fractions NOT computed, lists and schedules of layers aside.

    `ratio` fills both, `part` leaves the other whole. Selectors that know neurons only leave heads whole.
    """
    mlp, heads = (sparsity.mlp, sparsity.heads) if sparsity.ratio is None else (sparsity.ratio, sparsity.ratio)
    if sparsity.selector == "dense":
        return 0.0, 0.0
    if sparsity.selector in NEURONS_ONLY:
        heads = 0.0
    return (0.0 if sparsity.part == "heads" else mlp), (0.0 if sparsity.part == "mlp" else heads)


def everything(anatomy: Anatomy | Shape) -> Budget:
    """All units of every layer."""
    return Budget((anatomy.neurons,) * anatomy.layers, (anatomy.heads,) * anatomy.layers)


def make_budget(sparsity: Sparsity, anatomy: Anatomy | Shape) -> Budget:
    """Counts for each layer. Raises ConfigError for a list of the wrong length or a layer that does not exist."""
    if sparsity.selector == "dense":
        return everything(anatomy)
    dense = {layer_number(place, anatomy.layers) for place in sparsity.dense_layers}
    mlp, heads = requested_ratios(sparsity)
    together = anatomy.together(sparsity.head_unit)
    mlp_layers, heads_layers = sparsity.mlp_layers, sparsity.heads_layers
    if mlp_layers is None:
        mlp_layers = scheduled(sparsity.mlp_schedule, anatomy.layers)
    if heads_layers is None:
        heads_layers = scheduled(sparsity.heads_schedule, anatomy.layers)
    if sparsity.selector in NEURONS_ONLY:
        heads_layers = None
    return Budget(
        _counts(mlp, mlp_layers, "mlp_layers", anatomy.neurons, anatomy.layers, dense),
        _counts(heads, heads_layers, "heads_layers", anatomy.heads, anatomy.layers, dense, together),
    )


def scheduled(steps: list[list[float]] | None, layers: int) -> list[float] | None:
    """A ratio for each layer from (depth, ratio) steps: that of the last step whose layer is not above it."""
    if steps is None:
        return None
    starts = [int(depth * layers) for depth, _ in steps]
    return [steps[bisect(starts, layer) - 1][1] for layer in range(layers)]


def layer_number(place: float, layers: int) -> int:
    """A layer from its number (negative: from the end) or, when not whole, from its depth as a share of the layers."""
    number = int(place) if float(place).is_integer() else int(place * layers)
    if number < 0:
        number += layers
    if not 0 <= number < layers:
        raise ConfigError(f"sparsity.dense_layers has {place:g}, but the model has layers 0 to {layers - 1}")
    return number


def _counts(
    ratio: float, listed: list[float] | None, key: str, units: int, layers: int, dense: set[int], together: int = 1
) -> tuple[int, ...]:
    """Units kept in each layer; those chosen `together` are counted as one and kept as all of them."""
    if listed is not None and len(listed) != layers:
        raise ConfigError(f"sparsity.{key} has {len(listed)} values, but the model has {layers} layers")
    ratios = [ratio] * layers if listed is None else listed
    return tuple(
        units if layer in dense else together * kept(ratios[layer], units // together) for layer in range(layers)
    )

"""What really ran sparse: the densities that stand beside every quality number."""

import torch
from torch import Tensor

from dejavu.models.anatomy import KINDS, Anatomy


class Density:
    """Units used over units, per layer, over the non-padding positions that ran sparse; a dense layer counts 1."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.positions = 0
        self._used: dict[tuple[str, int], Tensor] = {}

    def add_positions(self, count: int) -> None:
        self.positions += count

    def add_used(self, kind: str, layer: int, used: Tensor) -> None:
        """Add a count of units used; it stays on its device so that no layer waits for it."""
        self._used[kind, layer] = self._used.get((kind, layer), torch.zeros_like(used)) + used

    def per_layer(self, kind: str) -> list[float]:
        """Density of each layer, 1.0 for a layer that was not touched or when nothing ran sparse."""
        total = self.positions * self.anatomy.units(kind)
        layers = range(self.anatomy.layers)
        return [
            int(self._used[kind, layer]) / total if (kind, layer) in self._used and total else 1.0 for layer in layers
        ]

    def measured(self) -> dict[str, float]:
        """`mlp_density` and `head_density`: means over all layers."""
        names = {"mlp": "mlp_density", "heads": "head_density"}
        return {names[kind]: sum(self.per_layer(kind)) / self.anatomy.layers for kind in KINDS}

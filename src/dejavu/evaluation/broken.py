"""Where a forward pass stops being finite: found by running it again and watching, only after it went wrong."""

from collections.abc import Callable

import torch
from torch import Tensor

from dejavu.models.anatomy import Anatomy
from dejavu.models.observe import Observer, observed


class Watch(Observer):
    """Remembers the first place at which a tensor is not finite."""

    def __init__(self) -> None:
        self.place: str | None = None

    def residual(self, layer: int, residual_ND: Tensor) -> None:
        self._look(f"before layer {layer}" if layer == 0 else f"in the MLP of layer {layer - 1}", residual_ND)

    def middle(self, layer: int, middle_ND: Tensor) -> None:
        self._look(f"in the attention of layer {layer}", middle_ND)

    def _look(self, place: str, tensor: Tensor) -> None:
        if self.place is None and not bool(torch.isfinite(tensor).all()):
            self.place = place


def broken_place(anatomy: Anatomy, forward: Callable[[], object]) -> str:
    """Where `forward()` first gives a value that is not finite, as part of a sentence."""
    watch = Watch()
    with observed(anatomy, watch):
        forward()
    return "first " + (watch.place or f"in the MLP of layer {anatomy.layers - 1} or after it")

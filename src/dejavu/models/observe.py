"""Hooks on the four points of every block: what the recorder reads and the sparse layers change.

The model's own forward runs unchanged, whatever the version of transformers: nothing of it is copied here, and a hook
that returns nothing leaves every bit as it was. Hooks sit on the live model's modules and go when the context ends.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from dejavu.models.anatomy import Anatomy, Block


class Observer:
    """What happens at each point; tensors are flattened to one row per token. Returning None changes nothing."""

    def residual(self, layer: int, residual_ND: Tensor) -> None:
        """r_l, as block `layer` is entered."""

    def heads(self, layer: int, heads_NE: Tensor) -> Tensor | None:
        """Outputs of all heads side by side, E = heads * head_dim, before W_o; may return what W_o shall read."""
        return None

    def middle(self, layer: int, middle_ND: Tensor) -> None:
        """m_l, the tensor that the MLP half adds back."""

    def neurons(self, layer: int, activations_NF: Tensor) -> Tensor | None:
        """The values that multiply the columns of W2; may return what W2 shall read."""
        return None


@contextmanager
def observed(anatomy: Anatomy, observer: Observer) -> Iterator[None]:
    """Let `observer` see (and change) every forward pass of the model within the context."""
    with ExitStack() as stack:
        for number, block in enumerate(anatomy.blocks):
            for handle in _hook(number, block, observer, anatomy):
                stack.callback(handle.remove)
        yield


def _hook(number: int, block: Block, observer: Observer, anatomy: Anatomy) -> list[Any]:
    def rows(tensor: Tensor) -> Tensor:
        return _rows(tensor).to(anatomy.home)

    def at_layer(module: nn.Module, args: tuple, kwargs: dict) -> None:
        observer.residual(number, rows(args[0] if args else kwargs["hidden_states"]))

    def at_heads(module: nn.Module, args: tuple) -> tuple[Tensor] | None:
        return _changed(args[0], observer.heads(number, rows(args[0])))

    def at_middle(module: nn.Module, args: tuple) -> None:
        observer.middle(number, rows(args[0]))

    def after_middle(module: nn.Module, args: tuple, output: Tensor) -> None:
        observer.middle(number, rows(output))

    def at_neurons(module: nn.Module, args: tuple) -> tuple[Tensor] | None:
        return _changed(args[0], observer.neurons(number, rows(args[0])))

    norm = block.mlp_norm
    return [
        block.layer.register_forward_pre_hook(at_layer, with_kwargs=True),
        block.attention_output.register_forward_pre_hook(at_heads),
        norm.register_forward_hook(after_middle) if anatomy.post_norm else norm.register_forward_pre_hook(at_middle),
        block.mlp_output.register_forward_pre_hook(at_neurons),
    ]


def _rows(tensor: Tensor) -> Tensor:
    """One row per token: (..., n) -> (N, n), batch first, whatever the family's own shape is."""
    return tensor.reshape(-1, tensor.shape[-1])


def _changed(given: Tensor, replacement: Tensor | None) -> tuple[Tensor] | None:
    return None if replacement is None else (replacement.view(given.shape).to(given.device),)

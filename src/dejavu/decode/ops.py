"""The kernels as operators of torch, `torch.ops.dejavu.*`, so that another device's can stand under the same names.

An operator gets what changes from token to token as tensors (torch picks the implementation by their device) and a
number: that of the weights and caches it works with, put on the device once by whoever made them (`Bound`). With forty
tensors for each call, torch would spend more time on arguments than a small model's layer takes.
"""

import itertools
import weakref
from typing import Any

import numba
import torch
from torch import Tensor, library

from dejavu.decode import kernels
from dejavu.decode.attention import attention as attention_kernel
from dejavu.decode.attention import choose_attention as choose_attention_kernel
from dejavu.decode.compiling import compile_for

_operators = library.Library("dejavu", "DEF")
_operators.define("mlp(Tensor(a!) x, Tensor units, Tensor mask, int bound) -> ()")
_operators.define("attention(Tensor(a!) x, Tensor units, Tensor mask, int bound) -> ()")
_operators.define("project(Tensor x, Tensor(a!) out, int bound) -> ()")
_operators.define("choose(Tensor hidden, Tensor(a!) scores, Tensor(b!) units, int bound) -> bool")
_operators.define("choose_mlp(Tensor(a!) x, int bound) -> int")
_operators.define("choose_attention(Tensor(a!) x, int bound) -> int")

mlp = torch.ops.dejavu.mlp.default
attention = torch.ops.dejavu.attention.default
project = torch.ops.dejavu.project.default
choose = torch.ops.dejavu.choose.default
choose_mlp = torch.ops.dejavu.choose_mlp.default
choose_attention = torch.ops.dejavu.choose_attention.default

_FLOATS, _UNITS, _MASK = numba.float32[:, ::1], numba.int64[::1], numba.boolean[:, ::1]
# The kernel of each operator, and the types of the arguments that come with a call.
_KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mlp": (kernels.mlp, (_FLOATS, _UNITS, _MASK)),
    "attention": (attention_kernel, (_FLOATS, _UNITS, _MASK)),
    "project": (kernels.normed_project, (_FLOATS, _FLOATS)),
    "choose": (kernels.choose, (_FLOATS, _FLOATS, numba.int64[:, ::1])),
    "choose_mlp": (kernels.choose_mlp, (_FLOATS,)),
    "choose_attention": (choose_attention_kernel, (_FLOATS,)),
}
_numbers = itertools.count()
_bound: dict[int, tuple[Any, ...]] = {}


class Bound:
    """The arguments of an operator that stay, in its kernel's order; forgotten with this object.

    The kernel is compiled for them here: half a minute for a storage type's first use on a machine.
    """

    def __init__(self, operator: str, *arguments: Any) -> None:
        kernel, called_with = _KERNELS[operator]
        compile_for(kernel, (*called_with, *map(numba.typeof, arguments)))
        self.number = next(_numbers)
        _bound[self.number] = arguments
        weakref.finalize(self, _bound.pop, self.number, None)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError for what a kernel would read as something else. A size of -1 may be any."""
    fits = len(shape) == tensor.dim() and all(
        size in (-1, found) for size, found in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {shape} (-1: any), not {tensor.dtype} "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )


_MATRIX = 3  # where a kernel's first matrix stands among what is bound: after its norm's weight, bias and epsilon


def _check_half(x: Tensor, units: Tensor, mask: Tensor, half: tuple[Any, ...]) -> None:
    _check("x", x, torch.float32, -1, half[_MATRIX].shape[1])
    _check("units", units, torch.int64, -1)
    _check("mask", mask, torch.bool, len(x), len(units))


def _mlp(x: Tensor, units: Tensor, mask: Tensor, bound: int) -> None:
    _check_half(x, units, mask, _bound[bound])
    kernels.mlp(x.numpy(), units.numpy(), mask.numpy(), *_bound[bound])


def _attention(x: Tensor, units: Tensor, mask: Tensor, bound: int) -> None:
    _check_half(x, units, mask, _bound[bound])
    attention_kernel(x.numpy(), units.numpy(), mask.numpy(), *_bound[bound])


def _project(x: Tensor, out: Tensor, bound: int) -> None:
    rows, columns = _bound[bound][_MATRIX].shape
    _check("x", x, torch.float32, -1, columns)
    _check("out", out, torch.float32, len(x), rows)
    kernels.normed_project(x.numpy(), out.numpy(), *_bound[bound])


def _choose(hidden: Tensor, scores: Tensor, units: Tensor, bound: int) -> bool:
    _check("hidden", hidden, torch.float32, -1, -1)
    _check("scores", scores, torch.float32, len(hidden), -1)
    _check("units", units, torch.int64, len(hidden), -1)
    return bool(kernels.choose(hidden.numpy(), scores.numpy(), units.numpy(), *_bound[bound]))


def _choose_mlp(x: Tensor, bound: int) -> int:
    choice, half = _bound[bound]
    _check("x", x, torch.float32, len(choice[0]), half[_MATRIX].shape[1])
    return int(kernels.choose_mlp(x.numpy(), choice, half))


def _choose_attention(x: Tensor, bound: int) -> int:
    choice, half = _bound[bound]
    _check("x", x, torch.float32, len(choice[0]), half[_MATRIX].shape[1])
    return int(choose_attention_kernel(x.numpy(), choice, half))


_IMPLEMENTATIONS = {
    "mlp": _mlp, "attention": _attention, "project": _project, "choose": _choose, "choose_mlp": _choose_mlp,
    "choose_attention": _choose_attention,
}  # fmt: skip
OPERATORS = tuple(f"dejavu::{name}" for name in _IMPLEMENTATIONS)
for _name, _implementation in _IMPLEMENTATIONS.items():
    _operators.impl(_name, _implementation, "CPU")

"""The kernels as operators of torch, `torch.ops.dejavu.*`, so that another device's can stand under the same names.

An operator gets what changes from token to token as tensors (torch picks the implementation by their device) and a
number: that of the weights and caches it works with, put on the device once by whoever made them (`Bound`). With forty
tensors for each call, torch would spend more time on arguments than a small model's layer takes.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, library

from dejavu.decode import kernels

_operators = library.Library("dejavu", "DEF")
_operators.define("mlp(Tensor(a!) x, Tensor units, Tensor mask, int bound) -> ()")
_operators.define("attention(Tensor(a!) x, Tensor units, Tensor mask, int bound) -> ()")
_operators.define("project(Tensor x, Tensor(a!) out, int bound) -> ()")
_operators.define("choose(Tensor hidden, Tensor(a!) scores, Tensor(b!) units, int bound) -> bool")

mlp = torch.ops.dejavu.mlp.default
attention = torch.ops.dejavu.attention.default
project = torch.ops.dejavu.project.default
choose = torch.ops.dejavu.choose.default

_numbers = itertools.count()
_bound: dict[int, tuple[Any, ...]] = {}


class Bound:
    """The arguments of an operator that stay, in its kernel's order; forgotten with this object."""

    def __init__(self, *arguments: Any) -> None:
        self.number = next(_numbers)
        _bound[self.number] = arguments
        weakref.finalize(self, _bound.pop, self.number, None)


def _mlp(x: Tensor, units: Tensor, mask: Tensor, bound: int) -> None:
    kernels.mlp(x.numpy(), units.numpy(), mask.numpy(), *_bound[bound])


def _attention(x: Tensor, units: Tensor, mask: Tensor, bound: int) -> None:
    kernels.attention(x.numpy(), units.numpy(), mask.numpy(), *_bound[bound])


def _project(x: Tensor, out: Tensor, bound: int) -> None:
    kernels.normed_project(x.numpy(), out.numpy(), *_bound[bound])


def _choose(hidden: Tensor, scores: Tensor, units: Tensor, bound: int) -> bool:
    return bool(kernels.choose(hidden.numpy(), scores.numpy(), units.numpy(), *_bound[bound]))


for _name, _implementation in (("mlp", _mlp), ("attention", _attention), ("project", _project), ("choose", _choose)):
    _operators.impl(_name, _implementation, "CPU")

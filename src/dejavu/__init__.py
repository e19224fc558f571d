"""Deja Vu: leave out the heads and neurons that a token does not need.

engine = dejavu.sparsify(model, predictors="runs/train/...", mlp=0.75, heads=0.75)
model.generate(...)
dejavu.restore(model)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejavu.decode.transformers_model import restore, sparsify

__all__ = ["restore", "sparsify"]


def __getattr__(name: str) -> Any:
    """What `__all__` names, imported when first asked for: it needs torch, and the command's --help must not."""
    if name in __all__:
        return getattr(importlib.import_module("dejavu.decode.transformers_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

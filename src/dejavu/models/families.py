"""The families that are supported, each a file beside this one: from a loaded transformers model to its anatomy."""

from collections.abc import Callable
from typing import Any

from dejavu.errors import ConfigError
from dejavu.models import llama, opt
from dejavu.models.anatomy import Anatomy

FAMILIES: dict[str, Callable[[Any], Anatomy]] = {"opt": opt.anatomy, "llama": llama.anatomy}


def anatomy(model: Any) -> Anatomy:
    """The anatomy of a loaded model. Raises ConfigError for a family that has none."""
    family = model.config.model_type
    if family not in FAMILIES:
        raise ConfigError(f"models of type {family!r} are not supported: supported are {', '.join(FAMILIES)}")
    return FAMILIES[family](model)

"""The families that are supported, each a file beside this one: from a loaded model to its anatomy, from a config to
its shape."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dejavu.errors import ConfigError
from dejavu.models import llama, opt
from dejavu.models.anatomy import Anatomy
from dejavu.models.shape import Shape

FAMILIES: dict[str, ModuleType] = {"opt": opt, "llama": llama}
# transformers' classes that the engine decodes
MODELS = tuple(str(family.MODEL) for family in FAMILIES.values() if hasattr(family, "MODEL"))


def anatomy(model: Any) -> Anatomy:
    """The anatomy of a loaded model. Raises ConfigError for a family that has none."""
    found: Anatomy = _family(model.config.model_type).anatomy(model)
    return found


def shape_of(architecture: Mapping[str, Any]) -> Shape:
    """The sizes in a model's config. Raises ConfigError for a family that is not known or does not say them."""
    name = architecture.get("model_type")
    family = _family(name)
    if not hasattr(family, "shape"):
        raise ConfigError(f"the sizes of models of type {name} are not known before they are built: use another model")
    found: Shape = family.shape(architecture)
    return found


def supported(model: Any) -> bool:
    """Whether this is a loaded causal LM of a family that the engine decodes."""
    return any(kind.__name__ in MODELS for kind in type(model).__mro__)


def _family(name: Any) -> ModuleType:
    if name not in FAMILIES:
        raise ConfigError(f"models of type {name!r} are not supported: supported are {', '.join(FAMILIES)}")
    return FAMILIES[name]

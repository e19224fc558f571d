"""Models that do not fit one device: layers on several GPUs, in memory and on disk (`model.device_map`).

accelerate's hooks bring a module's weights to where it runs and drop them afterwards: outside of a forward pass they
are on no device. What reads weights by itself therefore asks `tensor_of` or `stored_tensors`.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from accelerate.utils import align_module_device, get_max_memory
from torch import Tensor, nn
from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

from dejavu.schema import Model

Memory = dict[int | str, int | str]  # of a GPU by its number, of "cpu": bytes, or a size with its unit
USABLE = 0.9  # of a place's free memory; activations need the rest


def placing(model: Model, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told: where layers may go and how much of each place; {} without a device_map."""
    if model.device_map is None:
        return {}
    return {"device_map": model.device_map, "max_memory": limits(model, device), "offload_folder": model.offload}


def limits(model: Model, device: torch.device) -> Memory:
    """Memory of each place that layers may take. On device=cpu the GPUs are left alone."""
    return {
        place: (model.cpu_memory if place == "cpu" else model.gpu_memory) or int(USABLE * free)
        for place, free in get_max_memory().items()
        if place == "cpu" or device.type != "cpu"
    }


def home_of(model: Any) -> torch.device:
    """Where inputs go and results are gathered: the first GPU that has layers, else the CPU."""
    places = getattr(model, "hf_device_map", None)
    if places is None:
        found: torch.device = model.device
        return found
    gpus = sorted(place for place in places.values() if isinstance(place, int))
    return torch.device("cuda", gpus[0]) if gpus else torch.device("cpu")


def tensor_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A module's own tensor, brought from memory or disk where it is kept there."""
    with align_module_device(module):
        tensor: Tensor = getattr(module, name).detach()
    return tensor


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model's state in the order of its names, one at a time in memory."""
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            owner, _, own_name = name.rpartition(".")
            tensor = tensor_of(model.get_submodule(owner), own_name)
        yield name, tensor


def planned(shape: Any, device_map: str, memory: Memory) -> dict[str, int | str]:
    """Where the parts of a model will go, before any weight is read: a GPU's number, "cpu" or "disk".

    `shape` is the model on the meta device. As transformers decides: a block is never divided.
    """
    whole = shape._no_split_modules
    with quiet_accelerate():  # it minds GPUs that are not here
        if device_map != "sequential":
            memory = get_balanced_memory(shape, memory, whole, low_zero=device_map == "balanced_low_0")
        found: dict[str, int | str] = infer_auto_device_map(shape, memory, whole)
    return found


@contextmanager
def quiet_accelerate() -> Iterator[None]:
    """Its warnings repeat what is said here."""
    log = logging.getLogger("accelerate")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def described(places: Mapping[str, Any]) -> str:
    """Where the layers are, in a few words: "layers 0 to 3 in memory, 4 to 11 on disk"."""

    def named(place: Any) -> str:
        return {"cpu": "in memory", "disk": "on disk"}.get(str(place), f"on GPU {place}")

    found = {int(match[1]): place for part, place in places.items() if (match := re.search(r"layers\.(\d+)", part))}
    if not found:  # all in one place, or the model would be divided by layers
        return f"all layers {named(next(iter(places.values())))}"
    words = []
    for place, run in groupby(sorted(found), key=lambda layer: found[layer]):
        layers = list(run)
        words.append(f"{layers[0]}{f' to {layers[-1]}' if len(layers) > 1 else ''} {named(place)}")
    return f"layers {', '.join(words)}"

"""From a model config to a causal LM with its tokenizer, on the right device, whole or not at all."""

import dataclasses
import hashlib
import json
import pickle  # for the name of its error only: transformers reads others' files with weights_only
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dejavu.errors import ConfigError, DataError
from dejavu.models import EMBEDDED
from dejavu.models.anatomy import Anatomy
from dejavu.models.families import anatomy
from dejavu.models.packaged import converted, converted_folder
from dejavu.models.placement import described, home_of, placing, quiet_accelerate, stored_tensors
from dejavu.schema import Config

FINGERPRINT_ELEMENTS = 64


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer (None with random weights) and its anatomy."""

    name: str
    model: Any
    tokenizer: Any
    anatomy: Anatomy

    @property
    def device(self) -> torch.device:
        return home_of(self.model)

    @property
    def places(self) -> str | None:
        """Where the layers of a model with a device_map are, in words."""
        found = getattr(self.model, "hf_device_map", None)
        return None if found is None else described(found)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.model)

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_model(config: Config) -> LoadedModel:
    """Load `config.model` in `config.dtype` onto `config.device`.

    Raises DataError where weights are missing, incomplete or not to be had, ConfigError for an unsupported family.
    """
    device = pick_device(config.device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.model.random_init:
        model, tokenizer = random_model(config.model.architecture, config.seed, dtype), None
    else:
        source = model_source(config)
        model = pretrained_model(source, dtype, **placing(config.model, device))
        tokenizer = AutoTokenizer.from_pretrained(source)
    if config.model.device_map is None:
        model.to(device)
    model.eval().requires_grad_(False)
    parts = with_separator(anatomy(model), config, tokenizer)
    if config.model.device_map is not None:
        parts = dataclasses.replace(parts, home=home_of(model))
    return LoadedModel(config.model.name, model, tokenizer, parts)


def with_separator(parts: Anatomy, config: Config, tokenizer: Any) -> Anatomy:
    """The anatomy with the document separator that the config names, else with its family's."""
    token = config.model.separator
    if token is None or tokenizer is None:
        return parts
    number = tokenizer.get_vocab().get(token)
    if number is None:
        raise ConfigError(f"model.separator={token} is no token of {config.model.name}: choose one, or null")
    return dataclasses.replace(parts, separator=number)


def model_source(config: Config) -> str:
    """Where the weights are: a folder, the package's own folder, or a name on the hub."""
    model = config.model
    if model.path is not None:
        if not (Path(model.path) / "config.json").is_file():
            raise DataError(f"model.path={model.path} has no config.json: give a folder in transformers' own form")
        return model.path
    if model.package is not None and model.gguf is not None:
        return str(converted(model.package, model.gguf, from_gguf))
    if model.hub is not None:
        return model.hub
    if (EMBEDDED / model.name / "config.json").is_file():
        return str(EMBEDDED / model.name)
    raise DataError(f"model {model.name} is neither in the package nor on the hub: give its folder as model.path=DIR")


def without_weights(config: Config, online: bool) -> tuple[Any, torch.dtype, str]:
    """The model on the meta device, which takes no memory, the type of its published weights, and where its sizes are
    from: the config in a folder, in the hub client's cache or on the hub, else the config group's `architecture`.

    Raises ConfigError for a model with none of these.
    """
    model, settings, source = config.model, None, None if config.model.random_init else sizes_source(config)
    if source is not None:
        try:
            settings = AutoConfig.from_pretrained(source, local_files_only=not online)
        except (OSError, ValueError):
            source = None
    if settings is None:
        settings, source = architecture_config(model.architecture), f"conf/model/{model.name}.yaml"
    kind = settings.dtype or (torch.float32 if model.gguf else torch.float16)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, config.dtype)), kind, str(source)


def sizes_source(config: Config) -> str | None:
    """As `model_source`, but nothing is converted or refused for it."""
    model = config.model
    if model.path is None and model.package is not None and model.gguf is not None:
        try:
            folder = converted_folder(model.package, model.gguf)
        except PackageNotFoundError:
            return None
        return str(folder) if folder.is_dir() else None
    try:
        return model_source(config)
    except DataError:
        return None


def pretrained_model(source: str, dtype: torch.dtype, **placing: Any) -> Any:
    """Weights from a folder or the hub, placed by `placement.placing`; every tensor the model has must be there."""
    with quiet_transformers():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, output_loading_info=True, **placing
            )
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            if "offload_folder" in str(error):
                raise DataError(
                    f"model.device_map puts layers of {source} on disk and its weights are no safetensors, so they are "
                    "written anew: name a folder with room for them, model.offload=DIR"
                ) from error
            raise DataError(
                f"the model at {source} cannot be loaded ({first_line(error)}): check the folder or, for a name on the "
                "hub, the network"
            ) from error
    wrong = {key: sorted(report[key]) for key in ("missing_keys", "mismatched_keys") if report.get(key)}
    if wrong:
        what = "; ".join(f"{key.replace('_', ' ')}: {', '.join(map(str, names[:4]))}" for key, names in wrong.items())
        raise DataError(
            f"the weights at {source} do not fill the model ({what}): get a complete copy of the checkpoint"
        )
    return model


def from_gguf(source: Path, folder: Path) -> None:
    """Convert a GGUF file of any supported family to float32 safetensors with config and tokenizer in `folder`.

    transformers marks what it read as quantised and refuses to save it: the weights move to a model without the mark.
    """
    with quiet_transformers():
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        del read.config.quantization_config
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def random_model(architecture: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    """The right shape with random weights: for latency, never for quality."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(architecture_config(architecture), dtype=dtype)


def architecture_config(architecture: dict[str, Any]) -> Any:
    """transformers' config from the one in a model's config group."""
    if "model_type" not in architecture:
        raise ConfigError("this model has no model.architecture (model_type and sizes): give a folder, model.path=DIR")
    sizes = dict(architecture)
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def pick_device(name: str) -> torch.device:
    """auto: CUDA where there is one. Raises ConfigError when CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "device=cuda was asked for but this machine has no CUDA device: use device=cpu or device=auto"
        )
    return torch.device("cuda" if name in ("auto", "cuda") and available else "cpu")


def fingerprint(model: Any) -> str:
    """sha256 over the architecture and, of every tensor, its name, shape and 64 fixed elements rounded to bfloat16.

    Equal for fp32, fp16 and bf16 copies of weights published in 16 bits (as OPT's are), different for another model.
    """
    config = model.config.to_dict()
    fields = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    digest = hashlib.sha256(json.dumps({key: config.get(key) for key in fields}).encode())
    for name, tensor in stored_tensors(model):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(_sample(tensor).tobytes())
    return digest.hexdigest()[:16]


def _sample(tensor: Tensor) -> Any:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, FINGERPRINT_ELEMENTS, dtype=torch.float64).long().to(flat.device)
    return flat[places].bfloat16().view(torch.int16).cpu().numpy()


def first_line(error: Exception) -> str:
    """The first line of an error's text, for one-sentence messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Progress bars and load reports of transformers and accelerate repeat what is said here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with quiet_accelerate():
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()

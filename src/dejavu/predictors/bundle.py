"""A predictor bundle: the folder in which trained predictors and static statistics are saved and shared.

    predictors.safetensors   mlp.3.down.weight, ... of each predictor (mlp.trunk.down.weight of all that share one);
                             mlp.3.static (mean contribution of each unit)
    config.json              what they are for, how they were trained, how good they are; its id covers both files

A bundle is never changed: another training is another bundle. Nothing in it is a pickle.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dejavu.activations.cache import ActivationCache
from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.predictors.manifest import CONFIG, FORMAT_VERSION, WEIGHTS, content_id, file_digest, read_bundle_config
from dejavu.predictors.network import Predictor, ranks
from dejavu.predictors.statistics import Key, UnitStatistics
from dejavu.schema import Config

SIZES = ("layers", "width", "neurons", "heads")


class Sizes(Protocol):
    """What has these four sizes: an Anatomy, an ActivationCache."""

    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def neurons(self) -> int: ...
    @property
    def heads(self) -> int: ...


@dataclass(frozen=True)
class Bundle:
    """A loaded, checked bundle; `folder` is for messages."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def id(self) -> str:
        return str(self.config["id"])

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have predictors."""
        return tuple(self.config["layers"])

    def predictor(self, kind: str, layer: int) -> Predictor:
        """The predictor of "mlp" or "heads" in a layer, in evaluation mode. Raises DataError for one not trained."""
        if layer not in self.layers:
            raise DataError(
                f"bundle {self.folder} has predictors for the layers {', '.join(map(str, self.layers))} and not for "
                f"{layer}: leave that layer dense (sparsity.dense_layers) or train its predictors too"
            )
        predictor = empty_predictor(self.config, kind, layer)
        weights = {name: self.tensors[stored] for name, stored in stored_names(self.config, kind, layer).items()}
        predictor.load_state_dict(weights, assign=True)
        return predictor.eval().requires_grad_(False)

    def tensors_of(self, kind: str, layer: int) -> dict[str, Tensor]:
        """The stored tensors of one predictor, by their names in the file."""
        return {stored: self.tensors[stored] for stored in stored_names(self.config, kind, layer).values()}

    def mean_contribution(self, kind: str, layer: int) -> Tensor:
        """Mean contribution of each unit over the training tokens, float32 (units,). DataError for an unknown layer."""
        if layer not in static_layers(self.config):
            raise DataError(
                f"bundle {self.folder} knows nothing of layer {layer}, whose contributions were not recorded: merge it "
                "with one that does"
            )
        return self.tensors[f"{kind}.{layer}.static"]

    def check_fits(self, fingerprint: str, sizes: Sizes) -> None:
        """Raise DataError, with the reason, when the bundle was trained on another model."""
        named, advice = self.config["model"], "name another with predictors=DIR, or train one for this model"
        for key in SIZES:
            own, other = self.config["anatomy"][key], getattr(sizes, key)
            if own != other:
                raise DataError(
                    f"bundle {self.folder} is for {named['name']} with {own} {key} and this model has {other}: {advice}"
                )
        if named["fingerprint"] != fingerprint:
            raise DataError(
                f"bundle {self.folder} was trained on other weights ({named['name']}, fingerprint "
                f"{named['fingerprint']}, not {fingerprint}): {advice}"
            )


def describe(
    cache: ActivationCache, config: Config, layers: Iterable[int], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a bundle trained from `cache`, without what `save_bundle` adds.

    Raises DataError when the cache does not say which documents it holds.
    """
    absent = [key for key in ("model", "corpus", "document_hashes") if key not in cache.manifest]
    if absent:
        raise DataError(f"activation cache {cache.id} does not record its {', '.join(absent)}: collect it again")
    first, others = ranks(cache.width, config.predictor)
    stream = cache.manifest.get("stream", {})  # none: the dense model's
    return {
        "model": {key: cache.manifest["model"][key] for key in ("name", "fingerprint")},
        "anatomy": {key: getattr(cache, key) for key in SIZES},
        "tap": config.predictor.tap,
        "rank": others,
        "first_rank": first,
        "norm": config.predictor.norm,
        "activation": config.predictor.activation,
        "bias": config.predictor.bias,
        "trunk": config.predictor.trunk,
        "label": config.predictor.label,
        "label_density": config.predictor.label_density,
        "weighting": config.predictor.weighting,
        "layers": list(layers),
        "static_layers": list(cache.recorded),
        "cache": cache.id,
        "corpus": cache.manifest["corpus"],
        "stream": {key: value for key, value in stream.items() if key != "document_hashes"},
        "document_hashes": sorted({*cache.manifest["document_hashes"], *stream.get("document_hashes", [])}),
        "training": asdict(config.trainer),
        "seed": config.seed,
        "metrics": dict(metrics),
    }


def static_layers(config: Mapping[str, Any]) -> list[int]:
    """Layers with statistics: all, unless the cache held some only."""
    return list(config.get("static_layers", range(config["anatomy"]["layers"])))


def stored_ranks(config: Mapping[str, Any]) -> tuple[int, int]:
    """Ranks in the first layer and in all others; older bundles have one for all."""
    return config.get("first_rank", config["rank"]), config["rank"]


def stored_name(config: Mapping[str, Any], kind: str, layer: int, name: str) -> str:
    """How a predictor's tensor is called in the file: `mlp.3.up.weight`; of a shared trunk `mlp.trunk.down.weight`."""
    shared = config.get("trunk", False) and name.startswith("down.")
    return f"{kind}.trunk.{name}" if shared else f"{kind}.{layer}.{name}"


def stored_names(config: Mapping[str, Any], kind: str, layer: int) -> dict[str, str]:
    """How each tensor of one predictor is called in the file."""
    names = empty_predictor(config, kind, layer).state_dict()
    return {name: stored_name(config, kind, layer, name) for name in names}


def empty_predictor(config: Mapping[str, Any], kind: str, layer: int) -> Predictor:
    """A predictor of the described shape without memory (on the meta device)."""
    sizes = config["anatomy"]
    units = sizes["neurons"] if kind == "mlp" else sizes["heads"]
    rank = stored_ranks(config)[min(layer, 1)]
    with torch.device("meta"):
        return Predictor(sizes["width"], units, rank, config["norm"], config["activation"], config.get("bias", True))


def save_bundle(
    folder: str | Path,
    description: Mapping[str, Any],
    predictors: Mapping[Key, Predictor],
    statistics: Mapping[Key, UnitStatistics],
) -> Bundle:
    """Write a bundle whole or not at all. Raises DataError for a folder that exists and for a write that fails.

    statistics cover every layer of the model, predictors those of `description["layers"]`.
    """
    tensors = {f"{kind}.{layer}.static": entry.mean_U for (kind, layer), entry in statistics.items()}
    for (kind, layer), predictor in predictors.items():
        tensors |= {
            stored_name(description, kind, layer, name): tensor for name, tensor in predictor.state_dict().items()
        }
    return write_bundle(folder, description, tensors)


def write_bundle(folder: str | Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Bundle:
    """Write config and tensors by rename; an id in the description, which may be another bundle's, is replaced."""
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder} exists and bundles are never changed: choose another folder, or delete this one")
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        # No metadata: its order in the file would change from process to process, and the id with it.
        save_file(tensors, partial / WEIGHTS)
        config = {**description, "format_version": FORMAT_VERSION}
        config["weights_sha256"] = file_digest(partial / WEIGHTS).hexdigest()
        config["id"] = content_id(config, partial / WEIGHTS)
        (partial / CONFIG).write_text(json.dumps(config, indent=1, allow_nan=False) + "\n", "utf-8")
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be written ({error}): make room or choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Bundle(folder, config, dict(tensors))


def discard(folder: Path) -> None:
    """Take away the bundle that a run left in its own folder before: killed after it, or forced to make it again."""
    shutil.rmtree(folder, ignore_errors=True)


def recalibrated(bundle: Bundle, folder: str | Path, calibration: Mapping[str, Any], hashes: Iterable[str]) -> Bundle:
    """A new bundle with the same tensors and this calibration; `hashes` are of the documents it was found on.

    Raises DataError as `save_bundle` does.
    """
    known = sorted({*bundle.config["document_hashes"], *hashes})
    added = {"document_hashes": known, "calibration": dict(calibration), "calibrated_from": bundle.id}
    return write_bundle(folder, bundle.config | added, bundle.tensors)


def load_bundle(folder: str | Path) -> Bundle:
    """Read and check a bundle.

    Raises DataError for a later format, for a file that is not what was saved, for layers missing or named twice, and
    for tensors of another shape than config.json says.
    """
    folder = Path(folder)
    config = read_bundle_config(folder)
    try:
        _check_content(folder, config)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{folder / WEIGHTS} cannot be read ({error}): copy the bundle again or train it again"
        ) from error
    _check_layers(folder, config)
    _check_tensors(folder, config, tensors)
    return Bundle(folder, config, tensors)


def _check_layers(folder: Path, config: Mapping[str, Any]) -> None:
    layers, count = config["layers"], config["anatomy"]["layers"]
    for layer in layers:
        if layers.count(layer) > 1 or not 0 <= layer < count:
            what = "twice" if layers.count(layer) > 1 else f"but the model has layers 0 to {count - 1}"
            raise DataError(f"{folder / CONFIG} names layer {layer} {what}: copy the bundle again or train it again")


def _check_tensors(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    expected = tensor_shapes(config)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} where config.json means {expected[name]} float32"
        for name, tensor in tensors.items()
        if name in expected and (tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32)
    ]
    if missing or unknown or wrong:
        what = [*(f"no {name}" for name in missing), *(f"an unknown {name}" for name in unknown), *wrong]
        more = f" and {len(what) - 4} more faults" if len(what) > 4 else ""
        raise DataError(f"{folder / WEIGHTS} has {', '.join(what[:4])}{more}: copy the bundle again or train it again")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a bundle."""
    found: dict[str, tuple[int, ...]] = {}
    for kind in KINDS:
        for layer in range(config["anatomy"]["layers"]):
            predictor = empty_predictor(config, kind, layer)
            if layer in static_layers(config):
                found[f"{kind}.{layer}.static"] = (predictor.units,)
            if layer in config["layers"]:
                found |= {
                    stored_name(config, kind, layer, name): tuple(t.shape) for name, t in predictor.state_dict().items()
                }
    return found


def _check_content(folder: Path, config: Mapping[str, Any]) -> None:
    if content_id(config, folder / WEIGHTS) != config["id"]:
        intact = file_digest(folder / WEIGHTS).hexdigest() == config["weights_sha256"]
        raise DataError(
            f"{folder / (CONFIG if intact else WEIGHTS)} is not what was saved (the id {config['id']} does not fit): "
            "copy the bundle again or train it again"
        )

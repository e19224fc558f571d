"""Bundles that were trained layer by layer become one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dejavu.errors import DataError
from dejavu.predictors.bundle import Bundle, write_bundle

SAME = ("model", "anatomy", "tap", "rank", "first_rank", "norm", "activation", "bias", "trunk", "label")


def merge_bundles(bundles: Sequence[Bundle], folder: str | Path) -> Bundle:
    """One bundle with the predictors of all; statistics of a layer come from the bundle that has its predictors.

    Raises DataError, with the names, for bundles that differ in more than their layers, for a layer that two of them
    have, and for layers that none has.
    """
    if not bundles:
        raise DataError("there is nothing to merge: name bundles with merge=[DIR,DIR]")
    first = bundles[0]
    for other in bundles[1:]:
        different = [key for key in SAME if other.config.get(key) != first.config.get(key)]
        if different:
            raise DataError(
                f"{other.folder} and {first.folder} differ in {', '.join(different)}: they cannot be merged"
            )
    if first.config.get("trunk") and len(bundles) > 1:
        raise DataError("bundles with a shared trunk cannot be merged: each trunk fits its own layers only")
    owners = owners_of(bundles)
    tensors: dict[str, Tensor] = {}
    for layer, bundle in owners.items():
        for kind in ("mlp", "heads"):
            tensors |= bundle.tensors_of(kind, layer)
            tensors[f"{kind}.{layer}.static"] = bundle.mean_contribution(kind, layer)
    alone = {"calibration", "calibrated_from"}  # of one bundle, as is its cache unless all came from the same
    if len({bundle.config.get("cache") for bundle in bundles}) > 1:
        alone.add("cache")
    kept = {key: value for key, value in first.config.items() if key not in alone}
    hashes = {name for bundle in bundles for name in bundle.config["document_hashes"]}
    metrics = merged_metrics([bundle.config.get("metrics", {}) for bundle in bundles])
    merged = {
        "layers": sorted(owners),
        "static_layers": sorted(owners),
        "document_hashes": sorted(hashes),
        "metrics": metrics,
    }
    return write_bundle(folder, kept | merged | {"merged_from": [bundle.id for bundle in bundles]}, tensors)


def owners_of(bundles: Sequence[Bundle]) -> dict[int, Bundle]:
    """The bundle of each layer. Raises DataError for doubled and missing layers."""
    owners: dict[int, Bundle] = {}
    for bundle in bundles:
        for layer in bundle.layers:
            if layer in owners:
                raise DataError(
                    f"layer {layer} is in {owners[layer].folder} and in {bundle.folder}: leave one of them out"
                )
            owners[layer] = bundle
    missing = [layer for layer in range(bundles[0].config["anatomy"]["layers"]) if layer not in owners]
    if missing:
        named = ",".join(map(str, missing))
        raise DataError(f"no bundle has the layers {named}: train them too (predictor.layers=[{named}])")
    return owners


def merged_metrics(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all layers, and their means anew."""
    layers = {name: entry for part in parts for name, entry in part.get("layers", {}).items()}
    if not layers:
        return {}
    from dejavu.predictors.module import mean_recalls  # imports Lightning, which takes seconds

    means = mean_recalls(layers)
    return {"layers": layers, "recall_of_mass": {kind: means[f"recall_of_mass/{kind}"] for kind in ("mlp", "heads")}}

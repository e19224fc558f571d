"""Predictor bundles for tiny models, without a cache and without training."""

from pathlib import Path
from typing import Any

import torch

from dejavu.models.anatomy import KINDS
from dejavu.models.families import anatomy
from dejavu.models.load import fingerprint
from dejavu.predictors.bundle import SIZES, Bundle, save_bundle
from dejavu.predictors.network import seeded_predictor
from dejavu.predictors.statistics import UnitStatistics


def untrained_bundle(model: Any, folder: Path, rank: int = 8, layers: list[int] | None = None) -> Bundle:
    """A bundle of that model whose predictors choose something, and whose mean contributions are random."""
    parts = anatomy(model)
    layers = list(range(parts.layers)) if layers is None else layers
    description = {
        "model": {"name": "tiny", "fingerprint": fingerprint(model)},
        "anatomy": {key: getattr(parts, key) for key in SIZES},
        "tap": "overlap", "rank": rank, "norm": True, "activation": "relu", "layers": layers,
        "cache": "none", "corpus": {"name": "noise", "hash": "0"}, "document_hashes": ["0"],
    }  # fmt: skip
    predictors = {
        (kind, layer): seeded_predictor(0, layer, parts.width, parts.units(kind), rank, True, "relu")
        for kind in KINDS
        for layer in layers
    }
    random = torch.Generator().manual_seed(0)
    statistics = {
        (kind, layer): UnitStatistics(*(torch.rand(parts.units(kind), generator=random) for _ in range(3)))
        for kind in KINDS
        for layer in range(parts.layers)
    }
    return save_bundle(folder, description, predictors, statistics)

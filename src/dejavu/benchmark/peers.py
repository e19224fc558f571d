"""Which contenders a config asks for, and the settings in which each peer is tried before it is measured."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from dejavu.benchmark.floor import BYTES, terms
from dejavu.benchmark.variants import DENSE, engine_variants, variant
from dejavu.errors import ConfigError
from dejavu.models.families import shape_of
from dejavu.models.shape import Shape
from dejavu.predictors.bundle import Bundle, load_bundle, stored_ranks
from dejavu.predictors.manifest import read_bundle_config
from dejavu.predictors.network import ranks
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import make_budget

Spec = dict[str, Any]
OVERHEAD_MB = 900  # of a process that has imported torch


def specs(
    config: Config, source: str | None, architecture: dict[str, Any], threads: int, choose: Callable[[list[Spec]], Spec]
) -> list[Spec]:
    """One spec for each process; `choose` picks a peer's best setting. Peers come in the order of the config."""
    found, shape = [], shape_of(architecture)
    bundle = load_bundle(Path(config.predictors)) if source is not None and config.predictors is not None else None
    for family in config.benchmark.contenders:
        for group in settings(family, config, shape, bundle):
            candidates = [{**base(config, source, architecture, threads), "family": family, **one} for one in group]
            for spec in candidates:
                spec["memory_mb"] = memory_mb(spec)
            found.append(choose(candidates))
    return found


def settings(family: str, config: Config, shape: Shape, bundle: Bundle | None) -> list[list[dict[str, Any]]]:
    """For each storage of a family the settings to try."""
    if family == "dejavu":
        variants = engine_variants(config, shape, bundle)
        return [[{"storage": storage, "variants": variants}] for storage in config.benchmark.storages]
    dense = [variant(shape, DENSE)]
    if family == "ctranslate2":
        # Its own choice of matrix library, and Intel's.
        environments: tuple[dict[str, str], ...] = ({}, {"CT2_USE_MKL": "1"})
        return [
            [
                {"storage": storage, "compute_type": kind, "environment": values, "variants": dense,
                 "label": f" {kind}{' MKL' if values else ''}"}
                for kind in kinds for values in environments
            ]
            for storage, kinds in (("float32", ("float32",)), ("int8", ("int8", "int8_float32")))
        ]  # fmt: skip
    attentions = ("sdpa", "eager") if family == "hf-eager" else ("sdpa",)
    return [
        [{"storage": storage, "attention": kind, "variants": dense, "label": f" {kind}"} for kind in attentions]
        for storage in ("float32", "bfloat16")
    ]


def base(config: Config, source: str | None, architecture: dict[str, Any], threads: int) -> Spec:
    """What all specs share."""
    decode, bundle = config.decode, config.predictors if source is not None else None
    read_ranks = ranks(shape_of(architecture).width, config.predictor)
    if bundle is not None:
        read_ranks = stored_ranks(read_bundle_config(bundle))
    return {
        "source": source,
        "architecture": architecture,
        "threads": threads,
        "environment": {},
        "seed": config.seed,
        "bundle": bundle,
        "ranks": read_ranks,
        "head_unit": config.sparsity.head_unit,
        "decode": {"kv": decode.kv, "window": decode.window, "overlap": decode.overlap},
    }


def memory_mb(spec: Spec) -> float:
    """About what a process takes; while a model is read from a folder it is there in float32 too."""
    shape = shape_of(spec["architecture"])
    read = spec["ranks"] if spec["family"] == "dejavu" else None
    whole, half = (make_budget(sparsity, shape) for sparsity in (DENSE, Sparsity("predictor", ratio=0.5)))
    weights = terms(shape, spec["storage"], whole, None, 0, 0).total
    weights += 0 if read is None else terms(shape, spec["storage"], half, read, 0, 0).predictors
    if spec["family"] == "ctranslate2" or not shape.tied:
        weights += shape.vocabulary * shape.width * BYTES[spec["storage"]]  # CTranslate2's head is never tied
    if spec["source"] is not None:
        weights += terms(shape, "float32", whole, None, 0, 0).total
    return OVERHEAD_MB + weights / (1 << 20)


def refuse_missing(family: str) -> None:
    """Raise ConfigError for a peer that this machine lacks."""
    if family == "ctranslate2" and find_spec("ctranslate2") is None:
        raise ConfigError("ctranslate2 is not installed: pip install 'dejavu[peers]'")
    if family == "hf-compile" and not any(map(which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise ConfigError("torch.compile needs a C++ compiler, and there is none on this machine")


def available_mb() -> float:
    """Memory that is free for use, less a reserve for the system."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024 * 0.92
    raise ConfigError("this system does not say how much memory it has: set benchmark.memory_gb")

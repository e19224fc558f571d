"""What a model costs before any of it is loaded: bytes on disk, memory of each stage, and the floor of a token.

Everything follows from the sizes in a model's config: the model is built without memory (`load.without_weights`).
Files are exact, but for a cache of encoding=sparse, whose size depends on the share of active neurons; memory and hours
are estimates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dejavu.activations.space import ACTIVE_SHARE, estimate_bytes
from dejavu.benchmark.devices import Device
from dejavu.benchmark.floor import BYTES, Terms
from dejavu.evaluation.scoring import LOGITS_AT_ONCE, TOKENS_PER_SEQUENCE
from dejavu.models.anatomy import KINDS, Anatomy
from dejavu.predictors.bundle import SIZES, tensor_shapes
from dejavu.predictors.network import ranks
from dejavu.schema import Config
from dejavu.sparsity.budget import Budget

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
ATTAINED = 0.4  # of a device's peak arithmetic in a forward pass of large batches; an assumption
DISK_GB_S = 1.0  # 10^9 bytes a second that a disk reads or writes; an assumption
POSITIONS = 512  # cached, for a token's floor


@dataclass(frozen=True)
class Sized:
    """A model without weights, and the type in which its weights are published."""

    model: Any
    anatomy: Anatomy
    stored: torch.dtype

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def file_bytes(self) -> int:
        """Of the weights on disk, whatever number of files they are in."""
        return self.parameters * self.stored.itemsize

    @property
    def embedding(self) -> int:
        """Weights of the output embedding."""
        return int(self.model.get_output_embeddings().weight.numel())


def cache_bytes(anatomy: Anatomy, config: Config) -> int:
    """The files that `dejavu collect` writes with this config."""
    collect, tokens = config.collect, config.corpus.tokens
    block = min(config.corpus.block, anatomy.context)
    share = config.model.active_share or ACTIVE_SHARE
    return estimate_bytes(
        anatomy, tokens // block * block, collect.encoding, collect.top, share, recorded=collect.layers
    )


def predictor_weights(anatomy: Anatomy, config: Config) -> dict[str, int]:
    """Numbers in a bundle by the beginning of their names: "mlp.3" a predictor's, "static" the means of all layers'."""
    sizes: dict[str, int] = {}
    for name, shape in tensor_shapes(bundle_settings(anatomy, config)).items():
        owner = "static" if name.endswith(".static") else ".".join(name.split(".")[:2])
        sizes[owner] = sizes.get(owner, 0) + math.prod(shape)
    return sizes


def bundle_settings(anatomy: Anatomy, config: Config) -> Mapping[str, Any]:
    """What config.json of a bundle says of shapes."""
    predictor = config.predictor
    first, others = ranks(anatomy.width, predictor)
    return {
        "anatomy": {key: getattr(anatomy, key) for key in SIZES},
        "rank": others, "first_rank": first,
        "norm": predictor.norm, "activation": predictor.activation, "bias": predictor.bias, "trunk": predictor.trunk,
        "layers": list(range(anatomy.layers)) if predictor.layers is None else predictor.layers,
    }  # fmt: skip


def bundle_bytes(anatomy: Anatomy, config: Config) -> int:
    """predictors.safetensors of `dejavu train`: float32 and a header; config.json has a line a document on top."""
    header = 80 * len(tensor_shapes(bundle_settings(anatomy, config)))
    return 4 * sum(predictor_weights(anatomy, config).values()) + header


def memory(sized: Sized, config: Config) -> dict[str, int]:
    """Bytes that each stage needs at once, about: weights, one batch's activations in one block, predictors."""
    parts, width = sized.anatomy, WIDTH[config.dtype]
    loaded = sized.parameters * width
    neurons = parts.neurons * (3 if parts.gated else 2)
    batch = config.batch_size * min(config.corpus.block, parts.context)
    scored = config.batch_size * TOKENS_PER_SEQUENCE
    trained = sum(predictor_weights(parts, config).values())
    seen = 4 * parts.neurons + parts.neurons  # contributions in float32, and what is chosen of them
    logits = min(LOGITS_AT_ONCE, scored * sized.model.config.vocab_size)

    def passing(tokens: int) -> int:
        return tokens * (width * (neurons + 8 * parts.width) + seen)

    packed = round((sized.parameters + trained) * BYTES[config.decode.storage])
    keys = parts.layers * 2 * POSITIONS * parts.kv_heads * parts.head_dim * 4
    return {
        "collect": loaded + passing(batch) + 6 * batch * parts.neurons,
        "train": 4 * 4 * trained + 4 * config.trainer.batch_tokens * (parts.width + 2 * parts.neurons),
        "evaluate": loaded + passing(scored) + 2 * 4 * logits + 4 * trained,
        "generate": max(loaded, packed) + packed // parts.layers + keys,
    }


def token_terms(sized: Sized, config: Config, budget: Budget, width: int, positions: int = POSITIONS) -> Terms:
    """Bytes that decoding one token reads, with weights, keys and values of `width` bytes a number.

    body of the units kept, predictors of the half blocks in which some are left out, output embedding, keys and values
    of the heads kept at `positions`.
    """
    parts, weights = sized.anatomy, predictor_weights(sized.anatomy, config)
    body = sum(count * parts.unit_weights(kind) for kind in KINDS for count in budget.of(kind))
    asked = {
        owner
        for kind in KINDS
        for layer, count in enumerate(budget.of(kind))
        for owner in (f"{kind}.{layer}", f"{kind}.trunk")
        if count < parts.units(kind)
    }
    kept_pairs = sum(budget.heads) * parts.kv_heads / parts.heads
    return Terms(
        body=round(body * width),
        predictors=width * sum(weights.get(owner, 0) for owner in asked),
        embedding=sized.embedding * width,
        cache=round(2 * kept_pairs * parts.head_dim * positions * width),
    )


def hours(sized: Sized, config: Config, device: Device) -> dict[str, float]:
    """Hours of each stage, about, evaluate's for a million tokens; {} for a device whose arithmetic is not known.

    Arithmetic at `ATTAINED` of one device's peak, since layers on several run one after another (`model.device_map`):
    more devices hold more and are not faster. The cache is written once, and read once an epoch, at `DISK_GB_S`.
    """
    if device.tflops is None:
        return {}
    rate, tokens = ATTAINED * device.tflops * 1e12 * 3600, config.corpus.tokens
    disk = cache_bytes(sized.anatomy, config) / (DISK_GB_S * 1e9) / 3600
    trained = sum(predictor_weights(sized.anatomy, config).values())
    return {
        "collect": 2 * sized.parameters * tokens / rate + disk,
        "train": config.trainer.epochs * (6 * trained * tokens / rate + disk),  # forward, and twice that backward
        "evaluate": 2 * sized.parameters * 1e6 / rate,
    }

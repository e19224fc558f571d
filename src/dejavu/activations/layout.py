"""Which files an activation cache consists of: the one table that writer, reader and estimate share.

Plain little-endian numbers without headers, one row per token, so that appending is all that writing needs.

    residual.LL.f16   (N, width)    r_l, the residual handed to block LL
    middle.LL.f16     (N, width)    m_l, the residual that the MLP half adds back
    heads.LL.f16      (N, heads)    contribution of every head
    mlp.LL.f16        (N, neurons)  contribution of every neuron (encoding dense), or
    mlp.count.LL.u16  (N)           how many are stored of each token (encodings sparse and top), with
    mlp.index.LL.u16  (stored)      their neurons, ascending within a token, and
    mlp.value.LL.f16  (stored)      their contributions
    document.u32, token.u32, position.u16 or .u32   (N) each
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejavu.errors import ConfigError, DataError
from dejavu.models.anatomy import Anatomy
from dejavu.models.topk import kept

SIZES = ("layers", "width", "neurons", "heads")  # fields of Anatomy and keys of every manifest
COMPRESSED = ("mlp.count", "mlp.index", "mlp.value")  # kinds of file, in the order that encode.compressed returns
FURTHEST_TAP = 2  # layers back that a tap may lie (models/taps.py)
MOST_NEURONS = 1 << 16  # what an index of 16 bits reaches
DTYPES = {suffix: np.dtype(code) for suffix, code in (("f16", "<f2"), ("u16", "<u2"), ("u32", "<u4"))}


@dataclass(frozen=True)
class Stream:
    """One file: `columns` numbers per token, or None where their number varies with the token."""

    name: str
    columns: int | None
    meaning: str  # for messages

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.name.rsplit(".", 1)[1]]

    def size(self, tokens: int) -> int | None:
        """Bytes that `tokens` tokens fill, None where that depends on the tokens."""
        return None if self.columns is None else tokens * self.columns * self.dtype.itemsize


def streams(head: Mapping[str, Any]) -> dict[str, Stream]:
    """Every file of a cache by name, from the sizes in its manifest or manifest head.

    Raises DataError for a model with more neurons than 16 bits number.
    """
    if head["neurons"] > MOST_NEURONS:
        raise DataError(
            f"the model has {head['neurons']:,} neurons a layer and the activation cache numbers at most "
            f"{MOST_NEURONS:,}: choose a smaller model"
        )
    found = [
        Stream("document.u32", 1, "the document numbers"),
        Stream("token.u32", 1, "the token ids"),
        Stream(position_file(head["block"]), 1, "the positions"),
    ]
    recorded = recorded_layers(head)
    for layer in tapped_layers(recorded):
        found += [
            Stream(layer_file("residual", layer), head["width"], f"the residual r of layer {layer}"),
            Stream(layer_file("middle", layer), head["width"], f"the residual m of layer {layer}"),
        ]
    for layer in recorded:
        found += [
            Stream(layer_file("heads", layer), head["heads"], f"the head contributions of layer {layer}"),
            *_mlp_streams(layer, head["neurons"], head["encoding"]),
        ]
    return {stream.name: stream for stream in found}


def recorded_layers(head: Mapping[str, Any]) -> list[int]:
    """The layers whose contributions a cache holds, ascending: all, unless `collect.layers` named some."""
    chosen = head.get("recorded")
    return list(range(head["layers"])) if chosen is None else list(chosen)


def tapped_layers(recorded: Sequence[int]) -> list[int]:
    """The layers whose residuals are kept: whatever tap predictors of the recorded layers read, it is among them."""
    return sorted({max(0, layer - back) for layer in recorded for back in range(FURTHEST_TAP + 1)} | {0})


def layer_file(kind: str, layer: int) -> str:
    """Name of a layer's file: kind is residual, middle, heads, mlp, mlp.count, mlp.index or mlp.value."""
    return f"{kind}.{layer:02d}.{'u16' if kind in ('mlp.count', 'mlp.index') else 'f16'}"


def position_file(block: int) -> str:
    """Name of the file with the positions of tokens in blocks of a length."""
    return "position.u16" if block <= 1 << 16 else "position.u32"


def resolve_encoding(encoding: str, anatomy: Anatomy) -> str:
    """How the contributions of neurons are stored; `auto` is sparse for ReLU and top for others.

    Raises ConfigError for sparse without ReLU, which would store everything at twice the size.
    """
    if encoding == "auto":
        return "sparse" if anatomy.relu else "top"
    if encoding == "sparse" and not anatomy.relu:
        raise ConfigError(
            f"collect.encoding=sparse needs neurons that are exactly 0 when inactive and this {anatomy.family} model "
            "has others: use top or dense"
        )
    return encoding


def kept_neurons(encoding: str, top: float | None, neurons: int) -> int:
    """The most neurons of a token that are stored: all, or under encoding=top its share, at least 1."""
    return kept(1 - top, neurons) if encoding == "top" and top is not None else neurons


def _mlp_streams(layer: int, neurons: int, encoding: str) -> list[Stream]:
    meaning = f"the neuron contributions of layer {layer}"
    if encoding == "dense":
        return [Stream(layer_file("mlp", layer), neurons, meaning)]
    return [Stream(layer_file(kind, layer), 1 if kind == "mlp.count" else None, meaning) for kind in COMPRESSED]

"""activity.parquet: what a cache says about why contextual sparsity works, kept beside it and small enough to share.

One row per measure, kind of unit, layer and x:

    measure    kind      variant             x               value
    overlap    any unit  same text           tokens apart    share of a token's active set that was active there too
    overlap    any unit  other text          NaN             the same for tokens of different documents
    frequency  any unit                      share of units  share of tokens in whose set it is, the hottest unit first
    mass       any unit  fixed set, own set  share of units  share of the recorded contribution that they carry
    union      any unit  batch, text         tokens          share of units in the union of their sets
    cosine     residual  raw, centred        blocks ahead    cosine of r_layer and r_{layer + x}
    tap        any unit  overlap, previous   NaN             cosine of the tap and of what tap `direct` reads

Units are of kind mlp (neurons) or heads. `value` is a mean over tokens; `low` and `high` are quartiles of the cosines.
`centred` takes the mean over the tokens off first: residuals share a large one, which alone makes raw cosines high.

Shape suffixes: N tokens, D width, U units.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dejavu.activations.cache import ActivationCache
from dejavu.activations.layout import tapped_layers
from dejavu.analysis.active_sets import active_sets, overlap, share_of_mass, union_of_batch, unions_of_text
from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.taps import TapSource, tap_source
from dejavu.tracking.files import by_rename

FILE = "activity.parquet"
SHARE = 0.25  # of the units, at most, that an active set has
TOKENS, STRETCH = 4096, 128  # tokens that are looked at, in stretches of consecutive ones spread over the cache
MOST = 1 << 23  # contributions of a layer in memory at a time
APART = [1, 2, 4, 8, 16, 32, 64]
BATCHES = [1, 2, 4, 8, 16, 32, 64]
AHEAD = [1, 2, 4]
POINTS = 64  # of a curve over the units
COLUMNS = {
    "measure": "str", "kind": "str", "variant": "str", "layer": "int64", "x": "float64", "value": "float64",
    "low": "float64", "high": "float64",
}  # fmt: skip

Array = np.ndarray
Row = dict[str, Any]


def read_activity(folder: Path | str) -> pd.DataFrame:
    """The table of a collect's folder. Raises DataError when there is none."""
    path = Path(folder) / FILE
    try:
        return pd.read_parquet(path).astype(COLUMNS)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is missing or damaged: `dejavu collect` makes it") from error


def write_activity(folder: Path | str) -> Path:
    """Measure the cache in a collect's folder and write the table beside it. Raises as ActivationCache does."""
    path = Path(folder) / FILE
    table = activity(ActivationCache(Path(folder) / "cache"))
    by_rename(path, lambda partial: table.to_parquet(partial, index=False, compression="zstd"))
    return path


def activity(cache: ActivationCache, share: float = SHARE) -> pd.DataFrame:
    """The table, over a sample of the cache's tokens; what it needs in memory does not grow with the cache."""
    rows = sample(cache.tokens, min(TOKENS, MOST // cache.neurons))
    text_N = stretches(cache, rows)
    found: list[Row] = []
    for layer in cache.recorded:
        for kind, c_NU in (("mlp", cache.mlp(layer, rows)), ("heads", cache.heads_of(layer, rows))):
            found += [
                {"kind": kind, "layer": layer} | row
                for row in of_units(c_NU, share, text_N, np.asarray(cache.documents[rows]))
            ]
    found += of_residuals(cache, rows)
    return pd.DataFrame(found, columns=list(COLUMNS)).fillna({"variant": ""}).astype(COLUMNS)


def sample(tokens: int, wanted: int) -> Array:
    """Row numbers of a cache, ascending: stretches of consecutive rows, evenly spread; all where there are no more."""
    if tokens <= max(wanted, STRETCH):
        return np.arange(tokens)
    count = max(1, wanted // STRETCH)
    starts = np.linspace(0, tokens - STRETCH, count).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(STRETCH))


def stretches(cache: ActivationCache, rows: Array) -> Array:
    """Number of the stretch each row is in (N,): one ends where rows, document or block of positions do."""
    steps = [np.diff(rows), np.diff(cache.positions[rows].astype(np.int64)), np.diff(cache.documents[rows]) + 1]
    return np.concatenate([[0], np.cumsum(np.any([step != 1 for step in steps], axis=0))])


def of_units(c_NU: Array, share: float, text_N: Array, documents_N: Array) -> Iterator[Row]:
    """All measures of one kind of unit in one layer, from contributions."""
    active_NU = active_sets(c_NU, share)
    yield from overlaps(active_NU, text_N, documents_N)
    yield from curves(active_NU, c_NU)
    yield from unions(active_NU, text_N)


def overlaps(active_NU: Array, text_N: Array, documents_N: Array) -> Iterator[Row]:
    """With a token some places earlier in the same text, and with one of another document."""
    place_N = np.arange(len(active_NU))
    for apart in APART:
        earlier_M = place_N[:-apart][text_N[:-apart] == text_N[apart:]]
        value = overlap(active_NU, earlier_M, earlier_M + apart)
        yield {"measure": "overlap", "variant": "same text", "x": apart, "value": value}
    far_N = np.roll(place_N, len(place_N) // 2)
    other_N = documents_N[far_N] != documents_N
    yield {
        "measure": "overlap", "variant": "other text", "value": overlap(active_NU, far_N[other_N], place_N[other_N])
    }  # fmt: skip


def curves(active_NU: Array, c_NU: Array) -> Iterator[Row]:
    """Over the units: how often each is active, what share of the contribution the first of them carry."""
    units = active_NU.shape[1]
    frequency_U = -np.sort(-active_NU.mean(axis=0))
    fixed_U, own_U = share_of_mass(c_NU)
    for count in np.unique(np.linspace(1, units, min(units, POINTS)).round().astype(int)):
        x = count / units
        yield {"measure": "frequency", "x": x, "value": frequency_U[count - 1]}
        yield {"measure": "mass", "variant": "fixed set", "x": x, "value": fixed_U[count - 1]}
        yield {"measure": "mass", "variant": "own set", "x": x, "value": own_U[count - 1]}


def unions(active_NU: Array, text_N: Array) -> Iterator[Row]:
    """Of the sets of consecutive tokens, and of as many from anywhere."""
    tokens, frequency_U = len(active_NU), active_NU.mean(axis=0)
    for size, value in unions_of_text(active_NU, text_N, BATCHES).items():
        yield {"measure": "union", "variant": "text", "x": size, "value": value}
        if size <= tokens:
            value = union_of_batch(frequency_U, tokens, size)
            yield {"measure": "union", "variant": "batch", "x": size, "value": value}


def of_residuals(cache: ActivationCache, rows: Array) -> Iterator[Row]:
    """Cosines between residuals blocks apart, and between what a tap gives and what the layer itself reads."""
    layers = tapped_layers(cache.recorded)
    for layer in layers:
        for ahead in (ahead for ahead in AHEAD if layer + ahead in layers):
            pair = [cache.tap(TapSource("residual", at), rows).astype(np.float32) for at in (layer, layer + ahead)]
            here = {"measure": "cosine", "kind": "residual", "layer": layer, "x": ahead}
            yield here | {"variant": "raw"} | cosine(*pair)
            yield here | {"variant": "centred"} | cosine(*(each_ND - each_ND.mean(axis=0) for each_ND in pair))
    for layer in cache.recorded:
        for kind in KINDS:
            read_ND = cache.tap(tap_source("direct", kind, layer), rows)
            for tap in ("overlap", "previous"):
                here = {"measure": "tap", "kind": kind, "layer": layer, "variant": tap}
                yield here | cosine(read_ND, cache.tap(tap_source(tap, kind, layer), rows))


def cosine(a_ND: Array, b_ND: Array) -> dict[str, float]:
    """Mean and quartiles over tokens of the cosine of two tensors."""
    a_ND, b_ND = a_ND.astype(np.float32), b_ND.astype(np.float32)
    lengths_N = np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1)
    cosine_N = (a_ND * b_ND).sum(axis=1) / np.maximum(lengths_N, np.finfo(np.float32).tiny)
    low, high = np.percentile(cosine_N, [25, 75])
    return {"value": float(cosine_N.mean()), "low": float(low), "high": float(high)}

"""Run a model over token blocks and record it: the dense one, or one with units left out.

Shape suffixes: N blocks, T tokens of a block, B blocks of a batch, V vocabulary.
"""

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu.activations.layout import SIZES, position_file, resolve_encoding
from dejavu.activations.recorder import Recorder
from dejavu.activations.writer import CacheWriter
from dejavu.errors import ConfigError, DataError
from dejavu.models.load import LoadedModel
from dejavu.models.observe import observed
from dejavu.schema import Collect

Masked = Callable[[Tensor], AbstractContextManager[Any]]  # by which of the N tokens are no padding
PLAIN_BATCHES = 4  # run a second time without hooks, to know what recording costs


def check_layers(layers: list[int] | None, count: int, key: str) -> list[int] | None:
    """The layers that a key of the config names, ascending; None for none named.

    Raises ConfigError for a layer that does not exist or is named twice.
    """
    if layers is None:
        return None
    wrong = [layer for layer in layers if not 0 <= layer < count or layers.count(layer) > 1]
    if wrong or not layers:
        what = f"names {wrong[0]}, which is doubled or does not exist" if wrong else "is empty"
        raise ConfigError(f"{key}={layers} {what}: the model has layers 0 to {count - 1}")
    return sorted(layers)


def whole(kept_N: Tensor) -> AbstractContextManager[Any]:
    """Leaves nothing out."""
    return nullcontext()


def cache_head(
    loaded: LoadedModel, blocks_NT: np.ndarray, documents_NT: np.ndarray, batch_size: int, settings: Collect
) -> dict[str, Any]:
    """What makes a cache this one and no other: the manifest head for CacheWriter, to which more keys may be added.

    The batch size is part of it, since matrix products of another shape round differently. Raises ConfigError for an
    encoding that does not suit the model.
    """
    anatomy, encoding = loaded.anatomy, resolve_encoding(settings.encoding, loaded.anatomy)
    digest = hashlib.sha256()
    for array_NT in (blocks_NT, documents_NT):
        digest.update(array_NT.astype("<i4").tobytes())
    return {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        **{key: getattr(anatomy, key) for key in ("family", *SIZES)},
        "recorded": check_layers(settings.layers, anatomy.layers, "collect.layers"),
        "encoding": encoding,
        "top": settings.top if encoding == "top" else None,
        "block": blocks_NT.shape[1],
        "batch_size": batch_size,
        "input": digest.hexdigest()[:16],
    }


def collect(
    loaded: LoadedModel,
    blocks_NT: np.ndarray,
    documents_NT: np.ndarray,
    writer: CacheWriter,
    batch_size: int,
    settings: Collect,
    progress: Callable[[int, int], None] | None = None,
    masked: Masked = whole,
) -> dict[str, float | None]:
    """Record all blocks that the writer does not have yet, in order; `writer.finish()` is the caller's.

    blocks_NT     token ids
    documents_NT  number of each token's document; below 0 for padding, which ends a block and is not recorded
    progress      called with (batches done, batches in all) after each batch
    masked        leaves units out while its context lasts; what is recorded is that stream, and of each layer what
                  all its units would contribute to it

    Returns what this call did: tokens, seconds, tokens_per_second, plain_tokens_per_second (up to 4 batches run again
    without hooks, each right after it was recorded), speed_ratio (of recording to plain on those batches) and
    bytes_per_token (of the whole cache). Rates and ratio are None when nothing was left to do.
    Raises DataError for NaN in the logits and for blocks that do not fit the model, and all that CacheWriter raises.
    """
    _check_blocks(loaded, blocks_NT, documents_NT)
    _check_writer(writer, cache_head(loaded, blocks_NT, documents_NT, batch_size, settings))
    plan = [slice(first, first + batch_size) for first in range(0, len(blocks_NT), batch_size)]
    todo = range(writer.batches_done, len(plan))
    compared = _spread(todo, PLAIN_BATCHES)
    recorded, paired, plain = Pace(), Pace(), Pace()
    recorder = Recorder(loaded.anatomy, writer)
    for number in todo:
        batch = Batch(blocks_NT[plan[number]], documents_NT[plan[number]])
        seconds = _timed(_record, loaded, batch, recorder, writer, masked)
        recorded.add(batch.tokens, seconds)
        if number in compared:
            paired.add(batch.tokens, seconds)
            plain.add(batch.tokens, _timed(_forward, loaded, batch))
        if progress is not None:
            progress(number + 1, len(plan))
    return {
        "tokens": recorded.tokens,
        "seconds": recorded.seconds,
        "tokens_per_second": recorded.rate,
        "plain_tokens_per_second": plain.rate,
        "speed_ratio": plain.seconds / paired.seconds if paired.seconds else None,
        "bytes_per_token": sum(writer.sizes.values()) / max(1, writer.tokens),
    }


@dataclass
class Pace:
    """Tokens and the seconds they took."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def rate(self) -> float | None:
        """Tokens per second, None before any."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Batch:
    """A batch of blocks; padding has a document number below 0."""

    blocks_BT: np.ndarray
    documents_BT: np.ndarray

    @property
    def keep_BT(self) -> np.ndarray:
        return self.documents_BT >= 0

    @property
    def tokens(self) -> int:
        return int(self.keep_BT.sum())


def _record(loaded: LoadedModel, batch: Batch, recorder: Recorder, writer: CacheWriter, masked: Masked) -> None:
    keep_BT = batch.keep_BT
    kept_BT = torch.from_numpy(keep_BT).to(loaded.device)
    recorder.begin(None if keep_BT.all() else kept_BT)
    # The recorder first: it sees each layer's units before any of them is left out.
    with observed(loaded.anatomy, recorder), masked(kept_BT.reshape(-1)):
        _forward(loaded, batch)
    columns = {
        "document.u32": batch.documents_BT,
        "token.u32": batch.blocks_BT,
        position_file(keep_BT.shape[1]): np.broadcast_to(np.arange(keep_BT.shape[1]), keep_BT.shape),
    }
    for name, values_BT in columns.items():
        writer.append(name, values_BT[keep_BT].astype(writer.streams[name].dtype))
    writer.commit()


@torch.inference_mode()
def _forward(loaded: LoadedModel, batch: Batch) -> None:
    """One pass of the model as it is. Raises DataError for NaN in the logits of a block's last token."""
    keep_BT = torch.from_numpy(batch.keep_BT).to(loaded.device)
    # A mask, even one of ones, keeps attention from its fast causal path.
    padding = {} if batch.keep_BT.all() else {"attention_mask": keep_BT.long()}
    ids_BT = torch.from_numpy(batch.blocks_BT.astype(np.int64)).to(loaded.device)
    logits_B1V: Tensor = loaded.model(input_ids=ids_BT, use_cache=False, logits_to_keep=1, **padding).logits
    if logits_B1V[keep_BT[:, -1]].isnan().any():
        raise DataError(
            f"the logits of {loaded.name} are NaN: check its weights, or load it with dtype=float32 instead of "
            f"{loaded.model.dtype}"
        )


def _timed(work: Callable[..., None], *args: Any) -> float:
    started = time.perf_counter()
    work(*args)
    return time.perf_counter() - started


def _spread(numbers: range, count: int) -> set[int]:
    """At most `count` of the numbers, evenly spread; not the first of several, which pays for warming up."""
    rest = numbers[1:] if len(numbers) > 1 else numbers
    return {rest[place * len(rest) // count] for place in range(count)} if len(rest) else set()


def _check_blocks(loaded: LoadedModel, blocks_NT: np.ndarray, documents_NT: np.ndarray) -> None:
    if blocks_NT.shape != documents_NT.shape or blocks_NT.ndim != 2:
        raise ValueError(
            f"blocks {blocks_NT.shape} and documents {documents_NT.shape} must have one shape (blocks, tokens)"
        )
    if not (documents_NT >= 0).any():
        raise DataError("the corpus fills no block: raise corpus.tokens or lower corpus.block")
    if blocks_NT.shape[1] > loaded.anatomy.context:
        raise DataError(
            f"blocks of {blocks_NT.shape[1]} tokens are longer than the {loaded.anatomy.context} that {loaded.name} "
            "can read: lower corpus.block"
        )
    if (np.diff((documents_NT >= 0).astype(np.int8), axis=1) > 0).any():
        raise ValueError("padding (document numbers below 0) must stand at the end of a block")


def _check_writer(writer: CacheWriter, head: dict[str, Any]) -> None:
    wrong = [key for key, value in head.items() if writer.head.get(key) != value]
    if wrong:
        raise ValueError(f"the writer was opened for a cache of another {', '.join(wrong)}: use cache_head")

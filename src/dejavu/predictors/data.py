"""Batches for training predictors, read from an activation cache as they are needed.

Neighbouring tokens share a document, so a split by token would test on what was trained: the split is by document.
Within the training side, runs of 32 consecutive tokens are shuffled, since a disk reads runs and not single rows.

Shape suffixes: N tokens of a batch, D width, U units; M rows of the cache.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dejavu.activations.cache import ActivationCache
from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.taps import tap_source
from dejavu.predictors.statistics import Key, contributions
from dejavu.schema import Trainer

RUN = 32  # consecutive tokens that stay together


class Batch(Mapping[Key, tuple[Tensor, Tensor]]):
    """(kind, layer) -> (tap float32 (N, D), contributions float32 (N, U)), read when asked for: one layer at a time.

    A step over all layers of a large model would otherwise hold gigabytes.
    """

    def __init__(self, cache: ActivationCache, keys: Sequence[Key], tap: str, rows_N: np.ndarray) -> None:
        self.cache, self._keys, self.tap, self.rows_N = cache, keys, tap, rows_N

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        tap_ND = self.cache.tap(tap_source(self.tap, *key), self.rows_N)
        c_NU = contributions(self.cache, key, self.rows_N)
        return torch.from_numpy(tap_ND.astype(np.float32)), torch.from_numpy(c_NU)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tokens(self) -> int:
        return len(self.rows_N)


class CacheRows(Dataset):
    """Indexed by rows of the cache, not by number: what is read together is the sampler's business."""

    def __init__(self, cache: ActivationCache, keys: Sequence[Key], tap: str) -> None:
        self.cache, self.keys, self.tap = cache, keys, tap

    def __getitem__(self, rows_N: np.ndarray) -> Batch:
        return Batch(self.cache, self.keys, self.tap, rows_N)


class ShuffledRuns(Sampler[np.ndarray]):
    """Batches of about `batch_tokens` rows in an order that depends on (seed, epoch) alone; Lightning sets the epoch.

    The runs are spread evenly over the batches, so that no epoch ends with a step on a handful of tokens. Of several
    processes each gets its part of every batch.
    """

    def __init__(self, rows_M: np.ndarray, batch_tokens: int, seed: int) -> None:
        length = min(RUN, batch_tokens)
        self.starts, self.lengths = runs(rows_M, length)
        self.batches = math.ceil(len(self.starts) / (batch_tokens // length))
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.starts))
        for places in np.array_split(order, self.batches):
            places = np.sort(places)
            yield own_part(np.concatenate([np.arange(self.lengths[at]) + self.starts[at] for at in places]))


class CacheData(pl.LightningDataModule):
    """Training and held-out rows of a cache, and the loaders over them.

    Raises DataError when the cache has a single document, so that none can be held out.
    """

    def __init__(self, cache: ActivationCache, layers: Sequence[int], tap: str, settings: Trainer, seed: int) -> None:
        super().__init__()
        self.train_rows, self.held_out_rows = split_rows(cache, settings.held_out)
        self.rows = CacheRows(cache, [(kind, layer) for kind in KINDS for layer in layers], tap)
        self.batch_tokens = settings.batch_tokens
        self.sampler = ShuffledRuns(self.train_rows, settings.batch_tokens, seed)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=None, sampler=self.sampler, collate_fn=_as_it_is)

    def val_dataloader(self) -> DataLoader:
        batches = math.ceil(len(self.held_out_rows) / self.batch_tokens)
        parts: Any = [own_part(rows) for rows in np.array_split(self.held_out_rows, batches)]
        return DataLoader(self.rows, batch_size=None, sampler=parts, collate_fn=_as_it_is)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """A batch is read later, layer by layer: the module moves what it reads."""
        return batch


def own_part(rows_N: np.ndarray) -> np.ndarray:
    """The rows of a batch that this process works on: all, but for several that train together."""
    if not (dist.is_available() and dist.is_initialized()):
        return rows_N
    return np.array_split(rows_N, dist.get_world_size())[dist.get_rank()]


def split_rows(cache: ActivationCache, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, held-out rows), ascending: whole documents, at least one on each side.

    Which documents are held out depends on their content alone, and equal texts stay on one side.
    """
    numbers, document_M = np.unique(np.asarray(cache.documents), return_inverse=True)
    hashes = cache.manifest.get("document_hashes") or []
    # A second hash: corpora are themselves cut by the first, so its lowest values may be missing.
    names = [hashes[number] if number < len(hashes) else str(number) for number in numbers.tolist()]
    ranks = [hashlib.sha256(f"held out {name}".encode()).hexdigest() for name in names]
    ordered = sorted(set(ranks))
    if len(ordered) < 2:
        raise DataError(
            f"activation cache {cache.id} has {len(ordered)} documents and training needs at least 2, one of them held "
            "out: raise corpus.tokens or use another corpus"
        )
    count = min(max(1, math.floor(held_out * len(ordered) + 0.5)), len(ordered) - 1)
    chosen = set(ordered[:count])
    is_held_out_M = np.array([rank in chosen for rank in ranks])[document_M]
    return np.flatnonzero(~is_held_out_M), np.flatnonzero(is_held_out_M)


def runs(rows_M: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut ascending rows into runs of consecutive rows, at most `length` each: (first rows, lengths)."""
    stretch_M = np.flatnonzero(np.diff(rows_M, prepend=-2) != 1)  # where each unbroken stretch begins
    sizes = np.diff(stretch_M, append=len(rows_M))
    within_M = np.arange(len(rows_M)) - np.repeat(stretch_M, sizes)
    first = np.flatnonzero(within_M % length == 0)
    return rows_M[first], np.diff(first, append=len(rows_M))


def _as_it_is(batch: Any) -> Any:
    return batch

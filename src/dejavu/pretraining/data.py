"""The order in which the training text is read: a function of (seed, step) alone, so a resumed run reads the same."""

from collections.abc import Iterator

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dejavu.corpora.blocks import pack


class BlockStream(IterableDataset):
    """Endless batches of token blocks. Documents and blocks are shuffled anew each epoch; `start` skips batches."""

    def __init__(self, documents: list[np.ndarray], length: int, batch: int, seed: int, start: int = 0) -> None:
        self.documents, self.length, self.batch, self.seed, self.start = documents, length, batch, seed, start

    def epoch_blocks(self, epoch: int) -> np.ndarray:
        """All blocks of one epoch in training order, (blocks, length)."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.documents))
        blocks_NT, _ = pack((self.documents[number] for number in order), self.length)
        return blocks_NT[random.permutation(len(blocks_NT))]

    def __iter__(self) -> Iterator[torch.Tensor]:
        epoch, skip = 0, self.start
        while True:
            blocks_NT = self.epoch_blocks(epoch)
            batches = len(blocks_NT) // self.batch
            if batches == 0:
                raise ValueError(f"the training text has {len(blocks_NT)} blocks, fewer than one batch of {self.batch}")
            for index in range(skip, batches):
                yield torch.from_numpy(blocks_NT[index * self.batch : (index + 1) * self.batch].astype(np.int64))
            epoch, skip = epoch + 1, max(0, skip - batches)


class PretrainingData(pl.LightningDataModule):
    """Training stream and held-out blocks. `start_step` is set from the checkpoint when a run goes on."""

    def __init__(
        self, train: list[np.ndarray], held_out: list[np.ndarray], length: int, batch: int, seed: int, start_step: int
    ) -> None:
        super().__init__()
        self.stream = BlockStream(train, length, batch, seed, start_step)
        self.held_out_blocks = pack(held_out, length)[0].astype(np.int64)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.stream, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.from_numpy(self.held_out_blocks)), batch_size=8)

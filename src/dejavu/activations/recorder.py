"""What is recorded of a forward pass: at every block the two residuals and the contributions of heads and neurons.

Shape suffixes: B sequences, T time, R rows (all tokens of a batch), N rows kept (no padding), D width, H heads,
K head_dim, E = heads * head_dim, F neurons.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
from torch import Tensor

from dejavu.activations.encode import compressed
from dejavu.activations.layout import COMPRESSED, kept_neurons, layer_file
from dejavu.activations.writer import CacheWriter
from dejavu.models.anatomy import Anatomy
from dejavu.models.contribution import Contributions
from dejavu.models.observe import Observer

MOST_THREADS = 8  # disks do not take more


class Recorder(Observer):
    """Hands each layer to the writer as the model leaves it. A context manager; call `begin` before each pass.

    Packing and writing are single-threaded work that leaves Python's lock alone, so a layer's are spread over the cores
    while the model waits. Beside the model they would be a third party to its two threads: each parallel loop ends with
    its slowest thread, and on two cores recording was then 20 times slower than the model alone.
    """

    def __init__(self, anatomy: Anatomy, writer: CacheWriter) -> None:
        self.anatomy = anatomy
        self.writer = writer
        self.dense = writer.head["encoding"] == "dense"
        self.most = kept_neurons(writer.head["encoding"], writer.head["top"], anatomy.neurons)
        self.contributions = Contributions(anatomy)
        self._cores = min(MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._cores)
        self._rows_N: Tensor | None = None
        self._seen: dict[str, list[np.ndarray]] = {}  # file -> rows of the layer that the model is in

    def begin(self, keep_BT: Tensor | None) -> None:
        """Which tokens of the coming pass are recorded, bool (B, T), False for padding; None: all of them."""
        self._rows_N = None if keep_BT is None else keep_BT.reshape(-1).nonzero().view(-1)
        self._seen.clear()

    def residual(self, layer: int, residual_RD: Tensor) -> None:
        self._see(layer_file("residual", layer), self._kept(residual_RD))

    def heads(self, layer: int, heads_RE: Tensor) -> None:
        heads_NHK = self._kept(heads_RE).unflatten(1, (self.anatomy.heads, self.anatomy.head_dim))
        self._see(layer_file("heads", layer), self.contributions.of_heads(layer, heads_NHK))

    def middle(self, layer: int, middle_RD: Tensor) -> None:
        self._see(layer_file("middle", layer), self._kept(middle_RD))

    def neurons(self, layer: int, activations_RF: Tensor) -> None:
        """The last point of a block, so all of it is written here."""
        c_NF = self.contributions.of_neurons(layer, self._kept(activations_RF))
        if self.dense:
            self._see(layer_file("mlp", layer), c_NF)
        else:
            self._see_compressed(layer, c_NF)
        list(self._threads.map(self._write, self._seen))
        self._seen.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _kept(self, values_RX: Tensor) -> Tensor:
        return values_RX if self._rows_N is None else values_RX[self._rows_N]

    def _see(self, name: str, values: Tensor) -> None:
        self._seen[name] = [values.half().cpu().numpy()]

    def _see_compressed(self, layer: int, c_NF: Tensor) -> None:
        pieces = c_NF.chunk(self._cores), c_NF.half().chunk(self._cores)
        packed = list(self._threads.map(compressed, *pieces, [self.most] * self._cores))
        for kind, values in zip(COMPRESSED, zip(*packed, strict=True), strict=True):
            self._seen[layer_file(kind, layer)] = list(values)

    def _write(self, name: str) -> None:
        for values in self._seen[name]:
            self.writer.append(name, values)

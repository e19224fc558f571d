"""The activation cache: what a dense model did on every token of a corpus. Reading is here, writing in writer.py.

Shape suffixes: N tokens of the cache, n tokens asked for, D width, F neurons, H heads, S stored contributions.
"""

from pathlib import Path

import numpy as np

from dejavu.activations.layout import Stream, layer_file, position_file, recorded_layers, streams
from dejavu.activations.manifest import cache_id, read_manifest, sha256
from dejavu.activations.space import check_free_space, estimate_bytes
from dejavu.activations.writer import CacheWriter
from dejavu.errors import DataError
from dejavu.models.taps import TapSource

__all__ = ["ActivationCache", "CacheWriter", "Rows", "cache_id", "check_free_space", "estimate_bytes", "read_manifest"]

Rows = slice | np.ndarray  # of the cache: a slice, or an integer array in ascending order


class ActivationCache:
    """A finished cache, mapped and not read: only the rows asked for come into memory, always as writable copies.

    manifest, id               what it is; the id goes into bundles and results
    tokens, layers, width, neurons, heads
    documents, token_ids, positions   per token (N,): number of its document, id, place in its block

    Raises DataError for a folder without a finished cache, for a later format and for a file that is missing or has
    another size than was written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self.id = cache_id(folder)
        self.tokens: int = self.manifest["tokens"]
        self.layers: int = self.manifest["layers"]
        self.width: int = self.manifest["width"]
        self.neurons: int = self.manifest["neurons"]
        self.heads: int = self.manifest["heads"]
        self.streams = streams(self.manifest)
        self._arrays = {name: self._map(stream) for name, stream in self.streams.items()}
        self.documents = self._arrays["document.u32"]
        self.token_ids = self._arrays["token.u32"]
        self.positions = self._arrays[position_file(self.manifest["block"])]
        self._compressed = self.manifest["encoding"] != "dense"
        self.recorded = recorded_layers(self.manifest)  # layers whose contributions are here
        self._starts = {layer: self._row_starts(layer) for layer in self.recorded} if self._compressed else {}

    def tap(self, source: TapSource, rows: Rows) -> np.ndarray:
        """A recorded residual, float16 (n, D), as it was in the model. Raises DataError for one not recorded."""
        self._check_recorded(layer_file(source.point, source.layer), source.layer)
        residual_nD = self._arrays[layer_file(source.point, source.layer)][rows]
        return residual_nD.copy() if isinstance(rows, slice) else residual_nD

    def heads_of(self, layer: int, rows: Rows) -> np.ndarray:
        """Contribution of every head, float32 (n, H)."""
        self._check_recorded(layer_file("heads", layer), layer)
        return self._arrays[layer_file("heads", layer)][rows].astype(np.float32)

    def mlp(self, layer: int, rows: Rows) -> np.ndarray:
        """Contribution of every neuron, float32 (n, F), 0 where none is stored."""
        self._check_recorded(layer_file("mlp" if not self._compressed else "mlp.count", layer), layer)
        if not self._compressed:
            return self._arrays[layer_file("mlp", layer)][rows].astype(np.float32)
        count_n, places = self._stored(layer, rows)
        index_S = self._arrays[layer_file("mlp.index", layer)][places]
        value_S = self._arrays[layer_file("mlp.value", layer)][places]
        c_nF = np.zeros((len(count_n), self.neurons), dtype=np.float32)
        c_nF.reshape(-1)[np.repeat(np.arange(len(count_n)) * self.neurons, count_n) + index_S] = value_S
        return c_nF

    def _check_recorded(self, name: str, layer: int) -> None:
        if name not in self._arrays:
            raise DataError(
                f"{self.folder} has no {name}: it was collected with collect.layers={self.recorded}, collect layer "
                f"{layer} too"
            )

    def verify(self) -> None:
        """Read every file and raise DataError for the first whose content is not what was written."""
        for name, entry in self.manifest["files"].items():
            if sha256(self.folder / name) != entry["sha256"]:
                raise DataError(f"{self.folder / name} has changed since it was collected: collect the cache again")

    def __reduce__(self) -> tuple[type["ActivationCache"], tuple[Path]]:
        """Worker processes open the files themselves: a memory map would be sent to them as a copy of the file."""
        return ActivationCache, (self.folder,)

    def _map(self, stream: Stream) -> np.ndarray:
        """A file as (N,), (N, columns) or (S,), read-only. A map cannot be empty, an array can."""
        path, entry = self.folder / stream.name, self.manifest["files"].get(stream.name, {})
        recorded = entry.get("bytes")
        if not path.is_file():
            raise DataError(f"{path} is missing: collect the cache again")
        if path.stat().st_size != recorded or stream.size(self.tokens) not in (None, recorded):
            raise DataError(f"{path} has {path.stat().st_size:,} bytes where {recorded} were written: collect it again")
        values = np.asarray(np.memmap(path, stream.dtype, mode="r")) if recorded else np.zeros(0, stream.dtype)
        if stream.columns is None or stream.dtype.kind == "u":
            return values
        return values.reshape(self.tokens, stream.columns)

    def _row_starts(self, layer: int) -> np.ndarray:
        """Where the stored contributions of each token start, and of the last one end, int64 (N + 1,)."""
        starts = np.zeros(self.tokens + 1, dtype=np.int64)
        np.cumsum(self._arrays[layer_file("mlp.count", layer)], out=starts[1:])
        for kind in ("mlp.index", "mlp.value"):
            if len(self._arrays[layer_file(kind, layer)]) != starts[-1]:
                raise DataError(
                    f"{self.folder / layer_file(kind, layer)} does not fit its counts: collect the cache again"
                )
        return starts

    def _stored(self, layer: int, rows: Rows) -> tuple[np.ndarray, Rows]:
        """How many contributions the rows have (n,), and where these are."""
        starts = self._starts[layer]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.tokens)
            if step == 1:
                stop = max(start, stop)
                return np.diff(starts[start : stop + 1]), slice(starts[start], starts[stop])
            rows = np.arange(start, stop, step)
        count_n = starts[rows + 1] - starts[rows]
        before_n = np.cumsum(count_n) - count_n  # in what is returned
        return count_n, np.arange(count_n.sum()) + np.repeat(starts[rows] - before_n, count_n)

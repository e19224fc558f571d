"""Writing an activation cache so that a kill, a full disk or a power cut costs at most the last two batches.

Files are appended to with plain writes: a memory map written on a full disk ends the process with SIGBUS. After every
batch the files go to disk, then `progress.json` records their sizes by rename; what lies beyond is cut off on resuming.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dejavu.activations.layout import Stream, streams
from dejavu.activations.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    PROGRESS,
    flat,
    read_json,
    read_manifest,
    replace_json,
    sha256,
)
from dejavu.errors import DataError

RESULTS = ("batches", "tokens", "files")  # what a manifest has beyond its head


class CacheWriter:
    """Appends batches to a cache, from the start or from where an earlier process stopped. A context manager.

    folder         made if absent; an unfinished cache with the same head is gone on with
    manifest_head  sizes (layers, width, neurons, heads, block), encoding, top, and all else that makes this cache this
                   one (`collect.cache_head`); JSON values only, no paths, no times
    batches_done   the batch to go on from; all of them when the cache is finished already

    Raises DataError for a folder with a cache of another head (naming the keys) and for every failed write.
    """

    def __init__(self, folder: str | Path, manifest_head: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.head: dict[str, Any] = json.loads(json.dumps({"format_version": FORMAT_VERSION, **manifest_head}))
        self.streams = streams(self.head)
        self.sizes = dict.fromkeys(self.streams, 0)
        self.batches_done = 0
        self.finished = False
        self._committed = dict(self.sizes)
        self._files: dict[str, FileIO] = {}
        # fsync waits for the disk, which may as well happen beside the next batch.
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None
        try:
            self._start()
        except BaseException:
            self._release()
            raise

    @property
    def tokens(self) -> int:
        """Tokens appended so far."""
        return self.sizes["document.u32"] // 4

    def append(self, name: str, values: np.ndarray) -> None:
        """Append rows to a file. Raises DataError for NaN or infinity, TypeError for another dtype than the file's."""
        stream = self.streams[name]
        values = np.ascontiguousarray(values).astype(stream.dtype, casting="equiv", copy=False)
        if stream.dtype.kind == "f":
            self._check_finite(stream, values)
        with self._writing(name):
            left = memoryview(values.data).cast("B") if values.size else memoryview(b"")
            while left:  # a write may stop short of the end
                left = left[self._files[name].write(left) :]
        self.sizes[name] += values.nbytes

    def commit(self) -> None:
        """The batch is whole: bring it to disk and record that, beside the next batch (waits for the last one's)."""
        self._settle()
        wrong = [
            name for name, stream in self.streams.items() if stream.size(self.tokens) not in (None, self.sizes[name])
        ]
        if wrong:
            raise RuntimeError(f"a batch is incomplete: {', '.join(wrong)} were not filled for every token")
        self.batches_done += 1
        self._committed = dict(self.sizes)
        self._pending = self._disk.submit(self._to_disk, self._committed, self.batches_done)

    def finish(self) -> None:
        """Write the manifest, which makes the cache complete. Rows appended since the last commit are an error."""
        self._settle()
        if self._committed != self.sizes:
            raise RuntimeError("rows were appended after the last commit: commit() before finish()")
        if not self.finished:
            with self._writing(MANIFEST):
                files = {
                    name: {"bytes": size, "sha256": sha256(self.folder / name)} for name, size in self.sizes.items()
                }
                content = {**self.head, "batches": self.batches_done, "tokens": self.tokens, "files": files}
                replace_json(self.folder / MANIFEST, content)
        self.finished = True
        with self._writing(PROGRESS):
            (self.folder / PROGRESS).unlink(missing_ok=True)
        self._release()

    def close(self) -> None:
        """Let go of the files; what was committed stays. Raises DataError if the last commit did not reach the disk."""
        try:
            self._settle()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release()  # the error on its way tells more than a second one

    def _start(self) -> None:
        with self._writing(""):
            self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).exists():
            manifest = read_manifest(self.folder)
            self._check_head({key: value for key, value in manifest.items() if key not in RESULTS})
            self._take_up({name: manifest["files"][name]["bytes"] for name in self.streams}, manifest["batches"])
            self.finished = True
            return
        if (self.folder / PROGRESS).exists():
            progress = read_json(self.folder / PROGRESS)
            self._check_head(progress.get("head", {}))
            self._take_up(progress["files"], progress["batches"])
        else:
            with self._writing(PROGRESS):
                self._record(self.sizes, 0)
        for name in self.streams:
            self._open(name)

    def _take_up(self, sizes: dict[str, int], batches: int) -> None:
        self.sizes, self._committed, self.batches_done = dict(sizes), dict(sizes), batches

    def _check_head(self, found: dict[str, Any]) -> None:
        ours, theirs = flat(self.head), flat(found)
        differing = sorted(key for key in ours | theirs if ours.get(key, ...) != theirs.get(key, ...))
        if differing:
            raise DataError(
                f"{self.folder} holds an activation cache made with other settings ({', '.join(differing)} differ): "
                "choose another run_dir, or delete the folder"
            )

    def _open(self, name: str) -> None:
        path, recorded = self.folder / name, self.sizes[name]
        with self._writing(name):
            file = self._files[name] = path.open("ab", buffering=0)
            if len(self._files) == 1:
                self._lock(file)
            if os.fstat(file.fileno()).st_size < recorded:
                raise DataError(f"{path} is shorter than when it was committed: delete {self.folder} and collect again")
            file.truncate(recorded)

    def _lock(self, file: FileIO) -> None:
        """Two writers would interleave their rows; the lock goes with the process. Not every file system has locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is writing to the cache at {self.folder}: wait for it or choose another run_dir"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise

    def _check_finite(self, stream: Stream, values: np.ndarray) -> None:
        # On the bits: a maximum of integers takes a tenth of the time of np.isfinite on float16.
        largest = int((values.view(np.uint16) & 0x7FFF).max(initial=0))
        if largest >= 0x7C00:
            what = "NaN" if largest > 0x7C00 else "a value above 65504, the most that float16 holds,"
            raise DataError(
                f"{what} in {stream.meaning}, batch {self.batches_done}, cannot be stored in {stream.name}: check the "
                "model's weights, or try dtype=float32"
            )

    def _to_disk(self, sizes: dict[str, int], batches: int) -> None:
        for name, file in self._files.items():
            with self._writing(name):
                os.fsync(file.fileno())
                _drop_pages(file)
        with self._writing(PROGRESS):
            self._record(sizes, batches)

    def _record(self, sizes: dict[str, int], batches: int) -> None:
        replace_json(self.folder / PROGRESS, {"head": self.head, "files": sizes, "batches": batches})

    def _settle(self) -> None:
        """Wait for the commit under way; its error is raised here."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _release(self) -> None:
        self._disk.shutdown()
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.folder / name} cannot be written ({error.strerror}): make room, then run the same command "
                "again: it goes on from the last complete batch"
            ) from error


def _drop_pages(file: FileIO) -> None:
    """Give back the memory that holds a copy of what is on disk: nobody reads it before the cache is finished.

    The next batch then finds pages at hand. On a virtual machine that has to get each fresh one from its host,
    appending 39 MB takes 11 ms instead of 140.
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

"""How the engine keeps matrices: rows that can be read one by one, in 32, 16 or 8 bits, all sums in float32.

A row is what one unit needs: a neuron's row of fc1 and column of fc2, a head's rows of q, k, v and columns of out_proj.
Columns are therefore kept transposed. Shape suffixes: R rows, C columns.
"""

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dejavu.errors import ConfigError
from dejavu.schema import STORAGES

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}
HUGE_PAGE = 1 << 21


@dataclass(frozen=True)
class Rows:
    """A matrix in a storage type; `scale_R` is what a row of int8 is multiplied with (1 in the other types)."""

    data_RC: np.ndarray
    scale_R: np.ndarray
    storage: str

    def __post_init__(self) -> None:
        """Raise ValueError for arrays that a kernel would read as something else."""
        data, scale = self.data_RC, self.scale_R
        if data.dtype != DTYPES[self.storage] or data.ndim != 2 or not data.flags.c_contiguous:
            raise ValueError(
                f"rows in {self.storage} are a C-contiguous matrix of {DTYPES[self.storage]}, not {data.dtype} of "
                f"shape {data.shape}"
            )
        if scale.dtype != np.float32 or scale.shape != (len(data),):
            raise ValueError(f"{len(data)} rows have as many float32 scales, not {scale.dtype} of shape {scale.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.data_RC.shape
        return rows, columns

    @property
    def bytes_per_row(self) -> int:
        """Bytes read to use one row, its scale included."""
        return self.shape[1] * self.data_RC.itemsize + (4 if self.storage == "int8" else 0)


def pack(weight_RC: Tensor, storage: str) -> Rows:
    """The matrix in a storage type: bfloat16 rounded to nearest even, int8 with the row's largest magnitude at 127.

    Raises ConfigError for an unknown type and for values that are not finite.
    """
    if storage not in STORAGES:
        raise ConfigError(f"decode.storage={storage} is not known: choose one of {', '.join(STORAGES)}")
    weight_RC = weight_RC.detach().float().cpu()
    if not bool(torch.isfinite(weight_RC).all()):
        raise ConfigError(
            f"a matrix of shape {tuple(weight_RC.shape)} holds values that are not finite: check the model"
        )
    ones_R = np.ones(len(weight_RC), dtype=np.float32)
    if storage == "float32":
        return Rows(in_large_pages(weight_RC.numpy()), ones_R, storage)
    if storage == "bfloat16":
        return Rows(in_large_pages(weight_RC.bfloat16().view(torch.int16).numpy().view(np.uint16)), ones_R, storage)
    scale_R = weight_RC.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    values_RC = (weight_RC / scale_R[:, None]).round().to(torch.int8)
    return Rows(in_large_pages(values_RC.numpy()), scale_R.numpy(), storage)


def unpack(rows: Rows, room: Tensor | None = None) -> Tensor:
    """The float32 values that the stored matrix stands for, (R, C): the matrix itself where that is what it holds.

    `room`, one-dimensional float32, is written over where it is large enough: fresh memory faults every 4 kB.
    """
    if rows.storage == "float32":
        return torch.from_numpy(rows.data_RC)
    if room is None or len(room) < rows.data_RC.size:
        room = torch.empty(rows.data_RC.size)
    values_RC = room[: rows.data_RC.size].view(rows.shape)
    if rows.storage == "bfloat16":
        return values_RC.copy_(torch.from_numpy(rows.data_RC.view(np.int16)).view(torch.bfloat16))
    return values_RC.copy_(torch.from_numpy(rows.data_RC)).mul_(torch.from_numpy(rows.scale_R)[:, None])


def in_large_pages(array: np.ndarray) -> np.ndarray:
    """A copy in memory that lies in pages of 2 MB where the system has them: rows read at random miss no page table.

    The copy starts on such a page, since a page that is only partly its own stays in pages of 4 kB.
    """
    if array.nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.array(array, order="C")
    size = -(-array.nbytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no large pages
    start = -np.frombuffer(memory, np.uint8, 1).ctypes.data % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE)
    copy = np.frombuffer(memory, dtype=array.dtype, count=array.size, offset=start).reshape(array.shape)
    copy[...] = array
    return copy

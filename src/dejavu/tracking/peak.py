"""The most memory that a run needed, although several runs follow one another in one process."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dejavu.models.memory import return_freed_memory

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_open: list[dict[str, float]] = []  # peaks of the runs that are under way: a pipeline, and within it a step


@contextmanager
def peak_memory() -> Iterator[dict[str, float | None]]:
    """Yields a dict that holds, afterwards, `peak_mb` of the process and `device_peak_mb` of the GPU, in MiB.

    Each is None where the high-water mark of earlier runs cannot be set back, or where there is no such device.
    """
    result: dict[str, float | None] = {"peak_mb": None, "device_peak_mb": None}
    _collect()
    gc.collect()
    return_freed_memory()
    known = ["device_peak_mb", *(["peak_mb"] if _set_back() else [])]
    peaks: dict[str, float] = {}
    _open.append(peaks)
    try:
        yield result
    finally:
        _collect()
        _open[:] = [others for others in _open if others is not peaks]  # equal peaks are not the same run's
        result |= {name: round(peaks[name], 1) for name in known if name in peaks}


def _collect() -> None:
    """Raise the peaks of all runs that are under way to the marks that stand now."""
    marks = {"peak_mb": _high_water_mark(), "device_peak_mb": _device_mark()}
    for peaks in _open:
        for name, mark in marks.items():
            if mark is not None:
                peaks[name] = max(mark, peaks.get(name, 0.0))


def _set_back() -> bool:
    """Set the marks back to what is in use now; whether that worked for the process's own."""
    device = _cuda()
    if device is not None:
        device.reset_peak_memory_stats()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> float | None:
    """Most resident memory since the mark was set back, in MiB (Linux)."""
    try:
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, ValueError):
        return None
    return int(line.split()[1]) / 1024


def _device_mark() -> float | None:
    """Most memory of the GPU since the mark was set back, in MiB."""
    device = _cuda()
    return None if device is None else device.max_memory_allocated() / 2**20


def _cuda() -> Any:
    """torch.cuda where a GPU is there; torch is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None

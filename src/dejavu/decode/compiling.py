"""Where compiled kernels are kept, and the lock under which they are compiled.

Numba keeps compiled code on disk and notices when the file of a kernel changes, but not when a file it was compiled
from does; a stale kernel would compute with old rules. So the folder is named from all of the sources. Nor does Numba
expect two processes that save the same kernel for different types at one time: it numbers files from an index that both
have read, so one's code ends under the other's name and reads its arguments as something else. So a kernel is compiled,
or loaded, while no other process does (which then waits and loads, instead of compiling the same).
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numba
from filelock import FileLock

_HERE = Path(__file__).parent
_KERNELS = ("rows.py", "vectors.py", "kinds.py", "kernels.py", "attention.py")


def _cache_folder() -> str:
    """Where kernels compiled from these sources are kept; "" leaves it to Numba where that cannot be written."""
    digest = hashlib.sha256(b"".join((_HERE / name).read_bytes() for name in _KERNELS)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "dejavu" / "kernels" / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(folder)


FOLDER: str = numba.config.CACHE_DIR or _cache_folder()  # type: ignore[attr-defined]  # one set by the user stays
_lock = FileLock(Path(FOLDER or tempfile.gettempdir()) / "dejavu-kernels.lock")


def compile_for(kernel: Any, types: tuple[Any, ...]) -> None:
    """Have the kernel compiled for arguments of these types, by this process or by one before it."""
    if types not in kernel.overloads:
        Path(_lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        with _lock:
            kernel.compile(types)

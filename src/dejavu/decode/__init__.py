"""The engine that decodes: only the rows of the chosen heads and neurons are read.

Numba keeps compiled kernels on disk and notices when the file of a kernel changes, but not when a file it was compiled
from does; a stale kernel would compute with old rules. So the cache's folder is named from all of the sources.
"""

import hashlib
import os
from pathlib import Path

import numba

_HERE = Path(__file__).parent
_KERNELS = ("rows.py", "vectors.py", "kernels.py")


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


_before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
numba.config.CACHE_DIR = _before or _cache_folder()  # type: ignore[attr-defined]  # a folder set by the user stays
try:
    from dejavu.decode import kernels  # noqa: F401
finally:
    numba.config.CACHE_DIR = _before  # type: ignore[attr-defined]

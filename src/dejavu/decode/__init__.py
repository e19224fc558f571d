"""The engine that decodes: only the rows of the chosen heads and neurons are read."""

import numba

from dejavu.decode.compiling import FOLDER

_before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
numba.config.CACHE_DIR = FOLDER  # type: ignore[attr-defined]  # read when a kernel is decorated
try:
    from dejavu.decode import attention, kernels  # noqa: F401
finally:
    numba.config.CACHE_DIR = _before  # type: ignore[attr-defined]

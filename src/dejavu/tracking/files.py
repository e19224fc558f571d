"""Files that appear whole: written beside their place, then renamed."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejavu.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


def write_text(path: Path, text: str) -> None:
    """Write by rename. Raises DataError (no space, no permission) and leaves whatever was there before."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"{path} could not be written ({error.strerror}): free some space or choose another folder"
        ) from error


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


def write_parquet(path: Path, table: "pd.DataFrame") -> None:
    """Write a table by rename. Raises DataError when there is no space or permission."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        table.to_parquet(partial, index=False)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"{path} could not be written ({error.strerror}): free some space or choose another folder"
        ) from error

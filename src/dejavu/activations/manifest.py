"""manifest.json, the last file of an activation cache: what it holds, and the id that bundles and results refer to.

Standard library only, so that looking for a cache that fits a model costs nothing.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"  # stands in an unfinished cache instead of the manifest
REQUIRED = ("layers", "width", "neurons", "heads", "encoding", "block", "batches", "tokens", "files")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a finished cache. Raises DataError when there is none, or none that this version reads."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        advice = "is unfinished: run the same collect again, it goes on where it stopped"
        if not (Path(folder) / PROGRESS).is_file():
            advice = f"holds no activation cache (no {MANIFEST}): give the folder that collect wrote"
        raise DataError(f"{folder} {advice}")
    manifest = read_json(path)
    version = manifest.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise DataError(
            f"{path} has format_version {version!r} and this dejavu reads up to {FORMAT_VERSION}: update dejavu, or "
            "collect again"
        )
    absent = [key for key in REQUIRED if key not in manifest]
    if absent:
        raise DataError(f"{path} lacks {', '.join(absent)}: collect the cache again")
    return manifest


def cache_id(folder: str | Path) -> str:
    """16 hex digits that change with any change of a cache: its manifest holds the digest of every file.

    Raises DataError as `read_manifest` does.
    """
    read_manifest(folder)
    return hashlib.sha256((Path(folder) / MANIFEST).read_bytes()).hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of ours. Raises DataError when it is anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete its folder and collect again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object: delete its folder and collect again")
    return content


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all, equal bytes for equal content, on disk when this returns. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sha256(path: Path) -> str:
    """Digest of a file's content, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, so that a message names the key that differs and not its group."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found

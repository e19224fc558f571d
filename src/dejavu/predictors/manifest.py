"""config.json of a predictor bundle, read without torch: which model it is for, and the id that results refer to.

Standard library only, so that looking for a bundle that fits a model costs nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu.errors import DataError

FORMAT_VERSION = 2  # 2: predictors without biases, and with a shared first layer
CONFIG = "config.json"
WEIGHTS = "predictors.safetensors"
REQUIRED = ("id", "weights_sha256", "model", "anatomy", "tap", "rank", "layers", "document_hashes")


def read_bundle_config(folder: str | Path) -> dict[str, Any]:
    """What a bundle says of itself. Raises DataError when there is none, or none that this version reads."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no predictor bundle (no {CONFIG}): give the folder that `dejavu train` wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): copy the bundle again or train it again") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a JSON object: copy the bundle again or train it again")
    version = config.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise DataError(
            f"{path} has format_version {version!r} and this dejavu reads up to {FORMAT_VERSION}: update dejavu, or "
            "train again"
        )
    absent = [key for key in REQUIRED if key not in config]
    if absent:
        raise DataError(f"{path} lacks {', '.join(absent)}: copy the bundle again or train it again")
    return config


def bundle_id(folder: str | Path) -> str:
    """The id as config.json states it; `load_bundle` checks it against the content. Raises DataError as above."""
    return str(read_bundle_config(folder)["id"])


def content_id(config: Mapping[str, Any], weights: Path) -> str:
    """16 hex digits of sha256 over the weights file's bytes and the config without its id.

    Canonical form: keys sorted, no spaces, no NaN.
    """
    described = {key: value for key, value in config.items() if key != "id"}
    digest = file_digest(weights)
    digest.update(json.dumps(described, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    return str(digest.hexdigest()[:16])


def file_digest(path: Path) -> Any:
    """sha256 of a file's content, open for more."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")

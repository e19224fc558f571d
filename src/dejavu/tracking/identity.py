"""What makes two runs the same run: the resolved config and the ids of what it read."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dejavu.schema import Config

# Where a run writes, who watches and how it is shown afterwards do not change what it computes.
NOT_HASHED = ("run_dir", "runs", "tracking", "force", "fetch", "publish", "devices", "launcher", "report")


def resolved(config: Config) -> dict[str, Any]:
    """The config as plain values, as written into config.yaml."""
    return dataclasses.asdict(config)


def config_hash(values: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """12 hex digits over the resolved config (without `NOT_HASHED`) and the ids of the run's inputs."""
    hashed = {key: value for key, value in values.items() if key not in NOT_HASHED}
    # Inputs count by their ids below; the paths through which they were named do not.
    hashed = {key: value for key, value in hashed.items() if key not in ("cache", "predictors")}
    text = json.dumps({"config": hashed, "inputs": dict(inputs)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ between two resolved configs, those that enter no hash left out."""
    before, after = dict(flattened(old)), dict(flattened(new))
    keys = [key for key in sorted(before.keys() | after.keys()) if key.split(".")[0] not in NOT_HASHED]
    return [key for key in keys if before.get(key) != after.get(key)]


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; empty mappings have none."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

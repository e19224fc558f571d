"""Caches and bundles as W&B artifacts: what a run read and what it made, by id.

Only the small file that describes one is given to W&B (manifest.json, config.json), never the gigabytes beside it; a
bundle is shared through the hub (predictors/share.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = {"cache": "manifest.json", "bundle": "config.json"}  # kind -> the file that describes one and comes last
KEYS = {"cache": "cache", "bundle": "predictors"}  # kind -> the config key that names its folder


def declare_inputs(run: Any, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Say what a run reads. Offline W&B knows no inputs: there the ids in the run's config have to do."""
    if run.offline:
        return
    for kind, key in KEYS.items():
        if inputs.get(kind) is not None:
            run.use_artifact(description(kind, inputs[kind], Path(str(config[key]))))


def declare_outputs(run: Any, record: Mapping[str, Any], folder: Path) -> None:
    """Say which cache or bundle a run made in its folder; kept for `wandb sync` when offline."""
    for kind, file in FILES.items():
        if kind in record and (folder / kind / file).is_file():
            run.log_artifact(description(kind, record[kind]["id"], folder / kind))


def description(kind: str, id: str, folder: Path) -> Any:
    """An artifact `cache-ID` or `bundle-ID`; equal ids have equal content, so whoever names it first makes it."""
    import wandb

    artifact = wandb.Artifact(f"{kind}-{id}", type=kind, metadata={"id": id})
    artifact.add_file(str(folder / FILES[kind]))
    return artifact

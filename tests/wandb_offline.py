"""Read an offline W&B run back with W&B's own tool."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def records(folder: Path) -> dict[str, list[Any]]:
    """The records of the one offline run below `folder`, by type."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(run)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = defaultdict(list)
    for record in map(json.loads, lines):
        found[record["type"]].append(record.get(record["type"], record))
    return found


def summary(folder: Path) -> dict[str, Any]:
    """Config, summary, name, id and state of the one offline run below `folder`."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json", str(run)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

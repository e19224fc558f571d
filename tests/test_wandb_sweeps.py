"""Sweeps in W&B's format: what its agent would run composes, for every value, and the metric is one that runs log.

The command is expanded by W&B's own code for its agents; the server, which draws the values, is not here.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from dejavu.config import from_config
from dejavu.evaluation.metrics import metric_names
from dejavu.schema import Config
from dejavu.stages.inputs import STAGES, check_backend
from dejavu.tracking.identity import flattened, resolved

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = sorted((ROOT / "sweeps" / "wandb").glob("*.yaml"))
KEYS = {"program", "project", "method", "run_cap", "metric", "parameters", "command"}  # of W&B's format, those used
PLACES = {"DEJAVU_PREDICTORS": "runs/demo/train", "DEJAVU_CACHE": "runs/demo/collect"}


def values_of(parameter: dict[str, Any]) -> list[Any]:
    """Every value of a list, both ends of a range."""
    return parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]


def commands(sweep: dict[str, Any]) -> Iterator[list[str]]:
    """What an agent would start, as often as brings every value once."""
    values = {key: values_of(parameter) for key, parameter in sweep["parameters"].items()}
    for number in range(max(map(len, values.values()))):
        chosen = {key: choices[number % len(choices)] for key, choices in values.items()}
        filled = create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
        words = create_sweep_command(copy.copy(sweep["command"]))
        known = filled | {"program": [sweep["program"]]}
        yield [part for word in words for part in (known[word[2:-1]] if word.startswith("${") else [word])]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_an_agents_commands_compose(path, monkeypatch):
    for name, place in PLACES.items():
        monkeypatch.setenv(name, place)
    sweep = yaml.safe_load(path.read_text())
    assert sweep.keys() <= KEYS and sweep["method"] in ("grid", "random", "bayes")
    ranges = [key for key, parameter in sweep["parameters"].items() if "values" not in parameter]
    assert sweep["method"] != "grid" or not ranges, f"a grid needs values for {ranges}"
    assert sweep["parameters"].keys() <= dict(flattened(resolved(Config()))).keys()
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for program, stage, *overrides in commands(sweep):
            assert program == "dejavu" and stage in STAGES
            config = from_config(compose("config", overrides=overrides))
            check_backend(stage, config)
            assert config.tracking.mode == "online" and config.force
            given = config.predictors if stage == "evaluate" else config.cache
            assert given in PLACES.values()
            flat = dict(flattened(resolved(config)))
            for key in sweep["parameters"]:
                assert f"{key}={flat[key]}" in overrides
    assert sweep["metric"]["goal"] == ("maximize" if "recall" in sweep["metric"]["name"] else "minimize")
    if stage == "evaluate":
        task, _, metric = sweep["metric"]["name"].partition("/")
        assert metric in metric_names(config.tasks.run[task].kind, config.tasks.run[task].metrics)

"""Runs: one folder, one config, a record that appears last and says how it ended."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb_offline

from dejavu.errors import ConfigError, DataError
from dejavu.schema import Config, Tracking
from dejavu.tracking import peak
from dejavu.tracking.files import write_json
from dejavu.tracking.identity import config_hash, differing_keys, resolved
from dejavu.tracking.peak import peak_memory
from dejavu.tracking.run import RunFailed, execute
from dejavu.tracking.wandb_run import final_values, layer_values

INPUTS = {"cache": None, "bundle": None}


def config(**changes) -> Config:
    return dataclasses.replace(Config(tracking=Tracking(mode="off")), **changes)


def test_a_run_leaves_config_log_and_result(tmp_path):
    def body(run):
        run.say("hello")
        run.record["metrics"] = {"t": {"m": {"value": 1.0, "stderr": None, "n": 1}}}

    result = execute("evaluate", body, config(), tmp_path / "a", INPUTS)
    assert json.loads((tmp_path / "a/result.json").read_text()) == result
    assert result["status"] == "ok" and result["error"] is None and result["stage"] == "evaluate"
    assert {"config_hash", "inputs", "timing", "versions", "seed", "metrics"} <= result.keys()
    assert "hello" in (tmp_path / "a/log.txt").read_text()
    assert "selector" in (tmp_path / "a/config.yaml").read_text()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"config.yaml", "log.txt", "result.json"}


def test_the_same_config_is_skipped_and_force_runs_it_again(tmp_path):
    calls = []
    for force in (False, False, True):
        execute("evaluate", lambda run: calls.append(1), config(force=force), tmp_path / "a", INPUTS)
    assert len(calls) == 2


def test_another_config_in_the_same_folder_is_refused_with_the_keys_that_differ(tmp_path):
    execute("evaluate", lambda run: None, config(), tmp_path / "a", INPUTS)
    before = (tmp_path / "a/result.json").read_text()
    with pytest.raises(ConfigError, match=r"seed, sparsity\.mlp differ"):
        other = config(seed=1)
        other.sparsity.mlp = 0.5
        execute("evaluate", lambda run: None, other, tmp_path / "a", INPUTS)
    with pytest.raises(ConfigError, match="another cache or bundle"):
        execute("evaluate", lambda run: None, config(), tmp_path / "a", {"cache": None, "bundle": "b"})
    assert (tmp_path / "a/result.json").read_text() == before


@pytest.mark.parametrize("error", [DataError("the cache at X is truncated"), ValueError("boom"), KeyboardInterrupt()])
def test_a_failed_run_is_recorded_and_tried_again(tmp_path, error):
    def fail(run):
        raise error

    with pytest.raises(RunFailed):
        execute("train", fail, config(), tmp_path / "a", INPUTS)
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert result["status"] == "failed" and result["error"]["type"] == type(error).__name__
    assert "Traceback" in (tmp_path / "a/log.txt").read_text()
    assert execute("train", lambda run: None, config(), tmp_path / "a", INPUTS)["status"] == "ok"


def test_what_is_not_hashed_does_not_change_the_hash():
    plain = config_hash(resolved(config()), INPUTS)
    same = config(run_dir="x", runs="y", force=True, tracking=Tracking(group="g"), cache="c", predictors="p")
    assert config_hash(resolved(same), INPUTS) == plain
    assert config_hash(resolved(config(seed=1)), INPUTS) != plain
    assert config_hash(resolved(config()), {"cache": "other", "bundle": None}) != plain
    assert differing_keys(resolved(config()), resolved(same)) == ["cache", "predictors"]


def test_peak_memory_and_random_numbers_start_anew_with_every_run(tmp_path):
    drawn = []

    def body(run):
        if run.folder.name == "large":
            np.ones(100 * 2**20 // 2, np.float64)  # 400 MB
        drawn.append((np.random.rand(), torch.rand(1).item(), random.random()))

    large, small = (
        execute("evaluate", body, config(), tmp_path / name, INPUTS)["memory"] for name in ("large", "small")
    )
    assert drawn[0] == drawn[1]
    if Path("/proc/self/clear_refs").exists():
        assert large["peak_mb"] - small["peak_mb"] > 300


def test_runs_within_runs_that_need_equal_memory_are_told_apart():
    with peak_memory():
        (outer,) = peak._open
        with peak_memory():
            inner = peak._open[1]
            inner.update(outer)
        assert len(peak._open) == 1 and peak._open[0] is outer
    assert peak._open == []


def test_the_peak_of_a_run_holds_those_of_its_steps(tmp_path):
    def step(run):
        np.ones(100 * 2**20 // 2, np.float64)

    def steps(run):
        inner = [execute("evaluate", body, config(), run.folder / name, INPUTS) for name, body in bodies.items()]
        peaks.extend(result["memory"]["peak_mb"] for result in inner)

    peaks: list[float | None] = []
    bodies = {"large": step, "small": lambda run: None}
    outer = execute("pipeline", steps, config(), tmp_path / "a", INPUTS)["memory"]["peak_mb"]
    assert peaks == [None, None] or outer >= max(peaks) > min(peaks)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", {"old": 1})
    monkeypatch.setattr("pathlib.Path.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(DataError, match="No space left"):
        write_json(tmp_path / "a.json", {"new": 1})
    monkeypatch.undo()
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_wandb_run_ends_in_the_state_the_run_ended_in(tmp_path, fails):
    def body(run):
        run.record["metrics"] = {"task": {"acc": {"value": 0.5, "stderr": 0.1, "n": 4}}}
        if fails:
            raise DataError("no")

    settings = config(tracking=Tracking(mode="offline", group="sweep"))
    try:
        execute("evaluate", body, settings, tmp_path / "a", INPUTS)
    except RunFailed:
        assert fails
    records = wandb_offline.records(tmp_path / "a")
    run, exit_record = records["run"][0], records["exit"][0]
    assert run["run_group"] == "sweep" and run["job_type"] == "evaluate"
    assert int(exit_record.get("exit_code", 0)) == int(fails)
    assert "task/acc" in json.dumps(records["history"])


def test_layers_are_rows_and_a_dense_run_asks_for_nothing():
    measured = {"mlp_density": 0.5, "mlp_density_per_layer": [1.0, 0.25], "mlp_recall_per_layer": [None, 0.75]}
    record = {
        "metrics": {"t": {"loss": {"value": 2.0}}}, "timing": {"ms_per_token": 3.0},
        "sparsity": {"selector": "static", "requested": {"mlp": 0.5, "heads": 0.0}, "measured": measured},
    }  # fmt: skip
    assert layer_values(record) == [
        {"layer/index": 0, "layer/mlp_density": 1.0},
        {"layer/index": 1, "layer/mlp_density": 0.25, "layer/mlp_recall": 0.75},
    ]
    final = {"t/loss": 2.0, "requested/mlp": 0.5, "requested/heads": 0.0, "sparsity/mlp_density": 0.5}
    assert final_values(record) == final | {"timing/ms_per_token": 3.0}
    record["sparsity"]["selector"] = "dense"
    assert final_values(record)["requested/mlp"] == 0.0
    assert layer_values({}) == [] and final_values({}) == {}


def test_a_config_key_that_came_later_and_is_null_leaves_a_run_known(tmp_path):
    execute("evaluate", lambda run: None, config(), tmp_path / "a", INPUTS)
    text, result = (tmp_path / "a/config.yaml").read_text(), json.loads((tmp_path / "a/result.json").read_text())
    (tmp_path / "a/config.yaml").write_text(text.replace("  mlp_schedule: null\n", ""))
    write_json(tmp_path / "a/result.json", result | {"config_hash": "of the older version"})
    again = execute("evaluate", lambda run: pytest.fail("it is done"), config(), tmp_path / "a", INPUTS)
    assert again["config_hash"] == "of the older version" and "mlp_schedule" in text

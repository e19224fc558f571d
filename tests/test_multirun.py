"""A sweep of evaluations as a user types it: its lines, one W&B run a job, a failed job told, one table, resuming."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import wandb_offline

COMMAND = [
    sys.executable, "-c", "from dejavu.cli import main; main()", "evaluate", "-m",
    "sparsity.selector=dense,oracle,random,gate", "sparsity.ratio=0.75", "tasks=pydocs", "tasks.limit=8",
    "run_dir=sweep", "tracking=offline", "evaluation.samples=5",
]  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    cwd = tmp_path_factory.mktemp("multirun")
    return subprocess.run(COMMAND, capture_output=True, text=True, cwd=cwd, env=dict(os.environ)), cwd / "sweep"


def job(root: Path, selector: str) -> Path:
    (folder,) = root.glob(f"selector={selector}*")
    return folder


def test_a_failed_job_is_told_and_the_others_go_on(sweep):
    result, root = sweep
    assert result.returncode == 1
    assert "sparsity.selector=gate needs a model with a gated MLP" in result.stderr
    states = {s: json.loads((job(root, s) / "result.json").read_text())["status"] for s in ("dense", "oracle", "gate")}
    assert states == {"dense": "ok", "oracle": "ok", "gate": "failed"}
    assert "Traceback" in (job(root, "gate") / "log.txt").read_text()


def test_every_job_is_one_line_and_what_failed_is_said_again_at_the_end(sweep):
    lines = sweep[0].stderr.splitlines()
    assert lines[0] == "4 jobs in sweep, launcher=local"
    for number, selector in enumerate(("dense", "oracle", "random"), 1):
        form = rf"\[{number}/4\]  selector={selector}  ok  \d+ s  pydocs bits_per_byte \d\.\d+"
        assert re.fullmatch(form, lines[number]), lines[number]
    assert re.match(r"\[4/4\]  selector=gate  failed  \d+ s  sparsity\.selector=gate needs a model", lines[4])
    assert lines[5] == "4 jobs in sweep: 3 ok, 1 failed"
    assert lines[6].startswith("  selector=gate  failed: sparsity.selector=gate needs") and len(lines) == 7


def measured(root: Path, selector: str) -> dict[str, Any]:
    """What a job's result says of quality, density and seed."""
    result = json.loads((job(root, selector) / "result.json").read_text())
    return {key: result[key] for key in ("metrics", "sparsity", "seed", "config_hash", "status")}


def test_a_sweep_that_was_killed_halfway_ends_as_an_undisturbed_one(sweep, tmp_path):
    command = ["tracking=off" if word == "tracking=offline" else word for word in COMMAND]
    killed = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=dict(os.environ))
    while not list(tmp_path.glob("sweep/selector=oracle*/config.yaml")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (job(tmp_path / "sweep", "oracle") / "result.json").exists(), "killed in the middle of it"
    again = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    assert again.returncode == 1 and "selector=gate  failed" in again.stderr
    assert "selector=dense  already done  pydocs" in again.stderr
    assert f"(left unfinished by process {killed.pid} on" in again.stderr
    for selector in ("dense", "oracle", "random"):
        assert measured(tmp_path / "sweep", selector) == measured(sweep[1], selector)
    tables = [pd.read_csv(root / "table.csv") for root in (tmp_path / "sweep", sweep[1])]
    pd.testing.assert_frame_equal(*tables)


def test_memory_and_seed_are_each_jobs_own(sweep):
    results = [json.loads((job(sweep[1], s) / "result.json").read_text()) for s in ("dense", "oracle", "random")]
    assert [result["seed"] for result in results] == [0, 0, 0]
    assert all(set(result["memory"]) == {"peak_mb", "device_peak_mb"} for result in results)
    peaks = {result["memory"]["peak_mb"] for result in results}
    assert peaks == {None} or (len(peaks) == 3 and min(peaks) > 100)


def test_the_sweep_ends_with_one_table_and_pictures(sweep):
    result, root = sweep
    assert set(pd.read_csv(root / "table.csv")["selector"]) == {"dense", "oracle", "random"}
    for name in ("sparsity_vs_quality", "density_vs_quality", "recall_of_mass_neurons", "density_heads"):
        assert (root / f"{name}.png").stat().st_size > 5_000
    assert "oracle" in result.stdout and "table.csv" in result.stdout


def test_every_job_is_a_wandb_run_of_its_own(sweep):
    _, root = sweep
    seen = set()
    for selector in ("dense", "oracle", "random", "gate"):
        records = wandb_offline.records(job(root, selector))
        (run,) = records["run"]
        seen.add(run["run_id"])
        assert run["run_group"] == "sweep" and run["job_type"] == "evaluate"
        config = run["config"]["update"]
        assert config["sparsity"]["selector"] == selector and "bundle" in config["inputs"]
        failed = selector == "gate"
        assert int(records["exit"][0].get("exit_code", 0)) == int(failed)
        history = json.dumps(records["history"])
        assert ("pydocs/bits_per_byte" in history) is not failed
        if not failed:
            assert "samples" in history
            (table,) = job(root, selector).glob("wandb/offline-run-*/files/media/table/samples*.json")
            rows = json.loads(table.read_text())
            assert len(rows["data"]) == 5 and "loglikelihood" in rows["columns"]
        if selector in ("oracle", "random"):
            (image,) = job(root, selector).glob("wandb/offline-run-*/files/media/images/layers*.png")
            assert image.stat().st_size > 5_000 and "layers" in history
    assert len(seen) == 4, "no two runs merged"

"""A sweep of evaluations as a user types it: one W&B run a job, a failed job told and closed as failed, one table."""

import json
import os
import subprocess
import sys
from pathlib import Path

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

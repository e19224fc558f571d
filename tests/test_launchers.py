"""Where jobs run: each launcher gives an outcome for every job, also for one whose process was killed."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from bundles import untrained_bundle
from errands import errand
from test_lock import HOLD
from tiny import tiny_opt

from dejavu.errors import ConfigError
from dejavu.jobs.launchers import launch, submitit_executor
from dejavu.jobs.plan import Job
from dejavu.schema import Config, Launcher

COMMAND = [sys.executable, "-c", "from dejavu.cli import main; main()"]
NAMES = ("killed", "a", "b")
PATH = os.pathsep.join([str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])


def jobs(root: Path, *names: str) -> list[Job]:
    return [Job("merge", Config(), {}, root / name) for name in names]


@pytest.mark.parametrize("name", ["joblib", "submitit_local"])
def test_a_killed_process_is_one_failed_job(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)
    settings = Launcher(name=name, jobs=2, threads=3, timeout_min=5)
    ended = {job.folder.name: outcome for job, outcome in launch(jobs(tmp_path, *NAMES), settings, tmp_path, errand)}
    states = {name: outcome.state for name, outcome in ended.items()}
    assert states == {"killed": "died", "a": "ok", "b": "ok"}
    said = [outcome.metrics.split() for outcome in ended.values() if outcome.state == "ok"]
    assert len({pid for pid, _ in said} | {str(os.getpid())}) == 3, "each has a process of its own"
    assert all(threads == "3" for _, threads in said)
    assert "without a result" in str(ended["killed"].error)


@pytest.mark.parametrize("name", ["joblib", "submitit_local", "submitit_slurm"])
def test_a_missing_package_is_one_sentence(name, tmp_path, monkeypatch):
    package = name.split("_")[0]
    known = importlib.import_module

    def refuse(wanted):
        if wanted == package:
            raise ImportError(wanted)
        return known(wanted)

    monkeypatch.setattr("dejavu.jobs.launchers.importlib.import_module", refuse)
    with pytest.raises(ConfigError, match=f"launcher={name} needs the package {package}: pip install {package}"):
        launch(jobs(tmp_path, "a"), Launcher(name=name), tmp_path)


def test_slurm_is_asked_for_what_the_config_says_and_for_nothing_else(tmp_path, monkeypatch):
    import submitit

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="srun is not on this machine's path"):
        submitit_executor(submitit, Launcher(name="submitit_slurm"), tmp_path, "evaluate")
    (tmp_path / "srun").touch(mode=0o755)
    settings = Launcher(
        name="submitit_slurm", partition="gpu", timeout_min=30, cpus_per_task=4, array_parallelism=5,
        additional_parameters={"account": "lab"},
    )  # fmt: skip
    asked = submitit_executor(submitit, settings, tmp_path, "evaluate")._executor.parameters
    assert asked == {
        "job_name": "dejavu-evaluate", "time": 30, "cpus_per_task": 4, "partition": "gpu", "array_parallelism": 5,
        "additional_parameters": {"account": "lab"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """A folder with bundles of the two layers of a tiny model: merging them is the cheapest of all stages."""
    root = tmp_path_factory.mktemp("halves")
    for layer in (0, 1):
        untrained_bundle(tiny_opt(), root / f"layer{layer}", layers=[layer])
    return root


def merging(halves: Path, *arguments: str) -> subprocess.Popen:
    """A sweep of `dejavu merge`, started."""
    command = [*COMMAND, "merge", "-m", "tracking=off", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=halves)


@pytest.mark.parametrize("name", ["joblib", "submitit_local"])
def test_a_sweep_in_other_processes_tells_its_bad_job_and_finishes_the_good_one(name, halves, tmp_path):
    sweep = merging(halves, "merge=[layer0,layer1],[layer0,nowhere]", f"launcher={name}", f"run_dir={tmp_path}")
    _, said = sweep.communicate()
    assert sweep.returncode == 1, said
    good, bad = tmp_path / "merge=_layer0,layer1_", tmp_path / "merge=_layer0,nowhere_"
    states = [json.loads((folder / "result.json").read_text())["status"] for folder in (good, bad)]
    assert states == ["ok", "failed"]
    assert "Traceback" in (bad / "log.txt").read_text() and (good / "bundle" / "config.json").exists()
    lines = said.splitlines()
    assert lines[0] == f"2 jobs in {tmp_path}, launcher={name}"
    assert [line[:5] for line in lines[1:3]] == ["[1/2]", "[2/2]"]
    assert set(lines[3].removeprefix(f"2 jobs in {tmp_path}: ").split(", ")) == {"1 ok", "1 failed"}
    assert len(lines) == 5 and lines[4].startswith("  merge=_layer0,nowhere_  failed: predictors=nowhere holds no"), (
        said
    )


def test_two_processes_share_a_sweep_and_both_know_how_it_ended(halves, tmp_path):
    """A third has one of the jobs at first: both wait for it, and one goes on with it when that process is killed."""
    folders = [tmp_path / f"merge=_layer0,layer1_,seed={seed}" for seed in (0, 1, 2)]
    folders[1].mkdir()
    third = subprocess.Popen([sys.executable, "-c", HOLD, str(folders[1])], stdout=subprocess.PIPE, text=True)
    assert third.stdout is not None and third.stdout.readline() == "held\n"
    arguments = ("merge=[layer0,layer1]", "seed=0,1,2", f"run_dir={tmp_path}")
    sweeps = [merging(halves, *arguments) for _ in range(2)]
    heads = []
    for sweep in sweeps:
        assert sweep.stderr is not None
        heads.append("".join(iter_until(sweep.stderr, f"waiting for 1 job of process {third.pid} on")))
    third.kill()
    third.wait()
    for sweep, head in zip(sweeps, heads, strict=True):
        said = head + sweep.communicate()[1]
        assert sweep.returncode == 0, said
        assert f"waiting for 1 job of process {third.pid} on" in head
        assert all(f"seed={seed}  " in said for seed in (0, 1, 2)) and "[3/3]" in said
    for folder in folders:
        assert json.loads((folder / "result.json").read_text())["status"] == "ok"
        assert (folder / "log.txt").read_text().count("merged 2 bundles") == 1, "nothing was done twice"
    assert f"left unfinished by process {third.pid} on" in (folders[1] / "log.txt").read_text()


def iter_until(lines: Iterable[str], text: str) -> Iterator[str]:
    """Lines up to the one that contains the text."""
    for line in lines:
        yield line
        if text in line:
            return

"""A folder is written by one process at a time; a dead one's lock is taken over, by one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from dejavu.schema import Config, Tracking
from dejavu.tracking import lock
from dejavu.tracking.lock import LOCK, STALE_SECONDS, Busy, acquire, living_holder, locked, myself
from dejavu.tracking.run import RunFailed, execute

HOLD = """
import sys, time
from pathlib import Path
from dejavu.tracking.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
INPUTS = {"cache": None, "bundle": None}


def write(folder, holder, seconds_ago: float = 0.0) -> None:
    path = folder / LOCK
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - seconds_ago,) * 2)


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def plain(**changes) -> Config:
    return Config(tracking=Tracking(mode="off"), **changes)


def test_a_folder_in_use_is_refused_with_who_uses_it_and_taken_over_when_that_process_is_gone(other, tmp_path):
    before = (tmp_path / LOCK).read_text()
    with pytest.raises(Busy, match=f"is being written by process {other.pid} on "):
        execute("evaluate", lambda run: None, plain(), tmp_path, INPUTS)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK] and (tmp_path / LOCK).read_text() == before
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert living_holder(tmp_path) is None
    assert execute("evaluate", lambda run: None, plain(), tmp_path, INPUTS)["status"] == "ok"
    assert f"left unfinished by process {other.pid} on" in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / LOCK).exists()


def test_a_process_of_another_host_is_alive_while_it_renews_its_lock(tmp_path):
    far = replace(myself(), host="far", pid_space=1, token="f")
    write(tmp_path, far, seconds_ago=STALE_SECONDS - 60)
    assert living_holder(tmp_path) == far
    with pytest.raises(Busy, match=f"process {far.pid} on far"):
        acquire(tmp_path / LOCK)
    write(tmp_path, far, seconds_ago=STALE_SECONDS + 60)
    with locked(tmp_path) as held:
        assert held.taken_from is not None and held.taken_from.startswith(f"process {far.pid} on far, silent for 36")


def test_a_younger_process_of_the_same_number_is_not_the_holder(tmp_path):
    write(tmp_path, replace(myself(), born=1))
    with locked(tmp_path) as held:
        assert held.taken_from is not None and held.taken_from.endswith("which is gone")


def test_a_damaged_lock_counts_by_its_age(tmp_path):
    (tmp_path / LOCK).write_text("{")
    with pytest.raises(Busy, match="an unknown host"):
        acquire(tmp_path / LOCK)
    os.utime(tmp_path / LOCK, (1, 1))
    assert acquire(tmp_path / LOCK).held()


def test_of_many_that_find_a_dead_lock_one_takes_it(tmp_path):
    write(tmp_path, replace(myself(), host="far", token="dead"), seconds_ago=STALE_SECONDS + 60)
    start, won, lost = threading.Barrier(8), [], []

    def contend() -> None:
        start.wait()
        try:
            won.append(acquire(tmp_path / LOCK))
        except Busy:
            lost.append(1)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7 and won[0].held()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_the_lock_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with locked(tmp_path) as held:
        os.utime(tmp_path / LOCK, (1, 1))
        for _ in range(1000):
            if (tmp_path / LOCK).stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime > 1 and held.held()


def test_a_run_whose_folder_was_taken_writes_no_result(tmp_path):
    def body(run):
        write(tmp_path, replace(myself(), host="far", token="thief"))

    with pytest.raises(RunFailed, match="was taken by another process"):
        execute("evaluate", body, plain(), tmp_path, INPUTS)
    assert not (tmp_path / "result.json").exists()
    assert json.loads((tmp_path / LOCK).read_text())["token"] == "thief"

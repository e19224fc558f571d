"""Surroundings that every test shares, and what happens to tests that need more than the repository."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before anything imports the libraries that read these; a value set by the caller wins.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers already fill the cores; threads on top fight

NO_DATA = "needs local data"


def _find_data() -> Path:
    return Path(os.environ.get("DEJAVU_DATA_ROOT") or Path(__file__).parents[2] / "shared" / "data").resolve()


def _require_data() -> Path:
    root = _find_data()
    if not root.is_dir():
        pytest.skip(f"{NO_DATA}: no folder {root} (set DEJAVU_DATA_ROOT)")
    return root


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the local data sets."""
    return _require_data()


@pytest.fixture
def dejavu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """The command in this process (a new one imports for seconds), in an empty folder: its arguments -> its exit code.

    What it changes of the process is undone.
    """
    from hydra.core.global_hydra import GlobalHydra

    from dejavu import cli

    for name in ("HYDRA_FULL_ERROR", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")
    log = logging.getLogger("dejavu")
    handlers, propagate = list(log.handlers), log.propagate
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["dejavu", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    yield run
    log.handlers[:], log.propagate = handlers, propagate
    GlobalHydra.instance().clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and os.environ.get("DEJAVU_LONG") != "1":
        pytest.skip("long: set DEJAVU_LONG=1 to run it")
    if item.get_closest_marker("data"):
        _require_data()
    if item.get_closest_marker("cuda"):
        import torch  # seconds, so only where a test asks

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # From the reports, not from a counter: under xdist the skips happen in the workers.
    missed = sum(NO_DATA in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if missed:
        terminalreporter.write_line(f"{missed} tests that need local data did not run")

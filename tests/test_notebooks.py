"""The notebooks: paired with their text, without outputs, over runs that the README's numbers come from.

That they run is checked by nbmake, which collects notebooks/*.ipynb as tests.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from finished_runs import write_run

from dejavu.analysis import load_runs
from dejavu.analysis.excerpt import SAMPLES, excerpt
from dejavu.analysis.latency import read_benchmark
from dejavu.analysis.predictor_figures import read_bundle, recall_of_layers, training_curve
from dejavu.analysis.readme import embedded, engine
from dejavu.benchmark.report import markdown
from dejavu.errors import DataError
from dejavu.schema import NOTEBOOKS as NOTEBOOK_NAMES
from dejavu.tracking.files import write_json

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = sorted(NOTEBOOK_NAMES)
MOST = 1_000_000  # bytes of the runs that the repository carries


def tool(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_each_notebook_says_what_its_text_says(tmp_path):
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.py")) == NAMES
    files = [NOTEBOOKS / "jupytext.toml", *NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("*.py")]
    for path in files:
        shutil.copy(path, tmp_path)
    synced = tool("jupytext", "--sync", *(f"{name}.ipynb" for name in NAMES), cwd=tmp_path)
    assert synced.returncode == 0, synced.stderr
    assert synced.stdout.count("Unchanged") == 2 * len(NAMES), synced.stdout
    (tmp_path / "latency.py").write_text((tmp_path / "latency.py").read_text() + "\n# %%\n1 + 1\n")
    assert "Updating latency.ipynb" in tool("jupytext", "--sync", "latency.ipynb", cwd=tmp_path).stdout


def test_outputs_are_stripped_and_parameters_tagged():
    stripped = tool("nbstripout", "--verify", *(str(path) for path in NOTEBOOKS.glob("*.ipynb")), cwd=ROOT)
    assert stripped.returncode == 0, stripped.stdout
    for name in NAMES:
        cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
        (parameters,) = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
        assert "run_dir" in "".join(parameters["source"])


def between(page: str, name: str) -> str:
    return (ROOT / page).read_text().split(f"<!-- {name}: begin -->\n")[1].split(f"\n<!-- {name}: end -->")[0]


def test_what_the_notebooks_read_is_what_the_pages_print():
    rows = embedded(load_runs(NOTEBOOKS / "runs" / "readme")).splitlines()
    assert len(rows) == 2 + 1 + 3 * 4
    assert set(rows) <= set(between("README.md", "table").splitlines())
    assert engine(NOTEBOOKS / "runs" / "engine") == between("docs/performance.md", "engine")
    assert markdown(read_benchmark(NOTEBOOKS / "runs" / "benchmark")) == between("docs/performance.md", "opt-1.3b")
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"dejavu\.analysis\.excerpt \S+ (\S+)", makefile)
    assert targets == [f"notebooks/runs/{name}" for name in ("readme", "engine", "benchmark")]


def test_the_runs_are_small_and_hold_no_text_of_others():
    files = [path for path in (NOTEBOOKS / "runs").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST
    assert {path.suffix for path in files} == {".json", ".yaml", ".csv", ".parquet"}
    for path in files:
        if path.name == SAMPLES:
            documents = pd.read_parquet(path)["document"]
            assert documents.str.fullmatch(r"[0-9a-f]{16}(-\d+)?|\w+-\d+|\d+").all(), documents.iloc[0]


def test_an_excerpt_keeps_rows_and_forgets_what_is_gone(tmp_path):
    source, target = tmp_path / "runs", tmp_path / "excerpt"
    for selector in ("dense", "oracle", "random"):
        (write_run(source / "evaluate", selector, 0.5 * (selector != "dense")) / "log.txt").write_text("a path")
    excerpt(source, target, [])
    kept = {path.name for path in target.rglob("*") if path.is_file()}
    assert kept == {"config.yaml", "result.json", SAMPLES}
    pd.testing.assert_frame_equal(load_runs(target), load_runs(source))
    excerpt(source, target, ["evaluate/dense-0", "evaluate/o*"])
    assert set(load_runs(target)["selector"]) == {"dense", "oracle"}
    with pytest.raises(DataError, match="no run that matches evaluate/x"):
        excerpt(source, target, ["evaluate/x"])
    assert len(load_runs(target)), "a mistyped pattern takes nothing away"


def test_the_predictors_figures(tmp_path):
    train = NOTEBOOKS / "runs" / "readme" / "train"
    assert recall_of_layers(read_bundle(train), tmp_path / "recall").stat().st_size > 10_000
    assert training_curve(train, tmp_path / "training").stat().st_size > 10_000
    with pytest.raises(DataError, match="no recall per layer"):
        recall_of_layers({}, tmp_path / "none")
    with pytest.raises(DataError, match=r"metrics.csv is missing or damaged: `dejavu train` makes it"):
        training_curve(tmp_path, tmp_path / "none")
    with pytest.raises(DataError, match=r"config.json is missing"):
        read_bundle(tmp_path)
    write_json(tmp_path / "bundle" / "config.json", {"id": "x"})
    assert read_bundle(tmp_path) == {"id": "x"}
    with pytest.raises(DataError, match="`dejavu benchmark` makes it"):
        read_benchmark(tmp_path)

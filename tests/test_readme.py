"""Every command in the README composes; those not marked long are executed, in their order, in an empty folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from dejavu.analysis.readme import BEGIN, END, main
from dejavu.analysis.runs import COLUMNS, typed
from dejavu.analysis.tables import write_table
from dejavu.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("dejavu ")]
# Smaller than what a reader would run, otherwise the very command; the demo of `make demo` is run small as well.
SMALL = ["corpus.tokens=8192", "tasks.limit=4", "trainer.epochs=1", "tracking=off"]


def dejavu(words: list[str], cwd: Path) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "dejavu"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def words_of(line: str) -> list[str]:
    return shlex.split(line.split("#")[0].replace("sweeps", str(ROOT / "sweeps")))[1:]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_composes(line, tmp_path):
    # A sweep composes one job at a time: here the first of each list of values.
    words = [re.sub(r"=([^,\[]*),.*", r"=\1", word) for word in words_of(line) if word != "-m"]
    result = dejavu([*words, "--cfg", "job"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "selector:" in result.stdout


def test_the_commands_not_marked_long_run_in_their_order(tmp_path):
    demo = dejavu(
        ["pipeline", "-cn", "demo", *SMALL, "pipeline.ratios=[0.75]", "pipeline.selectors=[static]"], tmp_path
    )
    assert demo.returncode == 0, demo.stderr
    for line in COMMANDS:
        if "long:" in line or "DIR" in line:
            continue
        result = dejavu([*words_of(line), *SMALL], tmp_path)
        assert result.returncode == 0, f"{line}\n{result.stderr}"
    assert len(list((tmp_path / "runs" / "sparsity_grid").glob("*/result.json"))) == 20


def test_numbers_in_the_readme_come_from_the_tables_command():
    table = README.split("<!-- table: begin -->")[1].split("<!-- table: end -->")[0]
    assert table.count("\n|") == 2 + 1 + 5 * 4, "header, dense, five ratios of four selectors"
    assert (ROOT / "docs" / "images" / "sparsity_vs_quality.png").exists()


def test_the_table_is_replaced_between_its_markers_only(tmp_path):
    metrics = [("pydocs", "bits_per_byte"), ("pydocs_token", "loss"), ("continuation_choice", "acc")]
    rows = [
        {
            "model": "m", "selector": selector, "mlp": ratio, "heads": ratio, "task": task, "metric": metric,
            "value": 1.5, "stderr": 0.01, "delta": None if selector == "dense" else 0.25, "delta_stderr": 0.002,
        }
        for selector, ratio in (("dense", 0.0), ("oracle", 0.5))
        for task, metric in metrics
    ]  # fmt: skip
    run, readme = tmp_path / "run", tmp_path / "README.md"
    (tmp_path / "docs").mkdir()
    write_table(typed(pd.DataFrame(rows).reindex(columns=COLUMNS)), run)
    (run / "sparsity_vs_quality.png").write_bytes(b"picture")
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main([str(run), str(readme)])
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n|") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| 50 % | oracle | 1.500 ± 0.010 | +0.2500 ± 0.0020 | 1.500 ± 0.010 |" in text
    assert "| 0 % | dense | 1.500 ± 0.010 | (dense: 1.500 ± 0.010) | 1.500 ± 0.010 |" in text
    assert (tmp_path / "docs" / "images" / "sparsity_vs_quality.png").read_bytes() == b"picture"
    readme.write_text("no markers")
    with pytest.raises(DataError, match="once each"):
        main([str(run), str(readme)])

"""Every command in the README composes; those not marked long are executed, in their order, in an empty folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    result = dejavu([*words_of(line), "--cfg", "job"], tmp_path)
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

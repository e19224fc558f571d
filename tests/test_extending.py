"""docs/extending.md, word for word: its changes are applied to a copy of the repository and its commands run there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
QUESTION = {"question": "What melts ice?", "choices": {"text": ["heat", "cold"], "label": ["A", "B"]}, "answerKey": "A"}
# Smaller than what a reader would run, otherwise the very command.
SMALL = ["tracking=off", "evaluation.recall_tokens=0"]


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def copied(folder: Path) -> Path:
    """What a change may touch, without what is built."""
    for name in ("src", "conf", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    rows = folder / "data" / "extras" / "arc_easy_test.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("".join(json.dumps(QUESTION | {"id": number}) + "\n" for number in range(2)))
    return folder


def test_each_section_is_short():
    assert list(SECTIONS) == ["A selector", "A task", "A task of lm-eval's", "A model family"]
    assert all(len(section.splitlines()) <= 100 for section in SECTIONS.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_the_changes_apply_and_the_commands_run(name, tmp_path):
    folder = copied(tmp_path / "copy")
    for change in blocks(SECTIONS[name], "diff"):
        applied = subprocess.run(["git", "apply"], input=change, text=True, cwd=folder, capture_output=True)
        assert applied.returncode == 0, applied.stderr
    (commands,) = blocks(SECTIONS[name], "sh")
    for line in commands.splitlines():
        program, *words = shlex.split(line.replace("DIR", str(folder / "data")))
        if program == "dejavu":
            words = ["-c", "from dejavu.cli import main; main()", *words, *SMALL]
        command = [sys.executable, *words]
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr + result.stdout
        if program == "dejavu":
            (written,) = (folder / "runs" / "evaluate").glob("*/result.json")
            record = json.loads(written.read_text())
            assert f"sparsity.selector={record['sparsity']['selector']}" in line
            assert set(record["metrics"]) == set(re.findall(r"tasks=(\w+)", line))

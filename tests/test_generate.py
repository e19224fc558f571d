"""`dejavu generate` through the command: text on stdout, speed and densities after it, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from dejavu.cli import main; main()"]
PROMPT = "The standard library"
DONE = r"(\d+) tokens, [\d.]+ tokens/s after the first \(\d+ ms\), neurons used ([\d.]+)%, heads used ([\d.]+)%"


def dejavu(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *arguments, "tracking=off"], capture_output=True, text=True, cwd=cwd, env=dict(os.environ)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder whose `runs` hold a small bundle for opt-tiny."""
    cwd = tmp_path_factory.mktemp("generate")
    for arguments in (["collect", "corpus.tokens=4096"], ["train", "trainer.epochs=1", "trainer.max_steps=5"]):
        result = dejavu(*arguments, cwd=cwd)
        assert result.returncode == 0, result.stderr
    return cwd


def record(cwd: Path, **wanted) -> dict:
    """The result of the one run whose record has these values."""
    found = [json.loads(path.read_text()) for path in cwd.glob("runs/generate/*/result.json")]
    (only,) = [result for result in found if all(result.get(key) == value for key, value in wanted.items())]
    return only


def test_text_is_streamed_and_told_again_from_the_record(trained):
    arguments = ["generate", "generate.new_tokens=12", "generate.ignore_end=true"]
    result = dejavu(*arguments, cwd=trained)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT) and len(result.stdout) > len(PROMPT) + 5
    tokens, mlp, heads = re.search(DONE, result.stderr).groups()
    assert (tokens, mlp, heads) == ("12", "25.0", "25.0")
    kept = record(trained, status="ok")
    assert result.stdout == PROMPT + kept["text"] + "\n"
    assert kept["sparsity"]["measured"] == {"mlp_density": 0.25, "head_density": 0.25}
    assert kept["timing"]["tokens"] == 12 and kept["timing"]["tokens_per_second"] > 0
    assert kept["inputs"]["bundle"] and kept["model"]["parameters"] > 5_000_000, "counted before they were freed"
    again = dejavu(*arguments, cwd=trained)
    assert again.returncode == 0 and "already done" in again.stderr
    assert again.stdout == result.stdout and "tokens/s" not in again.stderr


def test_drawn_text_depends_on_the_seed(trained):
    drawn = ["generate", "generate.new_tokens=12", "generate.temperature=0.8", "generate.top_k=20"]
    first, other = (dejavu(*drawn, f"seed={seed}", cwd=trained) for seed in (3, 4))
    for result in (first, other):
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(PROMPT) and re.search(DONE, result.stderr)
    assert first.stdout != other.stdout


def test_a_prompt_longer_than_the_context_is_refused_in_one_sentence(trained):
    result = dejavu("generate", f"generate.prompt='{'so it goes on ' * 300}'", cwd=trained)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert re.search(
        r"the prompt has \d+ tokens and generate.new_tokens=64 more are asked for, but the context", message
    )
    assert "shorten one of them" in message and result.stdout == ""


def test_the_dense_engine_needs_no_bundle(tmp_path):
    result = dejavu("generate", "sparsity.selector=dense", "generate.new_tokens=4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "neurons used 100.0%, heads used 100.0%" in result.stderr


@pytest.mark.parametrize("stage", ["generate", "evaluate"])
def test_a_device_without_kernels_is_named_in_one_sentence(stage, tmp_path):
    arguments = [stage, "backend=kernel", "sparsity.positions=decode", "device=cuda"]
    result = dejavu(*arguments, cwd=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr and result.stdout == ""
    message = "backend=kernel has no kernels for cuda, only for cpu: use device=cpu, or backend=simulate"
    assert result.stderr.strip().endswith(message)


def test_evaluate_scores_with_the_engine_and_says_how_long_a_token_took(trained):
    arguments = [
        "evaluate",
        "backend=kernel",
        "sparsity.positions=decode",
        "tasks=continuation_choice",
        "tasks.limit=4",
    ]
    result = dejavu(*arguments, "run_dir=scored", cwd=trained)
    assert result.returncode == 0, result.stderr
    kept = json.loads((trained / "scored" / "result.json").read_text())
    assert kept["timing"]["ms_per_token"] > 0 and "ms_per_token" not in kept["sparsity"]["measured"]
    assert kept["sparsity"]["measured"]["mlp_density"] == 0.25
    assert kept["sparsity"]["measured"]["sparse_token_share"] == 15 / 16

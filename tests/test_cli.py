"""The `dejavu` command: config errors in one sentence, before anything heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "lm_eval", "pytorch_lightning", "datasets", "wandb")
# Runs the command and says afterwards which heavy modules it imported.
PROBE = f"""
import sys
from dejavu.cli import main
code = 0
try:
    main()
except SystemExit as exit:
    code = exit.code
print("IMPORTED", [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def dejavu(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROBE, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "sparsity.mpl=0.5"], "sparsity.mpl does not exist: did you mean sparsity.mlp?"),
        (
            ["evaluate", "launcher=submitit_slurm", "launcher.additional_parameters={qos: long}"],
            "are added to launcher.additional_parameters with a plus: +launcher.additional_parameters.NAME=VALUE",
        ),
        (
            ["evaluate", "sparsity.mlp=1.5"],
            "sparsity.mlp=1.5 is out of range: it is the fraction that is NOT computed, from 0",
        ),
        (["evaluate", "sparsity.mlp=-0.1"], "from 0 to 1"),
        (["evaluate", "sparsity.mlp=nan"], "out of range"),
        (["evaluate", "sparsity.mlp=lots"], "sparsity.mlp: Value 'lots' of type 'str' could not be converted to Float"),
        (["evaluate", "model=opt-125"], "model=opt-125 is not known: choose one of llama, opt-1.3b, opt-2.7b"),
        (["evaluate", "tasks=[pydocs,nothing]"], "tasks=nothing is not known: choose one of c4, c4_token, cb"),
        (["evaluate", "sparsity.selector=best"], "sparsity.selector=best is not known: choose one of dense, random"),
        (["evaluate", "sparsity.rule=nonzero"], "needs sparsity.selector=oracle"),
        (["evaluate", "batch_size=0"], "batch_size=0 is out of range"),
        (["collect", "corpus=wikitext"], "data_root"),
        (["collect", "corpus=wikitext", "data_root=nowhere"], "nowhere"),
        (["evaluate", "tasks=wikitext_token", "sparsity.selector=dense"], "data_root"),
        (["evaluate", "tasks=paper", "data_root=nowhere"], "task winogrande, split validation: no file nowhere/wino"),
        (["evaluate", "sparsity.rule=threshold", "sparsity.selector=random"], "rule=threshold needs a selector"),
        (["train", "runs=nowhere"], "no cache for opt-tiny in nowhere: run `dejavu collect` first"),
        (["evaluate", "predictors=nowhere"], "predictors=nowhere holds no complete bundle"),
        (["evaluate", "-m", "sparsity.mlp=0.1,0.2"], "a multirun must name its predictors"),
        (["evaluate", "backend=kernel"], "backend=kernel decodes, so it needs sparsity.positions=decode, not all"),
        (
            ["evaluate", "backend=kernel", "sparsity.positions=decode", "sparsity.selector=oracle"],
            "backend=kernel has no selector oracle, which needs every unit computed",
        ),
        (["generate"], "no bundle for opt-tiny in runs: run `dejavu train` first or name one with predictors=DIR"),
        (["generate", "sparsity.selector=oracle"], "choose one of dense, predictor, static, random"),
        (["generate", "generate.top_k=0"], "generate.top_k=0 is out of range"),
        (["evalute"], "did you mean evaluate?"),
    ],
)
def test_errors_are_one_sentence_and_import_nothing_heavy(arguments, says, tmp_path):
    result = dejavu(*arguments, cwd=tmp_path)
    message, imported = result.stderr.strip().splitlines()[-2:]
    assert says in message
    assert message.startswith("dejavu")
    assert imported == "IMPORTED []"
    assert result.returncode == 1
    assert len({line for line in result.stderr.splitlines() if line.strip()}) == 2, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["evaluate", "--help"], ["evaluate", "--cfg", "job"], ["pipeline", "-cn", "demo", "--cfg", "job"]],
)
def test_help_and_cfg_import_nothing_heavy(arguments, tmp_path):
    result = dejavu(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip().splitlines()[-1] == "IMPORTED []"
    assert len(result.stdout) > 200
    assert list(tmp_path.iterdir()) == [], "looking must leave nothing behind"


def test_completion_knows_stages_groups_and_keys(tmp_path):
    def complete(line: str) -> list[str]:
        return dejavu("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line))).stdout.split()

    assert complete("dejavu ev") == ["evaluate"]
    assert "collect" in complete("dejavu ")
    assert "model=opt-tiny" in complete("dejavu evaluate model=opt-t")
    assert "sparsity.selector=" in complete("dejavu evaluate sparsity.sel")


def test_two_jobs_of_a_multirun_give_two_results_and_are_skipped_the_second_time(tmp_path):
    arguments = [
        "evaluate", "-m", "sparsity.selector=dense", "seed=0,1", "tasks=continuation_choice", "tasks.limit=8",
        "run_dir=sweep", "tracking=off",
    ]  # fmt: skip
    result = dejavu(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    jobs = sorted(path.parent.name for path in tmp_path.glob("sweep/*/result.json"))
    assert len(jobs) == 2 and all("seed=" in job for job in jobs)
    hashes = {json.loads(path.read_text())["config_hash"] for path in tmp_path.glob("sweep/*/result.json")}
    assert len(hashes) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/result.json")}
    again = dejavu(*arguments, cwd=tmp_path)
    assert again.stderr.count("already done") == 2
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/result.json")}


def test_a_failing_job_does_not_stop_the_others_and_the_exit_code_tells(tmp_path):
    result = dejavu(
        "evaluate", "-m", "sparsity.selector=oracle", "sparsity.positions=all", "sparsity.mlp=1.5,0.5", "seed=0",
        "tasks=continuation_choice", "tasks.limit=4", "run_dir=sweep", "tracking=off", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    results = {path.parent: json.loads(path.read_text()) for path in tmp_path.glob("sweep/*/result.json")}
    assert sorted(each["status"] for each in results.values()) == ["failed", "ok"], result.stderr
    (folder,) = (folder for folder, each in results.items() if each["status"] == "failed")
    assert "sparsity.mlp=1.5 is out of range" in results[folder]["error"]["message"]
    assert "Traceback" in (folder / "log.txt").read_text() and "mlp=1.5" in folder.name


def test_every_config_of_every_group_composes():
    """What the groups hold fits the schema and its ranges."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from dejavu.config import from_config
    from dejavu.schema import Config

    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for group in ("model", "corpus", "sparsity", "predictor", "trainer", "tasks", "tracking", "launcher"):
            for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
                from_config(compose("config", overrides=[f"{group}={path.stem}"]))
        for name in ("config", "pipeline", "demo", "pretrain"):
            from_config(compose(name))

"""The W&B dashboard: runs log every key that it names, its JSON is the golden file, publishing sends just that."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_offline

from dejavu.errors import DataError
from dejavu.schema import Config, Decode, Evaluation, Sparsity, Task, Tasks, Tracking
from dejavu.stages import evaluate
from dejavu.stages.dashboard import main_metrics
from dejavu.tracking.dashboard import as_json, dashboard, publish
from dejavu.tracking.identity import flattened, resolved
from dejavu.tracking.run import execute

GOLDEN = Path(__file__).with_name("dashboard.json")  # remade with: dejavu dashboard > tests/dashboard.json
RUN_ATTRIBUTES = {"displayName": "display_name", "state": "exit", "jobType": "job_type", "group": "run_group"}
CHOICE = Task(kind="continuation", context_tokens=4, continuation_tokens=2, choices=2)
# The tasks of conf/tasks/embedded.yaml, with fewer tokens.
TASKS = {
    "pydocs": Task(),
    "pydocs_token": Task(kind="token_perplexity"),
    "continuation_choice": CHOICE,
    "continuation_choice_blind": replace(CHOICE, with_context=False),
}


def dejavu(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from dejavu.cli import main; main()", *words]
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_API_KEY"} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_the_command_prints_the_golden_definition_and_leaves_nothing(tmp_path):
    result = dejavu("dashboard", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(GOLDEN.read_text())
    assert not list(tmp_path.iterdir())


def test_publishing_without_a_key_says_what_to_do(tmp_path):
    result = dejavu("dashboard", "publish", cwd=tmp_path, HOME=str(tmp_path / "home"))
    assert result.returncode == 1 and result.stdout == ""
    (message,) = result.stderr.strip().splitlines()
    assert message.startswith("dejavu dashboard: publishing needs a W&B account: run `wandb login`")


def strings(value: Any) -> Iterator[str]:
    """Every string of nested JSON, keys included."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)
    elif isinstance(value, str):
        yield value


def named(definition: dict[str, Any]) -> dict[str, set[str]]:
    """The keys that a definition names: of the summary, of the history, of media, of the config and of runs."""
    section = definition["spec"]["section"]
    panels = [panel for part in section["panelBankConfig"]["sections"] for panel in part["panels"]]
    (runs,) = section["runSets"]
    grouped = [*runs["grouping"], *(entry["key"] for entry in (*runs["sort"]["keys"], *runs["filters"]["filters"]))]
    found: dict[str, set[str]] = {"summary": set(), "config": set(), "run": set(), "history": set()}
    for key in grouped:
        found[key["section"]].add(key["name"])
    for text in strings(section):
        for word in text.replace("${", " ").replace("}", " ").split():
            kind, colon, key = word.partition(":")
            if colon and kind in found:
                found[kind].add(key.replace(".value.", "."))
    for panel in panels:
        lines = panel["viewType"] == "Run History Line Plot"
        found["history"] |= {panel["config"]["xAxis"], *panel["config"]["metrics"]} if lines else set()
        found["history"] |= set(panel["config"].get("mediaKeys", []))
    return found


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> dict[str, Any]:
    """What two real offline runs left: keys of their histories, config, and fields of their run records."""
    root = tmp_path_factory.mktemp("runs")
    few = {"evaluation": Evaluation(recall_tokens=64), "runs": str(root)}
    simulated = Config(tasks=Tasks(limit=1, run=TASKS), sparsity=Sparsity("oracle"), **few)
    decoded = Config(
        tasks=Tasks(limit=1, run={"continuation_choice": CHOICE}), backend="kernel",
        sparsity=Sparsity("random", positions="decode"), decode=Decode(threads=1), **few,
    )  # fmt: skip
    keys: set[str] = set()
    for name, config in (("simulated", simulated), ("decoded", decoded)):
        config.tracking = Tracking(mode="offline", group="sweep")
        execute("evaluate", evaluate.run, config, root / name, {"cache": None, "bundle": None})
        records = wandb_offline.records(root / name)
        for entry in records["history"]:
            keys |= {key.removesuffix("._type") for key in entry["item"]}
    (run,) = records["run"]
    return {"keys": keys, "config": dict(flattened(run["config"]["update"])), "run": {*run, *records}}


def test_every_key_is_one_that_real_runs_log(logged):
    found = named(json.loads(GOLDEN.read_text()))
    assert found["summary"] and found["history"] and found["config"]
    assert found["summary"] <= logged["keys"], found["summary"] - logged["keys"]
    assert found["history"] <= logged["keys"], found["history"] - logged["keys"]
    assert found["config"] <= logged["config"].keys() & dict(flattened(resolved(Config()))).keys()
    assert {RUN_ATTRIBUTES[name] for name in found["run"]} <= logged["run"]


def test_other_tasks_give_other_panels():
    tasks = {"piqa": Task(kind="lm_eval", corpus="piqa", metrics=["acc", "acc_norm"])}
    definition = as_json(dashboard(Tracking(), main_metrics(tasks)))
    assert {key for key in named(definition)["summary"] if "/" in key and key.startswith("p")} == {"piqa/acc"}
    titles = [part["name"] for part in definition["spec"]["section"]["panelBankConfig"]["sections"]]
    assert titles == ["Quality against sparsity", "Layers", "Sweep"], "no perplexity, no latency section"


class Server:
    """In place of W&B's client: keeps the mutation that it is sent."""

    app_url = "https://wandb.test"
    sent: dict[str, Any]

    def execute_graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        assert "upsertView" in query
        self.sent = variables
        return {"upsertView": {"view": {"name": variables["name"], "id": "v1"}}}


class Api:
    default_entity = "somebody"

    def __init__(self, server: Any) -> None:
        self._service_api = server


def test_what_is_published_is_what_is_printed(monkeypatch):
    server = Server()
    monkeypatch.setattr(wandb, "Api", lambda: Api(server))
    made = dashboard(Tracking(project="p"), main_metrics(TASKS))
    address = publish(made)
    assert address.startswith("https://wandb.test/somebody/p?nw=")
    assert (server.sent["entityName"], server.sent["projectName"]) == ("somebody", "p")
    sent = json.loads(server.sent["spec"])
    assert named({"spec": sent}) == named(as_json(made)) == named(json.loads(GOLDEN.read_text()))
    assert sent["section"]["settings"]["useRunsTableGroupingInPanels"] is False


def test_a_server_that_refuses_is_told_in_one_sentence(monkeypatch):
    class Refusing(Server):
        def execute_graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
            raise wandb.errors.CommError("permission denied")

    monkeypatch.setattr(wandb, "Api", lambda: Api(Refusing()))
    with pytest.raises(DataError, match=r"W&B did not take the dashboard .CommError: permission denied"):
        publish(dashboard(Tracking(entity="team"), main_metrics(TASKS)))

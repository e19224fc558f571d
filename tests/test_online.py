"""The long table from a W&B project, against a stub of the server.

The stub stands where W&B's client talks to its server: `wandb.Api.runs` gives the client's own classes, and what they
are answered is what real offline runs recorded.
"""

import json

import pandas as pd
import pytest
import wandb
import wandb_offline
from finished_runs import write_run
from wandb.apis.public.runs import Runs

from dejavu.analysis import load_runs, load_wandb
from dejavu.errors import DataError
from dejavu.schema import Config, Sparsity, Task, Tasks, Tracking
from dejavu.tracking.run import execute

KEYS = ("model", "sparsity", "predictor", "metrics")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two evaluations, each with an offline W&B run."""
    made, root = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("sweep")
    for selector, ratio in (("dense", 0.0), ("oracle", 0.5)):
        result = json.loads((write_run(made, selector, ratio) / "result.json").read_text())
        entry = result["metrics"]["pydocs"]["bits_per_byte"]
        if selector == "oracle":
            entry |= {"delta": 0.25, "delta_stderr": 0.01}
            result["metrics"]["pydocs_token"]["loss"]["stderr"] = None
        result["predictor"] = {"rank": 32, "tap": "overlap"}
        config = Config(
            sparsity=Sparsity(selector=selector, mlp=ratio, heads=ratio),
            tasks=Tasks(run={"pydocs": Task()}),
            tracking=Tracking(mode="offline", group="sweep"),
        )

        def body(run, result=result):
            run.record |= {key: result[key] for key in KEYS}

        inputs = {"cache": None, "bundle": None}
        execute(
            "evaluate", body, config, root / "sweep" / selector, inputs, [f"sparsity.ratio={ratio}", "dtype=float32"]
        )
    return root


class Server:
    """Answers the one query that listing runs makes, in the server's form."""

    def __init__(self, nodes):
        self.nodes, self.asked = nodes, {}

    def execute_graphql(self, query, variables):
        self.asked = variables
        edges = [{"node": node, "cursor": str(number)} for number, node in enumerate(self.nodes)]
        return {"project": {"runCount": len(edges), "runs": {"edges": edges, "pageInfo": {"hasNextPage": False}}}}


def node(recorded: dict, **changes) -> dict:
    """A run as the server describes it: config and summary are JSON texts, config values stand under `value`."""
    config = {key: {"value": value} for key, value in recorded["config"].items()}
    content = {
        "id": "r", "name": recorded["run_id"], "displayName": recorded["name"], "state": recorded["state"],
        "config": json.dumps(config), "summaryMetrics": json.dumps(recorded["summary"]), "systemMetrics": "{}",
        "tags": [], "projectId": "1", "jobType": "evaluate", "group": "sweep",
    }  # fmt: skip
    return content | changes


@pytest.fixture(scope="module")
def nodes(folder):
    return [node(wandb_offline.summary(path)) for path in sorted((folder / "sweep").iterdir())]


@pytest.fixture
def serve(monkeypatch):
    """Put a server with these runs behind wandb.Api."""

    def start(nodes):
        server = Server(nodes)

        class Api:
            def runs(self, path, filters=None, lazy=True):
                return Runs(server, *path.split("/"), filters=filters, lazy=lazy)

        monkeypatch.setattr(wandb, "Api", Api)
        return server

    return start


def test_the_table_from_wandb_is_the_one_from_the_folders(folder, nodes, serve):
    server = serve(nodes)
    online = load_wandb("us/dejavu", {"group": "sweep"})
    local, keys = load_runs(folder), ["run", "task", "metric"]  # W&B keeps no order of a run's tasks
    pd.testing.assert_frame_equal(*(table.sort_values(keys, ignore_index=True) for table in (online, local)))
    row = online[(online["selector"] == "oracle") & (online["metric"] == "bits_per_byte")].iloc[0]
    assert (row["delta"], row["delta_stderr"], row["n"], row["mlp"]) == (0.25, 0.01, 80, 0.5)
    assert row["stderr"] > 0 and row["rank"] == 32 and row["dtype"] == "float32"
    asked = json.loads(server.asked["filters"])
    assert asked == {"jobType": "evaluate", "state": "finished", "group": "sweep"}
    assert (server.asked["entity"], server.asked["project"]) == ("us", "dejavu")


def test_names_that_are_there_twice_get_their_id_and_other_runs_are_counted(nodes, serve, caplog):
    serve([nodes[0], nodes[0] | {"name": "again"}, nodes[1] | {"summaryMetrics": "{}"}])
    table = load_wandb("us/dejavu")
    assert set(table["run"]) == {f"sweep/dense@{nodes[0]['name']}", "sweep/dense@again"}
    assert "1 evaluations without a result" in caplog.text


def test_an_empty_project_is_named(serve):
    serve([])
    with pytest.raises(DataError, match="us/nothing holds no finished evaluation"):
        load_wandb("us/nothing")

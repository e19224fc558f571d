"""End to end over the embedded model: the demo's path without a network, and what goes wrong on the way."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import wandb_offline
import yaml
from tiny import tiny_opt

from dejavu.activations.cache import ActivationCache
from dejavu.activations.manifest import cache_id
from dejavu.analysis.activity import read_activity
from dejavu.analysis.lineage import lineage
from dejavu.corpora.sources import documents
from dejavu.evaluation.bench import Bench
from dejavu.models import EMBEDDED
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.taps import tap_source
from dejavu.predictors.bundle import load_bundle
from dejavu.predictors.manifest import bundle_id
from dejavu.schema import TAPS, Calibrate, Config, Corpus, Model, Task, Tasks, Tracking
from dejavu.sparsity.budget import make_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Predicted, Selector, Tokens
from dejavu.stages import calibrate, collect, evaluate, merge, train
from dejavu.stages.collect import corpus_blocks
from dejavu.tracking.run import RunFailed, execute

# The command with every connection that is not to this machine refused, as on a machine without a network.
OFFLINE = """
import socket, sys
connect = socket.socket.connect
def local_only(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise AssertionError(f"connected to {address}")
    return connect(self, address)
socket.socket.connect = local_only
from dejavu.cli import main
main()
"""
SMALL = ["corpus.tokens=8192", "tasks.limit=16", "trainer.epochs=1", "pipeline.ratios=[0.75]", "run_dir=demo"]


def offline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", OFFLINE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "TQDM_DISABLE": "1"})


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The folder of a small pipeline run without a network."""
    cwd = tmp_path_factory.mktemp("offline")
    result = offline("pipeline", "-cn", "demo", *SMALL, cwd=cwd)
    assert result.returncode == 0, result.stderr
    (cwd / "demo" / "stdout.txt").write_text(result.stdout)
    (cwd / "demo" / "stderr.txt").write_text(result.stderr)
    return cwd / "demo"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(Config())


def config(**changes) -> Config:
    """A small config in the demo's layout, without W&B."""
    small = Config(tracking=Tracking(mode="off"), corpus=Corpus(tokens=8192), tasks=Tasks(limit=4, run={"p": Task()}))
    return replace(small, **changes)


def failure(
    stage: str, body, settings: Config, folder: Path, cache: str | None = None, bundle: str | None = None
) -> str:
    """The message of a run that must fail; its record must say so too."""
    with pytest.raises(RunFailed) as error:
        execute(stage, body, settings, folder, {"cache": cache, "bundle": bundle})
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed" and result["error"]["message"]
    return str(error.value)


def test_the_demo_shows_the_table_and_the_pictures_path(demo):
    table = pd.read_csv(demo / "table.csv")
    assert set(table["selector"]) == {"dense", "oracle", "predictor", "static", "random"}
    assert set(table["task"]) == {"pydocs", "pydocs_token", "continuation_choice", "continuation_choice_blind"}
    sparse = table[table["selector"] != "dense"]
    assert sparse["delta"].notna().all() and sparse["delta_stderr"].notna().all()
    assert (sparse["mlp_density"] == 0.25).all() and (sparse["sparse_token_share"] == 1).all()
    assert (demo / "sparsity_vs_quality.png").stat().st_size > 10_000
    assert (demo / "train" / "layers.png").stat().st_size > 5_000
    assert len(read_activity(demo / "collect")) > 1000
    assert len(pd.read_csv(demo / "neighbours.csv")) == 7 * 3, "seven metrics, four selectors"
    shown = (demo / "stdout.txt").read_text()
    assert "predictor" in shown and "sparsity_vs_quality.png" in shown
    told = (demo / "stderr.txt").read_text()
    assert "Traceback" not in told and "Warning" not in told and "%|" not in told, told


def test_each_stage_has_its_own_closed_wandb_run(demo):
    folders = [demo, demo / "collect", demo / "train", *sorted((demo / "evaluate").iterdir())]
    assert len(folders) == 8
    for folder in folders[:4]:
        records = wandb_offline.records(folder)
        assert records["run"][0].get("run_group") == (None if folder == demo else "demo")
        assert int(records["exit"][0].get("exit_code", 0)) == 0


def test_an_evaluation_is_followed_to_the_cache_and_artifacts_wait_for_sync(demo):
    origin = lineage(demo / "evaluate" / "predictor-0.75", demo)
    (bundle,) = origin.parents
    (cache,) = bundle.parents
    assert (origin.kind, bundle.folder, cache.folder) == ("evaluate", demo / "train/bundle", demo / "collect/cache")
    assert json.loads((demo / "train" / "result.json").read_text())["bundle"]["id"] == bundle.id
    assert json.loads((demo / "collect" / "result.json").read_text())["cache"]["id"] == cache.id
    shown = offline("lineage", "run_dir=demo/evaluate/predictor-0.75", "runs=demo", cwd=demo.parent)
    assert f"\n    cache {cache.id}  demo/collect/cache\n" in shown.stdout and shown.returncode == 0
    for made in (bundle, cache):
        names = [entry["name"] for entry in wandb_offline.records(made.folder.parent)["artifact"]]
        assert f"{made.kind}-{made.id}" in names
    (run,) = wandb_offline.records(origin.folder)["run"]
    assert run["config"]["update"]["inputs"] == {"cache": None, "bundle": bundle.id}


def test_the_metrics_of_wandbs_sweeps_are_logged(demo):
    summary = set()
    for folder in (demo / "train", demo / "evaluate" / "dense"):
        for entry in wandb_offline.records(folder)["history"]:
            summary |= entry["item"].keys()
    sweeps = Path(__file__).resolve().parents[1] / "sweeps" / "wandb"
    assert {yaml.safe_load(path.read_text())["metric"]["name"] for path in sweeps.glob("*.yaml")} <= summary


def test_a_complete_pipeline_is_not_run_again_and_another_config_is_refused(demo):
    before = {path: path.stat().st_mtime_ns for path in demo.rglob("result.json")}
    again = offline("pipeline", "-cn", "demo", *SMALL, cwd=demo.parent)
    assert again.returncode == 0 and "already done" in again.stderr
    other = offline("pipeline", "-cn", "demo", *SMALL, "seed=1", cwd=demo.parent)
    assert other.returncode == 1 and "another config (seed differ)" in other.stderr
    assert before == {path: path.stat().st_mtime_ns for path in demo.rglob("result.json")}


class Listening(Selector):
    """Keeps the taps it is given and chooses everything."""

    reads_tap = True

    def __init__(self) -> None:
        self.given: dict[tuple[str, int], torch.Tensor] = {}

    def scores(self, choice):
        self.given[choice.kind, choice.layer] = choice.tap_ND.clone()
        return choice.contributions()


@pytest.mark.parametrize("tap", TAPS)
def test_the_recorded_tap_is_the_tap_given_at_evaluation(demo, loaded, tap):
    """Every element, layer and kind: what predictors learn from is what they are served (at ratio 0, equal batches)."""
    cache = ActivationCache(demo / "collect" / "cache")
    _, tokens_NT, _ = corpus_blocks(config(), loaded, config().corpus.tokens)
    batch = torch.from_numpy(tokens_NT[:16].astype(np.int64))
    listening = Listening()
    dense = make_budget(config().sparsity.__class__(ratio=0.0), loaded.anatomy)
    sparsifier = Sparsifier(loaded.anatomy, listening, dense, tap=tap, force=True)
    with torch.inference_mode(), sparsifier.attached():
        rows = batch.numel()
        sparsifier.begin(Tokens(torch.ones(rows, dtype=torch.bool), torch.zeros(rows).long(), torch.zeros(rows).long()))
        loaded.model(input_ids=batch, use_cache=False)
    assert len(listening.given) == 12
    for (kind, layer), tap_ND in listening.given.items():
        recorded = torch.from_numpy(np.array(cache.tap(tap_source(tap, kind, layer), slice(0, batch.numel()))))
        assert torch.equal(recorded, tap_ND.half()), (kind, layer)


def test_the_predictor_does_not_peek(demo, loaded):
    """Permuting fc1 of layer l does not change the neurons that the trained predictor chooses for layer l."""
    bundle, layer = load_bundle(demo / "train" / "bundle"), 3
    batch = torch.randint(4, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    budget = make_budget(config().sparsity, loaded.anatomy)
    sets = []
    for permute in (False, True):
        model = copy.deepcopy(loaded.model)
        if permute:
            fc1, order = model.model.decoder.layers[layer].fc1, torch.randperm(1024)
            fc1.weight.data, fc1.bias.data = fc1.weight.data[order], fc1.bias.data[order]
        sparsifier = Sparsifier(anatomy(model), Predicted(bundle, loaded.device), budget, record=True)
        with torch.inference_mode(), sparsifier.attached():
            sparsifier.begin(Tokens(torch.ones(80, dtype=torch.bool), torch.zeros(80).long(), torch.zeros(80).long()))
            model(input_ids=batch, use_cache=False)
        sets.append(sparsifier.masks["mlp", layer])
    assert torch.equal(*sets)


def test_no_scored_document_was_trained_on(demo):
    trained = set(load_bundle(demo / "train" / "bundle").config["document_hashes"])
    scored = {document.hash for document in documents("pydocs", "test", None, Corpus())}
    assert trained and not trained & scored


def test_a_bundle_that_saw_a_scored_document_is_refused(demo, tmp_path, monkeypatch):
    bundle = demo / "train" / "bundle"
    seen = load_bundle(bundle).config["document_hashes"][0]
    monkeypatch.setattr(
        "dejavu.evaluation.tasks.documents",
        lambda *arguments: [d for d in documents("pydocs", "train", None, Corpus()) if d.hash == seen],
    )
    message = failure(
        "evaluate", evaluate.run, config(predictors=str(bundle)), tmp_path / "a", bundle=bundle_id(bundle)
    )
    assert "that the predictors at" in message and "were trained on" in message and seen in message


def test_a_truncated_cache_is_refused(demo, tmp_path):
    shutil.copytree(demo / "collect" / "cache", tmp_path / "cache")
    victim = max((tmp_path / "cache").glob("*.f16"), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size - 2)
    settings = config(cache=str(tmp_path / "cache"))
    message = failure("train", train.run, settings, tmp_path / "a", cache=cache_id(tmp_path / "cache"))
    assert victim.name in message and "collect" in message
    assert not (tmp_path / "a" / "bundle").exists()


@pytest.fixture
def other_model(tmp_path) -> Path:
    """A model of the embedded one's shape with other weights, as a folder."""
    from transformers import AutoTokenizer

    sizes = {"hidden_size": 256, "word_embed_proj_dim": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = tiny_opt(vocab_size=4096, ffn_dim=1024, max_position_embeddings=512, **sizes)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(EMBEDDED / "opt-tiny").save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_a_bundle_of_another_model_is_refused_with_the_reason(demo, other_model, tmp_path):
    bundle = demo / "train" / "bundle"
    settings = config(model=Model(name="other", path=str(other_model)), predictors=str(bundle))
    message = failure("evaluate", evaluate.run, settings, tmp_path / "a", bundle=bundle_id(bundle))
    assert "was trained on other weights (opt-tiny, fingerprint" in message


def test_a_checkpoint_with_missing_tensors_is_refused(other_model, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(other_model / "model.safetensors")
    del weights["model.decoder.layers.2.fc1.weight"]
    save_file(weights, other_model / "model.safetensors", {"format": "pt"})
    settings = config(model=Model(name="other", path=str(other_model)))
    message = failure("collect", collect.run, settings, tmp_path / "a")
    assert "do not fill the model" in message and "layers.2.fc1.weight" in message


def test_a_logit_that_is_not_a_number_is_refused(other_model, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(other_model / "model.safetensors")
    weights["model.decoder.final_layer_norm.bias"][0] = float("nan")
    save_file(weights, other_model / "model.safetensors", {"format": "pt"})
    settings = config(model=Model(name="other", path=str(other_model)))
    settings.sparsity.selector = "dense"
    assert "not finite" in failure("evaluate", evaluate.run, settings, tmp_path / "a")


def test_a_corpus_shorter_than_a_block_is_refused(tmp_path):
    message = failure("collect", collect.run, config(corpus=Corpus(tokens=100)), tmp_path / "a")
    assert "less than one block of 256" in message


def test_an_empty_corpus_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dejavu.corpora.sources.cached_pydocs", lambda: {"train": [], "test": []})
    from dejavu.corpora.sources import load

    load.cache_clear()
    assert "has no documents" in failure("collect", collect.run, config(), tmp_path / "a")
    load.cache_clear()


def test_positions_that_leave_nothing_sparse_are_refused(tmp_path):
    settings = config()
    settings.sparsity = replace(settings.sparsity, selector="oracle", positions="last_fraction", fraction=0.0)
    assert "leaves no scored token sparse" in failure("evaluate", evaluate.run, settings, tmp_path / "a")


# Run in a child, whose limit on file sizes stands for a full disk.
FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
from dejavu.cli import main
main()
"""


def test_a_full_disk_is_one_sentence_and_the_run_can_go_on(tmp_path):
    arguments = ["collect", "corpus.tokens=8192", "run_dir=a", "tracking=off"]
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ),
    )
    assert child.returncode == 1
    assert "Traceback" not in child.stderr
    assert "File too large" in child.stderr and "dejavu collect failed" in child.stderr, child.stderr
    assert json.loads((tmp_path / "a" / "result.json").read_text())["status"] == "failed"
    again = offline(*arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert ActivationCache(tmp_path / "a" / "cache").tokens == 8192


@pytest.mark.parametrize("stage", ["calibrate", "merge"])
def test_a_stage_that_makes_a_bundle_makes_it_again_when_forced(demo, tmp_path, monkeypatch, stage):
    """A bundle is never changed, but a run's own folder is the run's: train is forced in another test."""
    bundle = str(demo / "train" / "bundle")
    settings = {
        "calibrate": config(predictors=bundle, calibrate=Calibrate(targets=[0.25], levels=[0.5], tokens=512)),
        "merge": config(merge=[bundle]),
    }[stage]
    body, made = {"calibrate": calibrate.run, "merge": merge.run}[stage], tmp_path / "run"
    inputs = {"cache": None, "bundle": bundle_id(bundle)}
    tried = []
    alone = Bench.alone
    monkeypatch.setattr(Bench, "alone", lambda self, *group: tried.append(group) or alone(self, *group))
    ids = []
    for force in (False, True):
        execute(stage, body, replace(settings, force=force), made, inputs)
        ids.append(bundle_id(made / "bundle"))
        assert len(tried) == (12 if stage == "calibrate" else 0)
        tried.clear()
    assert ids[0] == ids[1]
    assert not (made / "losses.partial.csv").exists()

"""The way to a hub's models without a hub: every form of folder, OPT's own tokenizer, and the hub client's cache."""

import json
import os
import subprocess
import sys

import hub_folders
import pytest
import torch
from rows import data_folder

from dejavu.errors import DataError
from dejavu.models.load import fingerprint, load_model
from dejavu.schema import Config, Model

FORMS = ("bin", "bin with head", "sharded")


@pytest.fixture
def vocabulary() -> int:
    return 4096


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", hub_folders.SHAPES)
def test_every_form_of_folder_gives_the_same_model(name, form, tmp_path, vocabulary):
    model = hub_folders.build(name, vocabulary)
    hub_folders.write_model(tmp_path, model, form)
    hub_folders.write_embedded_tokenizer(tmp_path)
    loaded = load_model(Config(model=Model(name=name, path=str(tmp_path))))
    assert loaded.fingerprint == fingerprint(model)
    assert loaded.model.dtype == torch.float32
    assert loaded.anatomy.post_norm == (name == "opt-350m") and loaded.anatomy.layers in (12, 24)
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.get_input_embeddings().weight.data_ptr(), "tied"
    ids = torch.tensor([[2, 50, 60, 70]])
    expected = model.float()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(loaded.model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_tensor_is_refused_in_every_form(form, tmp_path, vocabulary):
    model = hub_folders.build("opt-125m", vocabulary)
    hub_folders.write_model(tmp_path, model, form)
    hub_folders.write_embedded_tokenizer(tmp_path)
    lost = "model.decoder.layers.7.fc2.weight"
    if form == "sharded":
        from safetensors.torch import load_file, save_file

        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        shard = tmp_path / index["weight_map"].pop(lost)
        weights = load_file(shard)
        del weights[lost]
        save_file(weights, shard, {"format": "pt"})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        del weights[lost]
        torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"do not fill the model .*layers\.7\.fc2\.weight"):
        load_model(Config(model=Model(name="x", path=str(tmp_path))))


def test_a_pickle_that_holds_more_than_tensors_is_not_read(tmp_path, vocabulary):
    model = hub_folders.build("opt-125m", vocabulary)
    hub_folders.write_model(tmp_path, model, "bin")
    torch.save({"model.decoder.embed_tokens.weight": os.system}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_model(Config(model=Model(name="x", path=str(tmp_path))))


@pytest.mark.data
def test_opts_own_tokenizer_starts_a_text_with_one_separator(tmp_path, data_root):
    model = hub_folders.build("opt-125m", 50_272)
    hub_folders.write_model(tmp_path, model, "bin")
    hub_folders.write_opt_tokenizer(tmp_path, data_root)
    loaded = load_model(Config(model=Model(name="x", path=str(tmp_path))))
    # The test vector of transformers' own OPT tokenizer.
    assert loaded.tokenizer("A photo of a cat")["input_ids"] == [2, 250, 1345, 9, 10, 4758]
    assert loaded.anatomy.separator == 2


def test_evaluate_by_the_models_name_reads_the_hub_clients_cache(tmp_path, vocabulary):
    """`model=opt-125m tasks=...` as a user types it, with the hub's folder in the cache and no network."""
    snapshot = hub_folders.as_hub_cache(tmp_path / "home", "facebook/opt-125m")
    hub_folders.write_model(snapshot, hub_folders.build("opt-125m", vocabulary), "bin")
    hub_folders.write_embedded_tokenizer(snapshot)
    data = data_folder(tmp_path / "data")
    command = [
        sys.executable, "-c", "from dejavu.cli import main; main()", "evaluate", "model=opt-125m",
        "tasks=[winogrande,c4_token]",
        f"data_root={data}", "sparsity.selector=oracle", "sparsity.mlp=0.65", "sparsity.heads=0.5", "run_dir=run",
        "tracking=off",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["model"]["name"] == "opt-125m" and record["metrics"]["winogrande"]["acc"]["n"] == 6
    entry = record["metrics"]["c4_token"]["token_perplexity"]
    assert entry["note"] == "C4: 6 documents of this workbench's own, not the published sample"
    assert {"delta", "delta_stderr", "stderr", "n", "value"} <= entry.keys()
    assert record["sparsity"]["measured"]["head_density"] == 0.5
    assert len(record["sparsity"]["measured"]["mlp_recall_of_mass_per_layer"]) == 12
    doctor = subprocess.run(
        [*command[:3], "doctor", "model=opt-125m"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert doctor.returncode == 0 and REVISION_FOLDER in doctor.stdout.replace("\n", ""), doctor.stdout


REVISION_FOLDER = "models--facebook--opt-125m"


@pytest.mark.long
def test_the_hubs_opt_125m_has_its_known_perplexity():
    """For people with a hub: DEJAVU_LONG=1. 27.7 is what the pruning papers report at 2,048 tokens."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        pytest.skip("needs the hub: set HF_HUB_OFFLINE=0")
    from dejavu.evaluation.metrics import measure
    from dejavu.evaluation.scoring import Scorer
    from dejavu.evaluation.tasks import run_task
    from dejavu.schema import Task

    config = Config(model=Model(name="opt-125m", hub="facebook/opt-125m"))
    samples = run_task("w", Task(kind="token_perplexity", corpus="wikitext"), config, Scorer(load_model(config)))
    assert measure(samples, ["token_perplexity"])["token_perplexity"]["value"] == pytest.approx(27.7, abs=0.2)

"""Bundles that leave the machine: saved elsewhere, downloaded, uploaded, merged."""

from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from bundles import untrained_bundle
from tiny import VOCABULARY, tiny_opt

from dejavu.activations.cache import ActivationCache
from dejavu.activations.collect import cache_head, collect
from dejavu.activations.writer import CacheWriter
from dejavu.errors import ConfigError, DataError
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel
from dejavu.predictors.bundle import Bundle, load_bundle, recalibrated
from dejavu.predictors.manifest import CONFIG, WEIGHTS
from dejavu.predictors.merge import merge_bundles
from dejavu.predictors.share import CARD, card, from_pretrained, push_to_hub, save_pretrained
from dejavu.predictors.train import chosen_layers, train_bundle
from dejavu.schema import Collect, Config


@pytest.fixture(scope="module")
def model():
    return tiny_opt()


def test_a_bundle_saved_elsewhere_is_the_same_and_has_a_card(model, tmp_path):
    bundle = untrained_bundle(model, tmp_path / "bundle")
    saved = save_pretrained(bundle, tmp_path / "elsewhere")
    again = from_pretrained(tmp_path / "elsewhere")
    assert saved.id == again.id == bundle.id
    assert sorted(path.name for path in saved.folder.iterdir()) == sorted([CARD, CONFIG, WEIGHTS])
    text = (saved.folder / CARD).read_text()
    assert f"- bundle: {bundle.id}" in text and "tiny, fingerprint" in text and "layers with predictors: 2 of 2" in text
    with pytest.raises(DataError, match="bundles are never changed"):
        save_pretrained(bundle, tmp_path / "elsewhere")


def test_a_card_has_the_tables_that_a_bundle_has(model, tmp_path):
    bundle = untrained_bundle(model, tmp_path / "bundle")
    point = {"skipped": 0.5, "mlp": [32, 32], "heads": [2, 2], "increase": 0.0123, "thresholds": {}}
    calibration = {"selector": "predictor", "tokens": 4096, "corpus": "noise", "curve": [point]}
    described = recalibrated(bundle, tmp_path / "new", calibration, []).config
    described["metrics"] = {"validation_tokens": 7, "layers": {"mlp.0": {"recall_of_mass": {"0.1": 0.5, "0.25": 0.75}}}}
    text = card(described)
    assert (
        "| 50.0% | +0.0123 |" in text
        and "| mlp.0 | 0.500 | 0.750 |" in text
        and "| 10% computed | 25% computed |" in text
    )


def test_a_bundle_comes_from_the_hub(model, tmp_path, monkeypatch):
    bundle = untrained_bundle(model, tmp_path / "bundle")
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(bundle.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert from_pretrained("somebody/predictors", "v1").id == bundle.id
    assert asked == [("somebody/predictors", "v1", [CONFIG, WEIGHTS])]


def test_a_name_that_is_nowhere_is_told():
    with pytest.raises(DataError, match="is no folder, and the hub gives no such bundle"):
        from_pretrained("somebody/predictors")  # the tests have no hub


def test_a_bundle_goes_to_the_hub_with_its_card(model, tmp_path, monkeypatch):
    bundle, done = untrained_bundle(model, tmp_path / "bundle"), []

    class Api:
        def create_repo(self, name, private, exist_ok):
            done.append(("create", name, private))

        def upload_file(self, path_or_fileobj, path_in_repo, repo_id):
            done.append(("file", path_in_repo, path_or_fileobj.decode()))

        def upload_folder(self, repo_id, folder_path, allow_patterns):
            done.append(("folder", folder_path, allow_patterns))
            return SimpleNamespace(commit_url="there")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push_to_hub(bundle, "somebody/predictors", private=True) == "there"
    assert done == [
        ("create", "somebody/predictors", True), ("file", CARD, card(bundle.config)),
        ("folder", bundle.folder, [CONFIG, WEIGHTS]),
    ]  # fmt: skip


def test_bundles_of_some_layers_become_one(model, tmp_path):
    parts = [untrained_bundle(model, tmp_path / str(layer), layers=[layer]) for layer in (0, 1)]
    whole = untrained_bundle(model, tmp_path / "whole")
    merged = merge_bundles(parts[::-1], tmp_path / "merged")
    again = load_bundle(tmp_path / "merged")
    assert again.layers == (0, 1) and again.config["merged_from"] == [part.id for part in parts[::-1]]
    for key in ((kind, layer) for kind in ("mlp", "heads") for layer in (0, 1)):
        assert torch.equal(again.predictor(*key).up.weight, whole.predictor(*key).up.weight)
    assert merged.id == again.id


def test_what_cannot_be_one_is_refused_by_name(model, tmp_path):
    first = untrained_bundle(model, tmp_path / "0", layers=[0])
    with pytest.raises(DataError, match="no bundle has the layers 1: train them too"):
        merge_bundles([first], tmp_path / "merged")
    with pytest.raises(DataError, match=r"layer 0 is in .*/0 and in .*/whole"):
        merge_bundles([first, untrained_bundle(model, tmp_path / "whole")], tmp_path / "merged")
    with pytest.raises(DataError, match="differ in rank"):
        merge_bundles([first, untrained_bundle(model, tmp_path / "rank", rank=4, layers=[1])], tmp_path / "merged")
    with pytest.raises(DataError, match="nothing to merge"):
        merge_bundles([], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_model_recorded_layer_by_layer_gets_one_bundle(model, tmp_path):
    """Each part: some layers recorded, their predictors trained, and no file of the others."""
    loaded = LoadedModel("tiny", model, None, anatomy(model))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (16, 16), dtype=np.int32)
    numbers = np.zeros_like(ids) + np.arange(16, dtype=np.int32)[:, None]
    parts, config = [], Config(device="cpu")
    config.trainer.epochs, config.trainer.batch_tokens = 1, 64
    for layers in ([0], [1], None):
        how, place = Collect(layers=layers), tmp_path / str(layers)
        head = cache_head(loaded, ids, numbers, 8, how) | {
            "corpus": {"name": "noise", "hash": "0"}, "document_hashes": [str(n) for n in range(16)],
        }  # fmt: skip
        with CacheWriter(place / "cache", head) as writer:
            collect(loaded, ids, numbers, writer, 8, how)
            writer.finish()
        parts.append(train_bundle(ActivationCache(place / "cache"), config, place)[0])
    first, second, whole = parts
    with pytest.raises(DataError, match="knows nothing of layer 1"):
        first.mean_contribution("mlp", 1)
    merge_bundles([first, second], tmp_path / "merged")
    merged = load_bundle(tmp_path / "merged")
    for kind in ("mlp", "heads"):
        for layer in (0, 1):
            assert torch.equal(merged.mean_contribution(kind, layer), whole.mean_contribution(kind, layer))
            assert torch.equal(merged.predictor(kind, layer).up.weight, whole.predictor(kind, layer).up.weight)
    with pytest.raises(ConfigError, match="names 1, which the cache does not hold"):
        chosen_layers([1], ActivationCache(tmp_path / "[0]" / "cache"))


def test_the_card_names_the_bundle_beside_it(model, tmp_path):
    """Also when that is another than was loaded, as with one of an older format."""
    bundle = untrained_bundle(model, tmp_path / "bundle")
    older = Bundle(bundle.folder, bundle.config | {"id": "of-format-1"}, bundle.tensors)
    saved = save_pretrained(older, tmp_path / "saved")
    text = (tmp_path / "saved" / CARD).read_text()
    assert f"- bundle: {saved.id}" in text and "of-format-1" not in text

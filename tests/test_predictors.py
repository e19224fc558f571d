"""Predictors: exact top-k, honest metrics, a split without leaks, training that learns, bundles true to their word."""

import json
import logging
import math
import os
import pickletools
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, tiny_opt

from dejavu.activations.cache import ActivationCache
from dejavu.activations.collect import cache_head, collect
from dejavu.activations.writer import CacheWriter
from dejavu.errors import ConfigError, DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel, fingerprint
from dejavu.models.taps import TapSource
from dejavu.models.topk import kept, top_k_mask
from dejavu.predictors import labels
from dejavu.predictors.bundle import load_bundle
from dejavu.predictors.data import CacheData, ShuffledRuns, runs, split_rows
from dejavu.predictors.manifest import CONFIG, WEIGHTS, bundle_id, content_id, file_digest
from dejavu.predictors.metrics import DENSITIES, SelectionRecall
from dejavu.predictors.module import PredictorModule
from dejavu.predictors.network import Predictor, default_rank
from dejavu.predictors.statistics import UnitStatistics, collect_statistics
from dejavu.predictors.train import train_bundle, train_predictors
from dejavu.schema import LABELS, WEIGHTINGS, Collect, Config
from dejavu.schema import Predictor as Settings

LAYERS, WIDTH, NEURONS, HEADS, TOKENS, DOCUMENTS = 2, 16, 64, 4, 4000, 40


class FakeCache:
    """Contributions that follow from the tap `overlap`: ReLU neurons of r_l, head norms of m_{l-1}."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.id, self.tokens, self.layers, self.width, self.neurons, self.heads = (
            "cache0", TOKENS, LAYERS, WIDTH, NEURONS, HEADS,
        )  # fmt: skip
        self.recorded = list(range(LAYERS))
        self.documents = np.sort(random.integers(0, DOCUMENTS, TOKENS)).astype(np.uint32)
        self.manifest = {
            "model": {"name": "fake", "fingerprint": "f" * 16, "parameters": 1},
            "corpus": {"name": "noise", "hash": "c" * 16},
            "document_hashes": [f"{number:016x}" for number in range(DOCUMENTS)],
        }
        self.taps = {
            TapSource(point, layer): (3 * random.standard_normal((TOKENS, WIDTH))).astype(np.float16)
            for point in ("residual", "middle")
            for layer in range(LAYERS)
        }
        self.mlp_weights, self.head_weights = (
            random.standard_normal((LAYERS, WIDTH, units)) / 12 for units in (NEURONS, HEADS)
        )

    def tap(self, source, rows):
        return self.taps[source][rows]

    def mlp(self, layer, rows):
        read = self.tap(TapSource("residual", layer), rows).astype(np.float32)
        return np.maximum(read @ self.mlp_weights[layer] - 0.8, 0).astype(np.float32)

    def heads_of(self, layer, rows):
        source = TapSource("middle", layer - 1) if layer else TapSource("residual", 0)
        return np.abs(self.tap(source, rows).astype(np.float32) @ self.head_weights[layer]).astype(np.float32)


def config(epochs: int = 6, layers: list[int] | None = None, **trainer) -> Config:
    made = Config(device="cpu")
    made.predictor.rank = made.predictor.first_rank = 32
    made.predictor.layers = layers
    for key, value in ({"epochs": epochs, "batch_tokens": 128, "learning_rate": 0.01} | trainer).items():
        setattr(made.trainer, key, value)
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(bundle, metrics, folder) of one training on the fake cache."""
    folder = tmp_path_factory.mktemp("train")
    return *train_bundle(FakeCache(), config(), folder), folder


# --- the counting rule and exact top-k


@pytest.mark.parametrize(
    ("ratio", "units", "k"),
    [
        (0.75, 8, 2), (1, 8, 0), (1.0, 1024, 0), (0.9, 8, 1), (0, 8, 8), (0.999, 8, 1), (0.5, 3, 2), (0.5, 1, 1),
        (0.9, 25, 3), (0.55, 10, 5), (0.45, 10, 6), (1 - 0.41, 50, 21), (0.85, 10, 2), (1 - 3 / 7, 7, 3),
    ],
)  # fmt: skip
def test_kept_rounds_half_up_and_keeps_at_least_one(ratio, units, k):
    assert kept(ratio, units) == k


@given(st.integers(0, 999), st.integers(1, 60_000))
def test_kept_is_the_rule_in_exact_arithmetic(thousandths, units):
    exact = math.floor((1 - Fraction(thousandths, 1000)) * units + Fraction(1, 2))
    assert kept(thousandths / 1000, units) == max(1, exact)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_kept_refuses_what_is_no_ratio(ratio):
    with pytest.raises(ValueError, match="NOT computed"):
        kept(ratio, 8)


FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf])
ANY = st.floats(allow_nan=False, width=32)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 12)).flatmap(
        lambda shape: numpy_st.arrays(np.float32, shape, elements=st.one_of(FEW, ANY))
    ),
    st.data(),
)
def test_top_k_mask_equals_a_stable_sort(scores, data):
    k = data.draw(st.integers(0, scores.shape[1]))
    expected = np.zeros(scores.shape, dtype=bool)
    for row, marks in zip(scores, expected, strict=True):
        marks[sorted(range(len(row)), key=lambda unit: (-row[unit], unit))[:k]] = True
    np.testing.assert_array_equal(top_k_mask(torch.from_numpy(scores), k).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("relu", [False, True])
def test_top_k_mask_on_many_rows_and_types(dtype, relu):
    scores = torch.randn(1500, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores = (scores - 1.3).relu() if relu else scores
    for k in (1, 30, 75, 299, 300):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        expected = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, order, True)
        assert torch.equal(top_k_mask(scores, k), expected)


def test_top_k_mask_refuses_nan_and_impossible_counts():
    scores = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="5 of 4"):
        top_k_mask(scores, 5)
    scores[1, 2] = math.nan
    for k in (0, 1, 4):
        with pytest.raises(FloatingPointError, match="NaN"):
            top_k_mask(scores, k)


def test_top_k_mask_of_no_tokens():
    assert top_k_mask(torch.zeros(0, 4), 2).shape == (0, 4)


# --- network and labels


def test_predictor_takes_any_float_type_and_counts_its_cost():
    predictor = Predictor(WIDTH, NEURONS)
    assert predictor.rank == default_rank(WIDTH) == 2 and default_rank(4) == 1
    tap = torch.randn(5, WIDTH)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert predictor(tap.to(dtype)).shape == (5, NEURONS)
        assert predictor(tap.to(dtype)).dtype == torch.float32
    assert predictor.bytes(4) == 4 * (2 * WIDTH + WIDTH * 2 + 2 + 2 * NEURONS + NEURONS)
    assert predictor.flops() == 2 * (WIDTH * 2 + 2 * NEURONS)
    torch.testing.assert_close(predictor(1000 * tap), predictor(tap), rtol=1e-3, atol=1e-3)


def statistics_of(c: torch.Tensor) -> UnitStatistics:
    return UnitStatistics(c.mean(0), c.sqrt().mean(0), (c > 0).float().mean(0))


def test_amounts_keep_the_order_and_have_one_scale():
    c = torch.tensor([[0.0, 1.0, 4.0], [9.0, 0.0, 16.0]])
    statistics, amount = statistics_of(c), Settings(label="amount")
    np.testing.assert_allclose(labels.targets(c, statistics, amount) ** 2 * 5, c, rtol=1e-6)
    assert labels.loss(labels.targets(c, statistics, amount), c, statistics, amount) == 0
    torch.testing.assert_close(labels.initial_bias(statistics, amount), labels.targets(c, statistics, amount).mean(0))


def test_units_worth_computing_contribute_and_are_half_at_most():
    """A unit that contributes four times as much weighs twice as much; one that is not worth it weighs 1."""
    c = torch.tensor([[0.0, 0.0, 0.0, 4.0], [3.0, 9.0, 16.0, 1.0]])
    statistics = statistics_of(c)
    assert labels.targets(c, statistics, Settings()).tolist() == [[0, 0, 0, 1], [0, 1, 1, 0]]
    indifferent = torch.zeros(2, 4)
    weights = 5 + sum(math.sqrt(value / float(c.mean())) for value in (4, 9, 16))
    assert labels.loss(indifferent, c, statistics, Settings()) == pytest.approx(math.log(2) * weights / 8)
    start = labels.initial_bias(statistics, Settings())
    assert start.argsort().tolist() == c.mean(0).argsort().tolist(), "before training the order is static's"


@pytest.mark.parametrize("active", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_the_default_loss_is_a_weighted_cross_entropy(active, scale):
    """Value and gradient, as the chain of operators gives them; far from 0 as well, where log(0) lurks."""
    torch.manual_seed(0)
    c = torch.rand(40, 24) * (torch.rand(40, 24) < active)
    statistics = statistics_of(c)
    target = labels.targets(c, statistics, Settings())
    weight = torch.where(target > 0, (c / statistics.scale).sqrt(), 1.0)
    mine = (scale * torch.randn(40, 24)).requires_grad_()
    chain = mine.detach().clone().requires_grad_()
    found = labels.loss(mine, c, statistics, Settings())
    wanted = (torch.nn.functional.binary_cross_entropy_with_logits(chain, target, reduction="none") * weight).mean()
    torch.testing.assert_close(found, wanted)
    (3 * found).backward()
    (3 * wanted).backward()
    torch.testing.assert_close(mine.grad, chain.grad)
    assert bool(mine.grad.isfinite().all())


def test_labels_of_a_silent_layer_are_zero():
    silent = UnitStatistics(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    for label in ("contribution", "amount", "nonzero"):
        assert labels.targets(torch.zeros(2, 3), silent, Settings(label=label)).eq(0).all()
        assert bool(labels.initial_bias(silent, Settings(label=label)).isfinite().all())


def test_the_references_labels_and_weights_are_what_they_say():
    c = torch.tensor([[0.0, 1.0, 4.0, 2.0], [9.0, 0.0, 16.0, 0.0]])
    statistics = UnitStatistics(c.mean(0), c.sqrt().mean(0), (c > 0).float().mean(0))
    nonzero, top = Settings(label="nonzero"), Settings(label="top", label_density=0.25)
    assert labels.targets(c, statistics, nonzero).tolist() == [[0, 1, 1, 1], [1, 0, 1, 0]]
    assert labels.targets(c, statistics, top).tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]
    start = labels.initial_bias(statistics, nonzero).sigmoid()
    torch.testing.assert_close(start, torch.tensor([0.5, 0.5, 0.999, 0.5]))
    torch.testing.assert_close(labels.initial_bias(statistics, top).sigmoid(), torch.full((4,), 0.25))
    scores = torch.zeros(2, 4)
    assert labels.loss(scores, c, statistics, nonzero) == pytest.approx(math.log(2))
    weighted = Settings(label="nonzero", weighting="contribution")
    assert labels.loss(scores, c, statistics, weighted) == pytest.approx(math.log(2)), "weights have mean 1"
    scores[:, 1] = 3.0  # wrong for a unit that matters little
    assert labels.loss(scores, c, statistics, weighted) < labels.loss(scores, c, statistics, nonzero)


FORMS = {
    "the reference's": {"norm": False, "activation": "none", "bias": False, "label": "nonzero"},
    "a shared trunk": {"trunk": True},
    "top": {"label": "top", "weighting": "contribution"},
    "weighted": {"weighting": "contribution"},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_predictor_learns_and_comes_back(form, tmp_path):
    wanted = config(epochs=4)
    for key, value in form.items():
        setattr(wanted.predictor, key, value)
    bundle, metrics = train_bundle(FakeCache(), wanted, tmp_path)
    assert metrics["recall_of_mass"]["mlp"] > metrics["static_recall_of_mass"]["mlp"] + 0.05
    loaded, tap = load_bundle(tmp_path / "bundle"), torch.randn(8, WIDTH)
    for key in ((kind, layer) for kind in KINDS for layer in range(LAYERS)):
        assert torch.equal(loaded.predictor(*key)(tap), bundle.predictor(*key)(tap))
        assert (loaded.predictor(*key).up.bias is None) == (form.get("bias") is False)
    trunks = [name for name in loaded.tensors if ".trunk." in name]
    downs = {loaded.predictor("mlp", layer).down.weight.sum().item() for layer in range(LAYERS)}
    assert len(trunks) == (4 if form.get("trunk") else 0) and len(downs) == (1 if form.get("trunk") else LAYERS)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("value", [0.0, 1.0, 7.5])
def test_labels_that_are_all_alike_train_without_nan(label, value, tmp_path):
    cache = FakeCache()
    cache.mlp = lambda layer, rows: np.full((TOKENS, NEURONS), value, np.float32)[rows]
    cache.heads_of = lambda layer, rows: np.full((TOKENS, HEADS), value, np.float32)[rows]
    for weighting in WEIGHTINGS:
        wanted = config(epochs=1)
        wanted.predictor.label, wanted.predictor.weighting = label, weighting
        trained = train_predictors(cache, wanted, tmp_path)
        figures = [value for layer in trained.metrics["layers"].values() for value in layer["recall_of_mass"].values()]
        assert all(0 <= figure <= 1 for figure in figures)
        assert all(bool(p.isfinite().all()) for each in trained.predictors.values() for p in each.parameters())


# --- statistics and metrics


def test_statistics_are_averages_over_the_rows():
    cache, rows = FakeCache(), np.r_[3:50, 700:3900]
    statistics = collect_statistics(cache, rows, [1])
    assert set(statistics) == {("mlp", 1), ("heads", 1)}
    c = cache.mlp(1, rows).astype(np.float64)
    np.testing.assert_allclose(statistics["mlp", 1].mean_U, c.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics["mlp", 1].root_U, np.sqrt(c).mean(0), rtol=1e-5)
    assert statistics["mlp", 1].active == pytest.approx((c > 0).mean())
    assert statistics["mlp", 1].scale == pytest.approx(c.mean(), rel=1e-5)


def test_metrics_equal_a_computation_token_by_token():
    random = np.random.default_rng(1)
    scores, c = random.integers(0, 6, (50, 16)).astype(np.float32), random.standard_normal((50, 16)).clip(0)
    c[7] = 0
    mass, overlap = np.zeros(len(DENSITIES)), np.zeros(len(DENSITIES))
    for place, density in enumerate(DENSITIES):
        k = max(1, math.floor(density * 16 + 0.5))
        for row, contribution in zip(scores, c, strict=True):
            chosen, oracle = (set(np.argsort(-values, kind="stable")[:k]) for values in (row, contribution))
            total = contribution.sum()
            mass[place] += 1 if total == 0 else contribution[list(chosen)].sum() / total
            overlap[place] += len(chosen & oracle) / k
    metric = SelectionRecall()
    for part in (slice(0, 20), slice(20, 50)):  # batches of different size weigh by token
        metric.update(torch.from_numpy(scores[part]), torch.from_numpy(c[part]))
    figures = metric.figures()
    assert list(figures["recall"]) == ["0.1", "0.25", "0.35", "0.5"]
    np.testing.assert_allclose(list(figures["recall_of_mass"].values()), mass / 50)
    np.testing.assert_allclose(list(figures["recall"].values()), overlap / 50)


# --- split and order


def test_no_document_is_on_both_sides():
    cache = FakeCache()
    cache.manifest["document_hashes"][5] = cache.manifest["document_hashes"][6]  # the same text twice
    for share in (1e-9, 0.05, 0.3, 0.5):
        train, held_out = split_rows(cache, share)
        np.testing.assert_array_equal(np.sort(np.r_[train, held_out]), np.arange(TOKENS))
        hashes = [{cache.manifest["document_hashes"][n] for n in cache.documents[rows]} for rows in (train, held_out)]
        assert hashes[0] and hashes[1] and not hashes[0] & hashes[1]
        assert len(hashes[1]) == max(1, math.floor(share * 39 + 0.5))


def test_which_documents_are_held_out_depends_on_their_content_alone():
    cache, reordered = FakeCache(), FakeCache()
    reordered.documents = (DOCUMENTS - 1 - cache.documents).astype(np.uint32)
    reordered.manifest["document_hashes"] = cache.manifest["document_hashes"][::-1]
    np.testing.assert_array_equal(split_rows(cache, 0.2)[1], split_rows(reordered, 0.2)[1])


def test_a_single_document_cannot_be_split():
    cache = FakeCache()
    cache.documents[:] = 3
    with pytest.raises(DataError, match="1 documents and training needs at least 2"):
        split_rows(cache, 0.05)


def test_runs_break_where_rows_do():
    starts, lengths = runs(np.r_[2:7, 10:12, 20:21], 3)
    assert starts.tolist() == [2, 5, 10, 20] and lengths.tolist() == [3, 2, 2, 1]


def test_an_epoch_visits_every_row_once_in_an_order_of_seed_and_epoch():
    rows = np.r_[0:500, 600:1103]
    sampler = ShuffledRuns(rows, 128, seed=3)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(first) == len(sampler) == 8
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, ShuffledRuns(rows, 128, seed=4), strict=True))
    for epoch in (first, second):
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), rows)
        assert all((np.diff(batch) > 0).all() and 64 < len(batch) <= 128 for batch in epoch)


def test_a_batch_pairs_each_tap_with_its_contributions():
    cache = FakeCache()
    data = CacheData(cache, [1], "overlap", config().trainer, seed=0)
    batch = next(iter(data.train_dataloader()))
    assert list(batch) == [("mlp", 1), ("heads", 1)]
    for kind, source in (("mlp", TapSource("residual", 1)), ("heads", TapSource("middle", 0))):
        tap, c = batch[kind, 1]
        assert tap.dtype == c.dtype == torch.float32
        np.testing.assert_array_equal(tap, cache.taps[source][batch.rows_N])
        np.testing.assert_array_equal(c, (cache.mlp if kind == "mlp" else cache.heads_of)(1, batch.rows_N))


# --- training


def test_predictors_learn_what_the_tap_tells(trained):
    _, metrics, folder = trained
    for kind in KINDS:
        assert metrics["recall_of_mass"][kind] > metrics["static_recall_of_mass"][kind] + 0.15
    layer = metrics["layers"]["mlp.1"]
    assert layer["recall_of_mass"]["0.25"] > 0.9 and layer["static_recall_of_mass"]["0.25"] < 0.6
    assert layer["recall"]["0.25"] > 0.6
    assert metrics["epochs"] == 6 and metrics["tokens"] + metrics["validation_tokens"] == TOKENS
    assert [path.name for path in folder.iterdir()] == ["bundle"], "checkpoints are scratch"


def test_the_same_seed_gives_the_same_bundle(tmp_path):
    same = config(epochs=1, layers=[0])
    first, again = (train_bundle(FakeCache(), same, tmp_path / name)[0] for name in "ab")
    assert again.id == first.id
    other = config(epochs=1, layers=[0])
    other.seed = 1
    replaced, _ = train_bundle(FakeCache(), other, tmp_path / "b")  # a run that is forced again
    assert bundle_id(tmp_path / "b" / "bundle") == replaced.id != again.id


def test_layers_are_independent(tmp_path):
    every = train_predictors(FakeCache(), config(epochs=1), tmp_path)
    bundle, metrics = train_bundle(FakeCache(), config(epochs=1, layers=[0]), tmp_path)
    assert bundle.layers == (0,) and set(metrics["layers"]) == {"mlp.0", "heads.0"}
    assert bundle.mean_contribution("mlp", 1).shape == (NEURONS,), "static needs no predictor"
    for kind in KINDS:
        for name, tensor in bundle.predictor(kind, 0).state_dict().items():
            assert torch.equal(tensor, every.predictors[kind, 0].state_dict()[name])
    with pytest.raises(DataError, match="layers 0 and not for 1"):
        bundle.predictor("mlp", 1)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 0], []])
def test_layers_that_do_not_exist_are_refused(layers, tmp_path):
    with pytest.raises(ConfigError, match="the model has layers 0 to 1"):
        train_predictors(FakeCache(), config(layers=layers), tmp_path)


def test_max_steps_below_an_epoch_still_gives_figures(tmp_path):
    trained = train_predictors(FakeCache(), config(max_steps=3), tmp_path)
    assert trained.metrics["steps"] == 3 and trained.metrics["epochs"] == 1
    assert 0 < trained.metrics["recall_of_mass"]["mlp"] < 1


def test_a_loss_that_is_not_finite_names_its_predictor(tmp_path):
    cache = FakeCache()
    cache.heads_of = lambda layer, rows: np.full((TOKENS, HEADS), np.inf if layer else 1, np.float32)[rows]
    with pytest.raises(DataError, match=r"training loss of heads\.1 is not finite at step 0"):
        train_predictors(cache, config(), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_was_killed_ends_where_it_would_have_ended(tmp_path):
    class Killer(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 2:
                raise RuntimeError("killed")

    undisturbed = train_predictors(FakeCache(), config(epochs=4), tmp_path / "undisturbed")
    with pytest.raises(RuntimeError, match="killed"):
        train_predictors(FakeCache(), config(epochs=4), tmp_path / "killed", callbacks=[Killer()])
    assert (tmp_path / "killed" / "checkpoints" / "last.ckpt").exists()
    epochs = []

    class Counting(Callback):
        def on_train_epoch_start(self, trainer, module):
            epochs.append(trainer.current_epoch)

    resumed = train_predictors(FakeCache(), config(epochs=4), tmp_path / "killed", callbacks=[Counting()])
    assert epochs == [2, 3] and not (tmp_path / "killed" / "checkpoints").exists()
    for key, predictor in undisturbed.predictors.items():
        for name, tensor in predictor.state_dict().items():
            assert torch.equal(resumed.predictors[key].state_dict()[name], tensor)
    assert resumed.metrics["recall_of_mass"] == undisturbed.metrics["recall_of_mass"]
    assert resumed.metrics["steps"] == undisturbed.metrics["steps"]


def test_training_stops_without_progress(tmp_path):
    trained = train_predictors(FakeCache(), config(epochs=9, learning_rate=1e-9, patience=1), tmp_path)
    assert trained.metrics["epochs"] < 9


def test_a_slurm_job_trains_like_any_other(tmp_path, recwarn, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    in_job = {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "dejavu-train", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    for key, value in (in_job | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "node1"}).items():
        monkeypatch.setenv(key, value)
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            environment = trainer._accelerator_connector.cluster_environment
            seen.append((type(environment).__name__, signal.getsignal(signal.SIGUSR1)))

    before = signal.getsignal(signal.SIGUSR1)
    train_predictors(FakeCache(), config(epochs=1), tmp_path, callbacks=[Watch()])
    assert seen == [("LightningEnvironment", before)], "nothing is requeued by Lightning"
    assert [str(warning.message) for warning in recwarn] == []
    for key in in_job:
        monkeypatch.delenv(key)
    train_predictors(FakeCache(), config(epochs=1), tmp_path / "login")
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("epochs", [1, 8])
def test_training_says_nothing_by_itself(epochs, tmp_path, capsys, recwarn, monkeypatch):
    """Also where an epoch is shorter than the usual interval of logging and the run is longer."""
    said = []
    srun = tmp_path / "srun"  # as on a cluster, which Lightning remarks upon
    srun.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "handlers", [SayingHandler(said)])
    loggers = [CSVLogger(tmp_path, name="", version="")]
    metrics = train_predictors(FakeCache(), config(epochs=epochs), tmp_path, loggers).metrics
    assert metrics["steps"] // epochs < 50 and (epochs == 1 or metrics["steps"] > 50)
    assert said == [] and capsys.readouterr() == ("", "") and [str(w.message) for w in recwarn] == []


class SayingHandler(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_schedule_warms_up_and_ends_at_zero():
    module = PredictorModule.__new__(PredictorModule)
    module.__dict__.update(settings=SimpleNamespace(warmup_steps=100), total_steps=1000)
    shares = [module.schedule(step) for step in range(1001)]
    assert 0 < shares[0] < 0.02 and max(shares) == shares[100] == 1 and shares[1000] == pytest.approx(0)
    assert shares[101:] == sorted(shares[101:], reverse=True)


# --- bundles


def resigned(folder: Path, change) -> None:
    """Apply a change to a bundle's config and tensors, as a faulty writer would: the id fits the content."""
    described, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    change(described, tensors)
    save_file(tensors, folder / WEIGHTS)
    described["weights_sha256"] = file_digest(folder / WEIGHTS).hexdigest()
    described["id"] = content_id(described, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(described))


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A bundle that may be damaged."""
    target = tmp_path / "copy"
    target.mkdir()
    for path in (trained[2] / "bundle").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_bundle_comes_back_bit_for_bit(trained):
    bundle, _, folder = trained
    loaded = load_bundle(folder / "bundle")
    assert loaded.id == bundle.id == bundle_id(folder / "bundle")
    assert len(bundle.id) == 16 and loaded.config == json.loads(json.dumps(bundle.config))
    assert loaded.tensors.keys() == bundle.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in bundle.tensors.items())
    predictor = loaded.predictor("mlp", 1)
    tap = torch.from_numpy(FakeCache().tap(TapSource("residual", 1), slice(0, 8)))
    assert not predictor.training and torch.equal(predictor(tap), bundle.predictor("mlp", 1)(tap))


def test_a_bundle_says_what_it_is(trained):
    described = trained[0].config
    assert described["model"] == {"name": "fake", "fingerprint": "f" * 16}
    assert described["anatomy"] == {"layers": 2, "width": 16, "neurons": 64, "heads": 4}
    assert (described["tap"], described["rank"], described["cache"]) == ("overlap", 32, "cache0")
    assert len(described["document_hashes"]) == DOCUMENTS and described["corpus"]["name"] == "noise"
    assert described["training"]["batch_tokens"] == 128 and "seconds" not in described["metrics"]
    np.testing.assert_allclose(
        trained[0].mean_contribution("mlp", 1),
        FakeCache().mlp(1, split_rows(FakeCache(), 0.05)[0]).mean(0, dtype=np.float64),
        rtol=1e-5,
    )


def test_a_bundle_holds_no_pickle(trained):
    assert sorted(path.name for path in (trained[2] / "bundle").iterdir()) == [CONFIG, WEIGHTS]
    for path in (trained[2] / "bundle").iterdir():
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))


def test_predictors_are_read_without_torch(trained):
    code = (
        "import sys; from dejavu.predictors.manifest import bundle_id; print(bundle_id(sys.argv[1]));"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, trained[2] / "bundle"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == trained[0].id


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f / WEIGHTS, -1), r"predictors\.safetensors is not what was saved"),
        (lambda f: flip(f / WEIGHTS, 0), r"predictors\.safetensors is not what was saved"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), r"predictors\.safetensors is not"),
        (lambda f: (f / WEIGHTS).unlink(), r"predictors\.safetensors cannot be read"),
        (
            lambda f: (f / CONFIG).write_text((f / CONFIG).read_text().replace("overlap", "direct")),
            r"config\.json is not",
        ),
        (lambda f: (f / CONFIG).write_text((f / CONFIG).read_text()[:-40]), r"config\.json cannot be read"),
        (lambda f: (f / CONFIG).write_text("[]"), r"config\.json is not a JSON object"),
        (lambda f: (f / CONFIG).write_text('{"format_version": 1}'), r"config\.json lacks id"),
        (lambda f: (f / CONFIG).unlink(), "holds no predictor bundle"),
        (lambda f: resigned(f, lambda c, t: c.update(format_version=3)), "format_version 3 .* update dejavu"),
        (lambda f: resigned(f, lambda c, t: c.update(layers=[0, 1, 1])), "names layer 1 twice"),
        (lambda f: resigned(f, lambda c, t: c.update(layers=[0, 7])), "names layer 7 but the model has layers 0 to 1"),
        (lambda f: resigned(f, lambda c, t: t.pop("mlp.1.up.bias")), r"has no mlp\.1\.up\.bias"),
        (lambda f: resigned(f, lambda c, t: c.update(layers=[0])), r"an unknown heads\.1\.down\.bias"),
        (lambda f: resigned(f, lambda c, t: c.update(rank=16)), r"\(32,\) .* where config.json means \(16,\)"),
        (lambda f: resigned(f, lambda c, t: t.update({"mlp.0.static": torch.zeros(64).half()})), "torch.float16"),
    ],
)
def test_a_damaged_bundle_is_refused_with_the_reason(damage, message, copied):
    load_bundle(copied)
    damage(copied)
    with pytest.raises(DataError, match=message):
        load_bundle(copied)


def test_a_bundle_for_another_model_is_refused(trained):
    bundle, cache = trained[0], FakeCache()
    bundle.check_fits("f" * 16, cache)
    with pytest.raises(DataError, match="trained on other weights"):
        bundle.check_fits("0" * 16, cache)
    cache.neurons = 128
    with pytest.raises(DataError, match="with 64 neurons and this model has 128"):
        bundle.check_fits("f" * 16, cache)


def test_a_bundle_is_never_overwritten(trained, tmp_path):
    from dejavu.predictors.bundle import save_bundle

    before = {path.name: path.read_bytes() for path in (trained[2] / "bundle").iterdir()}
    with pytest.raises(DataError, match="bundles are never changed"):
        save_bundle(trained[2] / "bundle", {}, {}, {})
    assert before == {path.name: path.read_bytes() for path in (trained[2] / "bundle").iterdir()}
    with pytest.raises(ValueError):  # NaN is not JSON: nothing half-written stays behind
        save_bundle(tmp_path / "new", {"metrics": math.nan}, {}, {})
    assert list(tmp_path.iterdir()) == []


# --- the real thing


def test_from_a_recorded_model_to_a_bundle_that_fits_it(tmp_path):
    model = tiny_opt()
    loaded = LoadedModel("tiny", model, None, anatomy(model))
    random = np.random.default_rng(0)
    blocks, numbers = random.integers(4, VOCABULARY, (24, 32)), np.arange(24)[:, None].repeat(32, 1) // 4
    head = cache_head(loaded, blocks, numbers, 8, Collect()) | {
        "corpus": {"name": "noise", "hash": "0"},
        "document_hashes": [str(n) for n in range(6)],
    }
    with CacheWriter(tmp_path / "cache", head) as writer:
        collect(loaded, blocks, numbers, writer, 8, Collect())
        writer.finish()
    settings = config(epochs=2)
    settings.predictor.rank = settings.predictor.first_rank = None
    bundle, metrics = train_bundle(ActivationCache(tmp_path / "cache"), settings, tmp_path)
    load_bundle(tmp_path / "bundle").check_fits(fingerprint(model), loaded.anatomy)
    shapes = [bundle.predictor("mlp", layer).rank for layer in range(2)]
    assert shapes == [bundle.config["first_rank"], bundle.config["rank"]] == [16, 4]
    assert metrics["validation_tokens"] == 128
    assert bundle.config["cache"] == ActivationCache(tmp_path / "cache").id

"""Calibrated budgets: byte targets are met, costs fall, and what a bundle says of them comes back."""

import json

import numpy as np
import pytest
import torch
from bundles import untrained_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, tiny_opt

from dejavu.errors import ConfigError, DataError
from dejavu.evaluation import probe
from dejavu.evaluation.bench import Bench, largest, make_plan, read_losses
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel
from dejavu.models.shape import Shape
from dejavu.models.topk import top_k_mask
from dejavu.predictors.bundle import load_bundle, recalibrated
from dejavu.schema import METHODS, Calibrate, Sparsity
from dejavu.sparsity.accounting import choosing_costs
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.calibration import (
    Point,
    at_target,
    body_weights,
    by_loss,
    by_recall,
    by_recall_to_target,
    choose_budget,
    skipped_share,
)
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Oracle, Predicted

WIDE = anatomy(tiny_opt(ffn_dim=1024))  # so that a neuron is far below a hundredth of the body
TARGETS = (0.25, 0.5, 0.75)


def loaded_tiny() -> LoadedModel:
    model = tiny_opt()
    return LoadedModel("tiny", model, None, anatomy(model))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A tiny model, its untrained predictors and some text."""
    loaded = loaded_tiny()
    bundle = untrained_bundle(loaded.model, tmp_path_factory.mktemp("bench") / "bundle")
    blocks = np.random.default_rng(0).integers(3, VOCABULARY, (6, 16))
    return Bench(loaded, Predicted(bundle, loaded.device), "overlap", blocks, 4), bundle


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(0.02, 0.9))
def test_budgets_by_loss_meet_the_byte_target_within_a_hundredth(data, target):
    losses = {}
    for kind in ("mlp", "heads"):
        for layer in range(WIDE.layers):
            counts = sorted({max(1, round(level * WIDE.units(kind))) for level in (0.02, 0.1, 0.35, 0.75)})
            values = data.draw(st.lists(st.floats(-0.01, 3), min_size=len(counts), max_size=len(counts)))
            losses[kind, layer] = dict(zip(counts, values, strict=True))
    costs = {
        group: data.draw(st.floats(0, 1.5 * WIDE.units(group[0]) * WIDE.unit_weights(group[0]))) for group in losses
    }
    budget = by_loss(losses, target, WIDE, costs)
    assert abs(skipped_share(budget, WIDE) - target) < 0.01
    for kind in ("mlp", "heads"):
        assert all(min(losses[kind, layer]) <= kept <= WIDE.units(kind) for layer, kept in enumerate(budget.of(kind)))


def test_what_is_free_is_given_up_first():
    losses = {(kind, layer): {1: 1.0} for kind in ("mlp", "heads") for layer in range(WIDE.layers)}
    losses["mlp", 1] = {512: 0.0, 1: 5.0}
    share = 512 * WIDE.unit_weights("mlp") / (2 * (1024 * WIDE.unit_weights("mlp") + 4 * WIDE.unit_weights("heads")))
    budget = by_loss(losses, share, WIDE, {})
    assert budget == Budget((1024, 512), (4, 4))
    with pytest.raises(ConfigError, match=r"calibrate\.targets has 1"):
        by_loss(losses, 1.0, WIDE, {})


def test_a_cheap_step_behind_a_dear_one_is_reached_through_it():
    losses = {(kind, layer): {1: 100.0} for kind in ("mlp", "heads") for layer in range(WIDE.layers)}
    losses["mlp", 0] = {900: 0.5, 100: 0.6}
    budget = by_loss(losses, 0.2, WIDE, {})
    assert budget.mlp[0] < 700 and budget.mlp[1] == 1024 and budget.heads == (4, 4)


def test_a_group_that_hardly_pays_for_its_predictor_is_left_whole():
    """Two groups of the same size and losses, one with a dear predictor: it comes last, unless nothing else is left."""
    losses = {(kind, layer): {1: 100.0} for kind in ("mlp", "heads") for layer in range(WIDE.layers)}
    losses |= {("mlp", 0): {512: 0.1}, ("mlp", 1): {512: 0.1}}
    half = 512 * WIDE.unit_weights("mlp")
    share = half / body_weights(WIDE)
    assert by_loss(losses, share, WIDE, {("mlp", 0): 0.5 * half}) == Budget((1024, 512), (4, 4))
    assert by_loss(losses, share, WIDE, {("mlp", 1): 2.0 * half}) == Budget((512, 1024), (4, 4))
    assert by_loss(losses, 2 * share, WIDE, {("mlp", 1): 2.0 * half}).mlp[0] == 512
    dear = {("mlp", layer): 2.0 * half for layer in range(2)} | {("heads", layer): 1e9 for layer in range(2)}
    assert abs(skipped_share(by_loss(losses, share, WIDE, dear), WIDE) - share) < 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.floats(0.05, 0.9))
def test_budgets_by_recall_meet_the_byte_target(seed, target):
    random = np.random.default_rng(seed)
    recalls = {
        (kind, layer): np.concatenate([[0], np.sort(random.dirichlet(np.full(WIDE.units(kind), 0.2)))[::-1].cumsum()])
        for kind in ("mlp", "heads")
        for layer in range(WIDE.layers)
    }
    budget = by_recall_to_target(recalls, target, WIDE)
    one_head = WIDE.unit_weights("heads") / (
        WIDE.layers * sum(WIDE.units(k) * WIDE.unit_weights(k) for k in ("mlp", "heads"))
    )
    assert target - 1e-9 <= skipped_share(budget, WIDE) < target + 2 * one_head
    every = by_recall(recalls, 0.99, WIDE)
    for (kind, layer), recall in recalls.items():
        kept = every.of(kind)[layer]
        assert recall[kept] >= 0.99 - 1e-6 and (kept == 1 or recall[kept - 1] < 0.99)


def test_recalls_are_those_of_a_plain_computation(bench):
    made, _ = bench
    found = probe.recalls(made.loaded, made.blocks_NT, 4, Oracle(), "overlap")
    seen = {}

    class Seeing(Oracle):
        def choose(self, choice, k):
            seen.setdefault((choice.kind, choice.layer), []).append(choice.contributions().clone())
            return torch.ones(1, choice.contributions().shape[1], dtype=torch.bool)

    parts = made.loaded.anatomy
    every = Budget((parts.neurons,) * parts.layers, (parts.heads,) * parts.layers)
    watching = Sparsifier(parts, Seeing(), every, force=True)
    with torch.no_grad(), watching.attached():
        for ids, tokens in probe.batches(made.blocks_NT, 4, made.loaded.device):
            watching.begin(tokens)
            made.loaded.model(input_ids=ids, use_cache=False)
    for group, parts_of in seen.items():
        c = torch.cat(parts_of).double()
        for k in (1, 2, c.shape[1]):
            mass = (c * top_k_mask(c.float(), k)).sum(1) / c.sum(1)
            assert found[group][k] == pytest.approx(float(mass.mean()), abs=1e-6)
    assert all(recall[0] == 0 and recall[-1] == pytest.approx(1) for recall in found.values())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_meets_its_targets_on_a_model(bench, method, tmp_path):
    made, bundle = bench
    said, tries = [], Calibrate(method=method, levels=[0.05, 0.3, 0.6], targets=list(TARGETS))
    plan = make_plan(made, tries, choosing_costs(bundle), tmp_path / "losses.csv", said.append)
    for target in TARGETS:
        point = made.measured(plan(target))
        assert abs(point.skipped - target) < (0.15 if method == "recall" else 0.03)  # a head is a tenth of this body
        assert point.increase is not None and np.isfinite(point.increase)
        assert {len(cuts) for cuts in point.thresholds.values()} == {2}
    assert len(said) == (4 if method == "loss" else 0)


def test_losses_of_groups_that_were_measured_are_not_measured_again(bench, tmp_path, monkeypatch):
    made, bundle = bench
    tries, costs, path = Calibrate(levels=[0.25, 0.5], targets=[0.5]), choosing_costs(bundle), tmp_path / "losses.csv"
    tried = []
    alone = made.alone
    monkeypatch.setattr(made, "alone", lambda group, count: tried.append(group) or alone(group, count))
    budget = make_plan(made, tries, costs, path, lambda text: None)(0.5)
    assert len(tried) == 8 and set(read_losses(path)) == set(tried)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n")  # what a run that was killed after two groups leaves
    tried.clear()
    assert make_plan(made, tries, costs, path, lambda text: None)(0.5) == budget
    assert set(tried) == {("heads", 0), ("heads", 1)} and path.read_text().splitlines() == lines


def test_a_target_beyond_the_levels_is_refused_before_anything_is_measured(bench, tmp_path, monkeypatch):
    made, _ = bench
    monkeypatch.setattr(made, "alone", lambda group, count: pytest.fail("measured first"))
    with pytest.raises(ConfigError, match=r"calibrate\.targets has 0\.9, but .* no more than 0\.500"):
        make_plan(made, Calibrate(levels=[0.5, 0.75], targets=[0.25, 0.9]), {}, tmp_path / "losses.csv", print)


def test_a_target_that_only_part_of_a_head_could_still_meet_is_met_nearly():
    """SmolLM2-135M's sizes: when all neurons that may go are gone, what is left is less than a head's bytes."""
    shape = Shape(30, 576, 9, 3, 64, 1536, 49152, 2048, True, True, 1e5, True)
    losses = {("mlp", layer): {384: 0.1} for layer in range(30)} | {("heads", layer): {2: 9.0} for layer in range(30)}
    budget = by_loss(losses, 0.75, shape, {})
    assert 0.7495 < skipped_share(budget, shape) <= 0.75 and min(budget.heads) == 2 and max(budget.heads) > 2


def test_the_largest_share_keeps_its_word(bench):
    made, _ = bench
    point = largest(made, made.uniform, 0.05)
    assert point.increase <= np.log(1.05) and 0 < point.skipped < 1


def test_a_curve_comes_back_from_its_bundle_and_is_followed_between_its_points(bench, tmp_path):
    made, bundle = bench
    parts = made.loaded.anatomy
    curve = [made.measured(made.uniform(target)) for target in (0.5, 0.75)]
    calibration = {"selector": "predictor", "curve": [point.as_json() for point in curve]}
    new = recalibrated(bundle, tmp_path / "new", calibration, ["9"])
    assert new.id != bundle.id and new.config["calibrated_from"] == bundle.id
    again = load_bundle(tmp_path / "new")
    assert again.config["document_hashes"] == ["0", "9"] and again.tensors.keys() == bundle.tensors.keys()
    assert all(torch.equal(again.tensors[name], bundle.tensors[name]) for name in bundle.tensors)
    wanted = Sparsity(ratio=0.5, budget="calibrated")
    found = choose_budget(wanted, parts, again)
    assert found.budget == curve[0].budget and found.thresholds == curve[0].thresholds
    between = choose_budget(Sparsity(ratio=0.6, budget="calibrated"), parts, again)
    assert between.budget.mlp == (26, 26) and curve[0].thresholds["mlp"][0] < between.thresholds["mlp"][0]
    assert choose_budget(Sparsity(ratio=0.25, budget="calibrated"), parts, again).budget.mlp == (48, 48)
    for wrong, message in (
        (Sparsity(mlp=0.5, heads=0.25, budget="calibrated"), "shares out one ratio"),
        (Sparsity(ratio=0.5, dense_layers=[0], budget="calibrated"), "shares out one ratio"),
        (Sparsity(ratio=0.9, budget="calibrated"), "beyond the bundle's calibrated curve"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_budget(wrong, parts, again)
    with pytest.raises(DataError, match="needs a bundle with calibrated budgets"):
        choose_budget(wanted, parts, bundle)


def test_thresholds_between_points_lie_between_theirs():
    parts = anatomy(tiny_opt())
    low, high = (
        Point(skipped, Budget((kept,) * 2, (heads,) * 2), 0.0, {"mlp": [cut, cut], "heads": [cut, cut]})
        for skipped, kept, heads, cut in ((0.5, 32, 2, 0.0), (0.75, 16, 1, 1.0))
    )
    assert at_target([low, high], 0.625, parts).thresholds["mlp"] == [0.5, 0.5]
    assert json.loads(json.dumps(low.as_json())) == low.as_json()
    assert Point.from_json(json.loads(json.dumps(low.as_json()))) == low

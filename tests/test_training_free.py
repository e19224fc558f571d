"""Selectors that need no training, the calibrated threshold, and recall, on tiny random models."""

import pytest
import torch
from tiny import tiny_llama, tiny_opt, tiny_opt_post_norm

from dejavu.checks import check
from dejavu.errors import ConfigError, DataError
from dejavu.models.contribution import Contributions
from dejavu.models.families import anatomy
from dejavu.models.observe import Observer, observed
from dejavu.models.topk import top_k_mask
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import Budget, make_budget, requested_ratios
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Choice, Oracle, Prompt, Random, Selector, Tokens
from dejavu.sparsity.training_free import Gate, LowRank, SignBits

MODELS = [tiny_opt, tiny_opt_post_norm, tiny_llama]
ROWS, LENGTH = 3, 12


def input_ids() -> torch.Tensor:
    return torch.randint(4, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def all_tokens(context: int = 0) -> Tokens:
    """Every position sparse but the first `context` of each row."""
    position_N = torch.arange(LENGTH).repeat(ROWS)
    row_N = torch.arange(ROWS).repeat_interleave(LENGTH)
    return Tokens(position_N >= context, row_N, position_N, context_N=position_N < context, row_N=row_N)


def run(model, selector: Selector, ratio: float = 0.5, context: int = 0, **settings) -> Sparsifier:
    """The sparsifier after one forward pass."""
    parts = anatomy(model)
    budget = settings.pop("budget", None) or make_budget(Sparsity(selector=selector.name, ratio=ratio), parts)
    sparsifier = Sparsifier(parts, selector, budget, record=True, **settings)
    with sparsifier.attached():
        if sparsifier.rule == "threshold":
            with sparsifier.calibrating():
                sparsifier.begin(all_tokens(context))
                model(input_ids=input_ids(), use_cache=False)
        sparsifier.begin(all_tokens(context))
        model(input_ids=input_ids(), use_cache=False)
    return sparsifier


class Inputs(Observer):
    """m_l and a of every layer of a dense pass."""

    def __init__(self):
        self.middles, self.activations = {}, {}

    def middle(self, layer, middle_ND):
        self.middles[layer] = middle_ND

    def neurons(self, layer, activations_NF):
        self.activations[layer] = activations_NF


def inputs(model) -> Inputs:
    watch = Inputs()
    with observed(anatomy(model), watch):
        model(input_ids=input_ids(), use_cache=False)
    return watch


def choice(layer: int, tap_ND: torch.Tensor) -> Choice:
    return Choice("mlp", layer, tap_ND, lambda: torch.empty(0), all_tokens())


@pytest.mark.parametrize("build", MODELS)
def test_svd_of_full_rank_is_the_oracles_contribution(build):
    model, watch = build(), inputs(build())
    parts = anatomy(model)
    contributions = Contributions(parts)
    selector = LowRank(parts, contributions, 2 * parts.width)  # a gated MLP's two projections share the rank
    for layer, activations in watch.activations.items():
        expected = contributions.of_neurons(layer, activations)
        scores = selector.scores(choice(layer, watch.middles[layer]))
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)


def test_svd_is_the_best_approximation_of_its_rank():
    model, watch = tiny_opt(), inputs(tiny_opt())
    parts = anatomy(model)
    block = parts.blocks[0]
    x_ND = parts.mlp_reads(0, watch.middles[0])
    left, values, right = torch.linalg.svd(block.mlp_input.weight, full_matrices=False)
    weight_FD = (left[:, :5] * values[:5]) @ right[:5]
    expected = torch.relu(x_ND @ weight_FD.T + block.mlp_input.bias) * block.mlp_output.weight.norm(dim=0)
    scores = LowRank(parts, Contributions(parts), 5).scores(choice(0, watch.middles[0]))
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("build", MODELS)
def test_sign_counts_agreeing_signs(build):
    model, watch = build(), inputs(build())
    parts = anatomy(model)
    block = parts.blocks[1]
    x_ND, weight_FD = parts.mlp_reads(1, watch.middles[1]), block.mlp_input.weight
    scores = SignBits(parts, Contributions(parts)).scores(choice(1, watch.middles[1]))
    for token, neuron in ((0, 0), (5, 17), (20, 63)):
        agreement = sum(
            float(torch.sign(a) * torch.sign(b)) for a, b in zip(x_ND[token], weight_FD[neuron], strict=True)
        )
        scale = weight_FD[neuron].abs().mean() * block.mlp_output.weight[:, neuron].norm()
        assert float(scores[token, neuron]) == pytest.approx(agreement * float(scale), rel=1e-4)


def test_gate_is_the_activated_gate_and_refuses_models_without_one():
    model, watch = tiny_llama(), inputs(tiny_llama())
    parts = anatomy(model)
    gate = parts.blocks[0].mlp_input(parts.mlp_reads(0, watch.middles[0]))
    scores = Gate(parts, Contributions(parts)).scores(choice(0, watch.middles[0]))
    torch.testing.assert_close(scores, torch.nn.functional.silu(gate).abs())
    with pytest.raises(ConfigError, match="needs a model with a gated MLP"):
        Gate(anatomy(tiny_opt()), Contributions(parts))


@pytest.mark.parametrize("name", ["svd", "sign", "gate"])
def test_selectors_that_know_neurons_only_leave_heads_whole(name):
    sparsity = Sparsity(selector=name, ratio=0.5, heads_layers=[0.5, 0.5])
    assert requested_ratios(sparsity) == (0.5, 0.0)
    assert make_budget(sparsity, anatomy(tiny_llama())) == Budget((32, 32), (4, 4))


@pytest.mark.parametrize("name", ["svd", "sign", "gate"])
def test_they_run_on_the_sparsified_stream_with_the_tap_direct(name):
    model = tiny_llama()
    parts = anatomy(model)
    norms = Contributions(parts)
    selector = {"svd": LowRank(parts, norms, 8), "sign": SignBits(parts, norms), "gate": Gate(parts, norms)}[name]
    sparsifier = run(model, selector, tap="previous")
    assert sparsifier.tap == "direct"
    # A layer's 64 neurons of 3 * 32 weights are 6,144; its 4 heads of 2 * 32 * 8 * 1.5 (two share k and v) 3,072.
    measured = sparsifier.density.measured()
    assert measured == {"mlp_density": 0.5, "head_density": 1.0, "body_density": pytest.approx(2 / 3)}


@pytest.mark.parametrize("build", MODELS)
def test_prompt_chooses_by_the_context_once_for_each_text(build):
    model, watch = build(), inputs(build())
    parts = anatomy(model)
    sparsifier = run(model, Prompt(), context=5)
    c_NF = Contributions(parts).of_neurons(0, watch.activations[0])  # the context runs whole: as in the dense pass
    masks = sparsifier.masks["mlp", 0].view(ROWS, LENGTH, -1)
    for row in range(ROWS):
        expected = top_k_mask(c_NF.view(ROWS, LENGTH, -1)[row, :5].sum(0, keepdim=True), 32)
        assert torch.equal(masks[row], expected.expand(LENGTH, -1))
    assert sparsifier.density.positions == ROWS * (LENGTH - 5)


@pytest.mark.parametrize("build", MODELS)
def test_a_threshold_gives_the_density_asked_for_on_the_text_it_was_set_on(build):
    sparsifier = run(build(), Oracle(), ratio=0.75, rule="threshold")
    assert len(sparsifier.thresholds) == 4
    for kind in ("mlp", "heads"):
        for density in sparsifier.density.per_layer(kind):
            assert density == pytest.approx(0.25, abs=0.01)
    counts = sparsifier.masks["mlp", 0].sum(1)
    assert counts.min() < counts.max(), "tokens get different numbers of units, which is what a threshold is for"


def test_a_threshold_follows_per_layer_lists_and_counts_calibration_in_nothing():
    parts = anatomy(tiny_opt())
    budget = make_budget(Sparsity(mlp_layers=[0.9, 0.5], heads=0.0), parts)
    sparsifier = run(tiny_opt(), Oracle(), budget=budget, rule="threshold", recall_tokens=8)
    assert sparsifier.density.per_layer("mlp")[0] == pytest.approx(0.1, abs=0.01)
    assert sparsifier.density.per_layer("heads") == [1.0, 1.0]
    assert sparsifier.density.positions == ROWS * LENGTH and sparsifier.recall.tokens == 8


def test_a_threshold_never_takes_neurons_that_are_zero():
    """Half of a ReLU layer is inactive: 80 % of it cannot be active, and the rest is not made up from zeros."""
    model = tiny_opt()
    sparsifier = run(
        model, Oracle(), budget=make_budget(Sparsity(mlp=0.2, heads=0.0), anatomy(model)), rule="threshold"
    )
    for layer, activations in inputs(model).activations.items():  # nothing that counts is left out: the dense stream
        active = float((activations > 0).float().mean())
        assert sparsifier.density.per_layer("mlp")[layer] == pytest.approx(active) and active < 0.8


@pytest.mark.parametrize("selector", ["random", "static", "prompt"])
def test_a_threshold_over_scores_that_do_not_differ_is_refused(selector):
    config = Config()
    config.sparsity.selector, config.sparsity.rule = selector, "threshold"
    with pytest.raises(ConfigError, match="rule=threshold needs a selector"):
        check(config)


def test_the_oracle_recalls_everything():
    recall = run(tiny_opt(), Oracle(), recall_tokens=1000).recall
    assert recall.tokens == ROWS * LENGTH
    assert recall.per_layer("mlp")["recall"] == [1.0, 1.0]
    assert recall.per_layer("heads")["recall"] == [1.0, 1.0]


def test_recall_equals_its_definition_on_the_first_tokens():
    model = tiny_llama()
    sparsifier = run(model, Random(0, {"mlp": 64, "heads": 4}), recall_tokens=20)
    c_NF = Contributions(anatomy(model)).of_neurons(0, inputs_under(model, sparsifier)[0])[:20]
    mask_NF = sparsifier.masks["mlp", 0][:20]
    expected = (c_NF * mask_NF).sum(1) / c_NF.sum(1)
    assert sparsifier.recall.per_layer("mlp")["recall_of_mass"][0] == pytest.approx(float(expected.mean()), rel=1e-4)
    overlap = (mask_NF & top_k_mask(c_NF, 32)).sum(1) / 32
    assert sparsifier.recall.per_layer("mlp")["recall"][0] == pytest.approx(float(overlap.mean()))
    assert run(model, Random(0, {"mlp": 64, "heads": 4})).recall.per_layer("mlp")["recall"] == [None, None]


def inputs_under(model, sparsifier: Sparsifier) -> dict[int, torch.Tensor]:
    """a of every layer while `sparsifier` is at work, before it masks."""
    watch = Inputs()
    with observed(anatomy(model), watch), sparsifier.attached():
        sparsifier.begin(all_tokens())
        model(input_ids=input_ids(), use_cache=False)
    return watch.activations


class Broken(Selector):
    """Gives NaN in the second layer."""

    name = "broken"

    def scores(self, choice: Choice) -> torch.Tensor:
        scores = choice.contributions().clone()
        scores[0, 0] = float("nan") if choice.layer == 1 and choice.kind == "mlp" else scores[0, 0]
        return scores


@pytest.mark.parametrize("rule", ["topk", "threshold"])
def test_nan_in_scores_names_the_layer(rule):
    budget = Budget((32, 32), (2, 2))
    with pytest.raises(DataError, match="choosing neurons in layer 1 with selector broken"):
        run(tiny_opt(), Broken(), budget=budget, rule=rule)

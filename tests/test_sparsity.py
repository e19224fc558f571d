"""The simulate back end: what is left out is left out, what is not is untouched, padding counts in nothing."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_llama, tiny_opt, tiny_opt_post_norm

from dejavu.errors import ConfigError
from dejavu.models.families import anatomy
from dejavu.models.load import load_model
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import Budget, everything, make_budget, requested_ratios
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Choice, Oracle, Random, Replay, Selector, Tokens

MODELS = [tiny_opt, tiny_opt_post_norm, tiny_llama]


def opt_tiny():
    return load_model(Config()).model


def tokens_of(input_ids: torch.Tensor, sparse: torch.Tensor | None = None) -> Tokens:
    rows, length = input_ids.shape
    return Tokens(
        torch.ones(rows * length, dtype=torch.bool) if sparse is None else sparse.flatten(),
        torch.arange(rows).repeat_interleave(length),
        torch.arange(length).repeat(rows),
    )


def uniform(model, ratio: float, selector: str = "oracle") -> Budget:
    return make_budget(Sparsity(selector=selector, ratio=ratio), anatomy(model))


def ids(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(4, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def run(model, sparsifier: Sparsifier, input_ids: torch.Tensor, **inputs) -> torch.Tensor:
    with torch.no_grad(), sparsifier.attached():
        sparsifier.begin(tokens_of(input_ids, inputs.pop("sparse", None)))
        return model(input_ids=input_ids, use_cache=False, **inputs).logits


@pytest.mark.parametrize("build", [*MODELS, opt_tiny])
@pytest.mark.parametrize("force", [False, True])
def test_nothing_left_out_is_bit_equal(build, force):
    model, input_ids = build(), ids()
    dense = model(input_ids=input_ids, use_cache=False).logits
    sparsifier = Sparsifier(anatomy(model), Oracle(), uniform(model, 0.0), force=force)
    sparse = run(model, sparsifier, input_ids)
    assert torch.equal(sparse, dense)
    assert (sparsifier.density.positions > 0) == force, "the sparse path must really run when it is forced"
    assert sparsifier.density.measured() == dict.fromkeys(("mlp_density", "head_density", "body_density"), 1.0)


@pytest.mark.parametrize("build", [tiny_opt, tiny_opt_post_norm, opt_tiny])
def test_oracle_nonzero_is_bit_equal_and_leaves_neurons_out(build):
    model, input_ids = build(), ids()
    dense = model(input_ids=input_ids, use_cache=False).logits
    sparsifier = Sparsifier(anatomy(model), Oracle(), uniform(model, 0.5), rule="nonzero")
    assert torch.equal(run(model, sparsifier, input_ids), dense)
    assert 0.01 < sparsifier.density.measured()["mlp_density"] < 0.9


@pytest.mark.parametrize("build", MODELS)
def test_a_sparse_pass_equals_the_definition_and_the_hooks_go(build):
    """y = sum over chosen j of a_j W2[:, j] + b2, by zeroing columns of the weights for a one-token choice."""
    model, input_ids = build(), ids(1, 6)
    dense = model(input_ids=input_ids, use_cache=False).logits
    chosen = {("mlp", layer): torch.arange(64).remainder(3).eq(0)[None].expand(6, -1) for layer in range(2)}
    chosen |= {("heads", layer): torch.tensor([True, False, True, False])[None].expand(6, -1) for layer in range(2)}
    budget = Budget((int(chosen["mlp", 0][0].sum()),) * 2, (2, 2))
    sparse = run(model, Sparsifier(anatomy(model), Replay(chosen), budget), input_ids)
    assert torch.equal(model(input_ids=input_ids, use_cache=False).logits, dense), "hooks must go with the context"
    for block in anatomy(model).blocks:
        block.mlp_output.weight.data[:, ~chosen["mlp", 0][0]] = 0
        for head in (1, 3):
            block.attention_output.weight.data[:, head * 8 : (head + 1) * 8] = 0
    torch.testing.assert_close(sparse, model(input_ids=input_ids, use_cache=False).logits)


@pytest.mark.parametrize("build", MODELS)
def test_units_left_out_may_be_nan(build):
    """A unit that is not computed must not be read, whatever it holds."""
    model, input_ids = build(), ids(1, 6)
    everywhere = torch.ones(6, 64, dtype=torch.bool)
    everywhere[:, 5] = False
    heads = torch.ones(6, 4, dtype=torch.bool)
    sets = {("mlp", layer): everywhere for layer in range(2)} | {("heads", layer): heads for layer in range(2)}

    def poison(module, args):
        args[0][..., 5] = float("nan")

    hooks = [block.mlp_output.register_forward_pre_hook(poison) for block in anatomy(model).blocks]
    logits = run(model, Sparsifier(anatomy(model), Replay(sets), Budget((63, 63), (4, 4))), input_ids)
    assert torch.isfinite(logits).all()
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_give_the_unpadded_results_on_replayed_sets(build, side):
    model, texts = build(), [ids(1, 9)[0], ids(1, 5)[0] + 1]
    view, budget = anatomy(model), uniform(model, 0.5)
    alone, masks = [], []
    for text in texts:
        recorder = Sparsifier(view, Oracle(), budget, record=True)
        alone.append(run(model, recorder, text[None])[0])
        masks.append(recorder.masks)
    length = max(map(len, texts))
    batch, real = torch.ones(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.bool)
    padded = {key: torch.zeros(2 * length, mask.shape[1], dtype=torch.bool) for key, mask in masks[0].items()}
    for row, text in enumerate(texts):
        place = slice(length - len(text), length) if side == "left" else slice(0, len(text))
        batch[row, place], real[row, place] = text, True
        for key, mask in masks[row].items():
            padded[key].view(2, length, -1)[row, place] = mask
    sparsifier = Sparsifier(view, Replay(padded), budget)
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    logits = run(model, sparsifier, batch, attention_mask=real.long(), position_ids=positions, sparse=real)
    for row in range(2):
        torch.testing.assert_close(logits[row][real[row]], alone[row], atol=2e-4, rtol=1e-4)
    assert sparsifier.density.positions == sum(map(len, texts))
    assert sparsifier.density.measured() == dict.fromkeys(("mlp_density", "head_density", "body_density"), 0.5)


class Peeking(Selector):
    """Chooses neurons from a fixed linear map of the tap, as a trained predictor does."""

    reads_tap = True

    def scores(self, choice):
        units = 64 if choice.kind == "mlp" else 4
        return choice.tap_ND @ torch.randn(32, units, generator=torch.Generator().manual_seed(choice.layer))


@pytest.mark.parametrize("tap", ["overlap", "previous"])
@pytest.mark.parametrize("layer", [0, 1])
def test_permuting_fc1_of_a_layer_does_not_change_the_set_chosen_for_it(tap, layer):
    """Nothing peeks: the choice for layer l is made before fc1 of layer l is read."""
    sets = []
    for permute in (False, True):
        model = tiny_opt()
        if permute:
            fc1 = model.model.decoder.layers[layer].fc1
            order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
            fc1.weight.data, fc1.bias.data = fc1.weight.data[order], fc1.bias.data[order]
        sparsifier = Sparsifier(anatomy(model), Peeking(), uniform(model, 0.75), tap=tap, record=True)
        run(model, sparsifier, ids())
        sets.append(sparsifier.masks["mlp", layer])
    assert torch.equal(*sets)


def test_random_depends_on_nothing_but_its_seed_and_the_token():
    model, input_ids = tiny_opt(), ids(3, 8)
    view, budget = anatomy(model), uniform(model, 0.5)
    units = {"mlp": 64, "heads": 4}
    together = Sparsifier(view, Random(0, units), budget, record=True)
    run(model, together, input_ids)
    alone = Sparsifier(view, Random(0, units), budget, record=True)
    with torch.no_grad(), alone.attached():
        alone.begin(Tokens(torch.ones(8, dtype=torch.bool), torch.full((8,), 1), torch.arange(8)))
        model(input_ids=input_ids[1:2], use_cache=False)
    for key, mask in together.masks.items():
        assert torch.equal(mask.view(3, 8, -1)[1], alone.masks[key])
    other = Sparsifier(view, Random(1, units), budget, record=True)
    run(model, other, input_ids)
    assert not torch.equal(other.masks["mlp", 0], together.masks["mlp", 0])
    assert not torch.equal(together.masks["mlp", 0], together.masks["mlp", 1])


def test_random_chooses_every_unit_about_equally_often():
    tokens = Tokens(torch.ones(4000, dtype=torch.bool), torch.arange(4000) % 7, torch.arange(4000))
    scores = Random(0, {"mlp": 256, "heads": 4}).scores(Choice("mlp", 0, None, lambda: None, tokens))
    chosen = scores >= scores.kthvalue(193, dim=1, keepdim=True).values
    share = chosen.float().mean(0)
    assert chosen.float().mean().item() == pytest.approx(0.25, abs=0.001)
    assert share.std().item() < 2 * (0.25 * 0.75 / 4000) ** 0.5


def test_positions_outside_run_whole_and_count_in_nothing():
    model, input_ids = tiny_opt(), ids(1, 8)
    sparse = torch.arange(8)[None] >= 5
    sparsifier = Sparsifier(anatomy(model), Oracle(), uniform(model, 0.75))
    logits = run(model, sparsifier, input_ids, sparse=sparse)
    dense = model(input_ids=input_ids, use_cache=False).logits
    torch.testing.assert_close(logits[0, :5], dense[0, :5])
    assert not torch.allclose(logits[0, 5:], dense[0, 5:])
    assert sparsifier.density.positions == 3


@pytest.mark.parametrize(
    ("changes", "mlp", "heads"),
    [
        ({"mlp": 0.75, "heads": 0.5}, (16, 16), (2, 2)),
        ({"ratio": 0.75, "part": "mlp"}, (16, 16), (4, 4)),
        ({"ratio": 0.75, "part": "heads"}, (64, 64), (1, 1)),
        ({"ratio": 0.9}, (6, 6), (1, 1)),
        ({"ratio": 1.0}, (0, 0), (0, 0)),
        ({"mlp_layers": [0.0, 0.5], "heads": 0.5}, (64, 32), (2, 2)),
        ({"ratio": 0.5, "dense_layers": [-1]}, (32, 64), (2, 4)),
        ({"ratio": 0.5, "dense_layers": [0.5]}, (32, 64), (2, 4)),
        ({"selector": "dense", "ratio": 0.5}, (64, 64), (4, 4)),
    ],
)
def test_budgets(changes, mlp, heads):
    assert make_budget(Sparsity(**changes), anatomy(tiny_opt())) == Budget(mlp, heads)


def test_requested_ratios_say_what_the_budget_does():
    assert requested_ratios(Sparsity(ratio=0.5, part="mlp")) == (0.5, 0.0)
    assert requested_ratios(Sparsity(selector="dense")) == (0.0, 0.0)


def test_budgets_of_the_wrong_length_or_layer_are_refused():
    with pytest.raises(ConfigError, match="3 values, but the model has 2 layers"):
        make_budget(Sparsity(mlp_layers=[0.5, 0.5, 0.5]), anatomy(tiny_opt()))
    with pytest.raises(ConfigError, match="layers 0 to 1"):
        make_budget(Sparsity(dense_layers=[2]), anatomy(tiny_opt()))


def test_a_budget_is_whole_when_no_layer_leaves_a_unit_out():
    parts = anatomy(tiny_opt())
    whole = everything(parts)
    assert whole.is_whole(parts)
    for kind in ("mlp", "heads"):
        less = (*whole.of(kind)[:-1], whole.of(kind)[-1] - 1)
        assert not replace(whole, **{kind: less}).is_whole(parts)

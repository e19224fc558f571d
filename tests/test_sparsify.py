"""`dejavu.sparsify`: transformers' own `generate` over the engine, what it refuses, and the model as it was before."""

import subprocess
import sys

import pytest
import torch
from bundles import untrained_bundle
from tiny import FAMILIES, tiny_llama, tiny_opt, tiny_opt_post_norm
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import dejavu
from dejavu.errors import ConfigError, DataError

EXACT = {"mlp": 0, "heads": 0, "storage": "float32"}
IDS = torch.randint(4, 90, (3, 9), generator=torch.Generator().manual_seed(0))
NEW = 12


@pytest.fixture(params=FAMILIES)
def family(request):
    """Makes a tiny model of each family."""
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Folders of runs that trained predictors, by what makes their model."""
    folder = tmp_path_factory.mktemp("bundles")
    for name, make in FAMILIES.items():
        untrained_bundle(make(), folder / name / "bundle")
    return {make: folder / name for name, make in FAMILIES.items()}


@pytest.fixture
def bundle(bundles):
    """The one of `tiny_opt()`."""
    return bundles[tiny_opt]


def greedy(model, ids=IDS[:1], **settings):
    return model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None, **settings)


def padded():
    """Prompts of nine, six and one tokens, padded on the left, and their mask."""
    mask = torch.ones_like(IDS)
    mask[1, :3], mask[2, :8] = 0, 0
    return torch.where(mask == 1, IDS, 1), mask


@pytest.mark.parametrize("kv", ["lazy", "all"])
def test_with_nothing_left_out_the_tokens_are_the_dense_models(kv, family):
    model = family()
    ids, mask = padded()
    alone, together = greedy(model), greedy(model, ids, attention_mask=mask)
    engine = dejavu.sparsify(model, kv=kv, window=4, **EXACT)
    assert torch.equal(greedy(model), alone)
    assert torch.equal(greedy(model, ids, attention_mask=mask), together)
    assert engine.counters.tokens == (NEW - 1) * 4, "one sequence and then three; the first token is the prompt's"


def test_padding_inferred_from_the_pad_token_gives_the_same(family):
    model = family()
    ids, _ = padded()
    expected = model.generate(ids, do_sample=False, max_new_tokens=NEW, pad_token_id=1, eos_token_id=2)
    dejavu.sparsify(model, **EXACT)
    found = model.generate(ids, do_sample=False, max_new_tokens=NEW, pad_token_id=1, eos_token_id=2)
    assert torch.equal(found, expected)


def test_as_many_units_are_used_as_were_asked_for(family, bundles):
    model = family()
    dense = greedy(model)
    engine = dejavu.sparsify(model, bundles[family], mlp=0.75, heads=0.5)
    sparse = greedy(model)
    assert sparse.shape == dense.shape and not torch.equal(sparse, dense)
    steps = NEW - 1
    assert engine.counters.used == {"mlp": steps * 2 * 16, "heads": steps * 2 * 2}
    assert torch.equal(greedy(model), sparse), "a second generation starts afresh"


def test_heads_that_share_keys_are_used_together_where_that_is_asked_for(bundles):
    model = tiny_llama()
    engine = dejavu.sparsify(model, bundles[tiny_llama], mlp=0, heads=0.5, head_unit="group", kv="all")
    greedy(model)
    assert engine.counters.used["heads"] == (NEW - 1) * 2 * 2
    sets = {tuple(half.choice.units_BK[0]) for half in engine.halves if half.choice is not None}
    assert sets <= {(0,), (1,)}, "a predictor chooses one group of the two"


def test_overlap_and_lazy_keys_change_nothing_but_the_time(family, bundles):
    tokens = []
    for settings in ({}, {"overlap": False}, {"kv": "all"}, {"window": 3}):
        model = family()
        dejavu.sparsify(model, bundles[family], mlp=0.5, heads=0.5, storage="float32", **settings)
        tokens.append(greedy(model, IDS))
    assert all(torch.equal(tokens[0], other) for other in tokens[1:])


def test_sparse_tokens_do_not_depend_on_who_else_is_in_the_batch(family, bundles):
    model = family()
    ids, mask = padded()
    dejavu.sparsify(model, bundles[family] / "bundle", mlp=0.5, heads=0.5, storage="float32")
    together = greedy(model, ids, attention_mask=mask)
    for row, start in enumerate((0, 3, 8)):
        assert torch.equal(greedy(model, ids[row : row + 1, start:])[0], together[row, start:])


def test_sampling_streamers_processors_and_criteria_are_transformers_own(bundle):
    model = tiny_opt()
    dejavu.sparsify(model, bundle)

    class Streamer:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.arange(50), -torch.inf)

    def drawn(seed, **settings):
        torch.manual_seed(seed)
        return model.generate(IDS[:1], do_sample=True, top_k=20, top_p=0.9, max_new_tokens=NEW, **settings)

    streamer = Streamer()
    first = drawn(0, streamer=streamer)
    assert torch.equal(drawn(0), first) and not torch.equal(drawn(1), first)
    assert streamer.ended and streamer.seen == first[0].tolist()
    three = drawn(0, num_return_sequences=3, eos_token_id=None)
    assert three.shape == (3, 9 + NEW) and len({tuple(row.tolist()) for row in three}) == 3
    assert int(drawn(0, logits_processor=LogitsProcessorList([Only()]))[0, 9:].min()) >= 50
    assert greedy(model, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(12)])).shape[1] == 12


def test_scores_are_returned_where_they_are_asked_for(family):
    model = family()
    expected = greedy(model, return_dict_in_generate=True, output_logits=True)
    dejavu.sparsify(model, **EXACT)
    found = greedy(model, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


def test_restore_leaves_the_model_bit_for_bit_as_it_was(family, bundles):
    model = family()
    logits, tokens, attributes = model(IDS).logits, greedy(model), set(vars(model))
    dejavu.sparsify(model, bundles[family])
    assert torch.equal(model(IDS).logits, logits), "without a generation it is the dense model"
    assert torch.equal(model(IDS, use_cache=False, labels=IDS).logits, logits)
    greedy(model)
    dejavu.restore(model)
    assert torch.equal(model(IDS).logits, logits) and torch.equal(greedy(model), tokens)
    assert set(vars(model)) == attributes


def test_a_forward_of_the_instance_that_was_there_before_comes_back():
    model = tiny_opt()
    model.forward = own = model.forward
    dejavu.sparsify(model, **EXACT)
    dejavu.restore(model)
    assert vars(model)["forward"] is own


def test_steps_by_hand_are_the_dense_models(family):
    model = family()
    expected = model(IDS).logits
    dejavu.sparsify(model, **EXACT)
    output = model(IDS[:, :5], cache=DynamicCache(), logits_to_keep=1)
    torch.testing.assert_close(output.logits, expected[:, 4:5], atol=1e-4, rtol=1e-4)
    for place in range(5, 9):
        output = model(IDS[:, place : place + 1], cache=output.cache)
        torch.testing.assert_close(output.logits, expected[:, place : place + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_beams": 2}, "use num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, "use num_beams=1"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation: .* use greedy search or sampling"),
        ({"assistant_model": tiny_opt()}, "assisted_generation"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "contrastive_search"),
        ({"use_cache": False}, "use_cache=False would run the dense model"),
        ({"guidance_scale": 1.5}, "guidance_scale decodes two texts"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: the engine gives logits"),
    ],
)
def test_generations_that_the_engine_cannot_do_are_refused(settings, says):
    model = tiny_opt()
    dejavu.sparsify(model, **EXACT)
    with pytest.raises(ConfigError, match=says):
        model.generate(IDS[:1], max_new_tokens=4, **settings)
    assert greedy(model).shape == (1, 9 + NEW), "a refusal leaves nothing behind"


def test_prompts_and_texts_beyond_the_context_are_refused():
    model = tiny_opt()
    dejavu.sparsify(model, **EXACT)
    with pytest.raises(DataError, match="a prompt of 65 tokens is longer than the context of 64"):
        model.generate(torch.full((1, 65), 5), max_new_tokens=4)
    with pytest.raises(DataError, match="the cache holds 64 positions and is full"):
        model.generate(torch.full((1, 60), 5), max_new_tokens=10, eos_token_id=None)


def test_tokens_that_do_not_go_on_where_the_engine_stands_are_refused():
    model = tiny_opt()
    dejavu.sparsify(model, **EXACT)
    first = model(IDS[:, :5], cache=DynamicCache(), logits_to_keep=1).cache
    with pytest.raises(DataError, match="in one chunk"):
        model(IDS[:, 5:7], cache=first, logits_to_keep=1)
    with pytest.raises(DataError, match="do not go on with 3 sequences"):
        model(IDS[:1, 5:6], cache=first)
    mask = torch.ones(3, 6)
    mask[0, 0] = 0
    with pytest.raises(DataError, match="otherwise than their prompts"):
        model(IDS[:, 5:6], cache=first, attention_mask=mask)
    with pytest.raises(DataError, match="position_ids do not count"):
        model(IDS[:, 5:6], cache=first, position_ids=torch.full((3, 1), 9))
    for change in ("reorder_cache", "crop", "batch_select_indices"):
        with pytest.raises(ConfigError, match="nothing can be reordered or taken back"):
            getattr(first, change)(torch.tensor([0]))
    model(IDS[:, 5:6], cache=first)
    model(IDS[:, :5], cache=DynamicCache(), logits_to_keep=1)
    with pytest.raises(DataError, match="of an earlier generation"):
        model(IDS[:, 6:7], cache=first)
    with pytest.raises(DataError, match="in one chunk"):
        greedy(model, prefill_chunk_size=4)


def test_what_is_no_left_padding_or_no_tokens_is_refused():
    model = tiny_opt()
    dejavu.sparsify(model, **EXACT)
    right = torch.ones_like(IDS)
    right[0, -1] = 0
    for mask in (right, torch.zeros_like(IDS)):
        with pytest.raises(DataError, match="padding_side='left'"):
            greedy(model, IDS, attention_mask=mask)
    with pytest.raises(DataError, match="no cache_implementation"):
        greedy(model, padded()[0], attention_mask=padded()[1], cache_implementation="static")
    with pytest.raises(ConfigError, match="give input_ids"):
        greedy(model, None, inputs_embeds=torch.zeros(1, 4, 32))
    with pytest.raises(ConfigError, match="pass logits_to_keep=1"):
        model(IDS, cache=DynamicCache())
    with pytest.raises(ConfigError, match="no loss"):
        model(IDS, cache=DynamicCache(), logits_to_keep=1, labels=IDS)


def test_a_logit_that_is_not_finite_is_refused():
    model = tiny_opt()
    model.model.decoder.final_layer_norm.bias[0] = float("nan")
    dejavu.sparsify(model, **EXACT)
    with pytest.raises(DataError, match="not finite"):
        greedy(model)


@pytest.mark.parametrize(
    ("model", "settings", "error", "says"),
    [
        (tiny_opt, {"backend": "simulate"}, ConfigError, "simulate is for dejavu evaluate"),
        (tiny_opt, {"backend": "kernal"}, ConfigError, "no backend 'kernal'"),
        (tiny_opt, {}, ConfigError, "mlp=0.75 and heads=0.75 need predictors"),
        (tiny_opt, {"heads": 0}, ConfigError, "mlp=0.75 and heads=0 need predictors"),
        (tiny_opt, {**EXACT, "storage": "int4"}, ConfigError, "storage=int4 is not known"),
        (tiny_opt, {"predictors": "BUNDLE", "mlp": 1.5}, ConfigError, "mlp=1.5 is out of range"),
        (tiny_opt, {"predictors": "nowhere"}, DataError, "give the folder that `dejavu train` wrote"),
        (lambda: tiny_opt(1), {"predictors": "BUNDLE"}, DataError, "was trained on other weights"),
        (lambda: tiny_opt(ffn_dim=32), {"predictors": "BUNDLE"}, DataError, "64 neurons and this model has 32"),
        (tiny_opt_post_norm, EXACT, ConfigError, "norms after each half"),
        (lambda: tiny_opt().model, EXACT, ConfigError, "OPTForCausalLM or LlamaForCausalLM, not OPTModel"),
        (tiny_opt, {**EXACT, "head_unit": "pair"}, ConfigError, "head_unit=pair is not known"),
    ],
)
def test_what_cannot_be_sparsified_is_refused_and_left_alone(model, settings, error, says, bundle):
    model = model()
    attributes = set(vars(model))
    named = {key: bundle if value == "BUNDLE" else value for key, value in settings.items()}
    with pytest.raises(error, match=says):
        dejavu.sparsify(model, **named)
    assert set(vars(model)) == attributes


def test_twice_and_nothing_to_restore_are_refused():
    model = tiny_opt()
    with pytest.raises(ConfigError, match="nothing to restore"):
        dejavu.restore(model)
    dejavu.sparsify(model, **EXACT)
    with pytest.raises(ConfigError, match="sparsified already"):
        dejavu.sparsify(model, **EXACT)


def test_importing_dejavu_imports_nothing_heavy():
    code = (
        "import sys, dejavu; assert not {'torch', 'transformers', 'numba'} & set(sys.modules); "
        "from dejavu import sparsify, restore; assert callable(sparsify) and 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'sparsity_of'"):
        dejavu.sparsity_of  # noqa: B018

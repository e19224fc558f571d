"""Loading and anatomy: what is refused and why, what identifies a model, where its parts are."""

import pytest
import torch
from tiny import tiny_llama, tiny_opt, tiny_opt_post_norm
from transformers import GPT2Config, GPT2LMHeadModel

from dejavu.errors import ConfigError, DataError
from dejavu.evaluation.scoring import Request, Scorer
from dejavu.models.contribution import Contributions
from dejavu.models.families import anatomy
from dejavu.models.load import fingerprint, load_model
from dejavu.models.observe import Observer, observed
from dejavu.models.taps import TapSource, tap_source
from dejavu.schema import TAPS, Config, Model

MODELS = [tiny_opt, tiny_opt_post_norm, tiny_llama]


@pytest.mark.parametrize("build", MODELS)
def test_anatomy_has_every_layer_and_the_right_sizes(build):
    view = anatomy(build())
    assert (view.layers, view.width, view.heads, view.head_dim, view.neurons) == (2, 32, 4, 8, 64)
    assert view.units("mlp") == 64 and view.units("heads") == 4
    assert view.post_norm == (build is tiny_opt_post_norm)
    assert view.gated == (build is tiny_llama) and view.relu != view.gated
    assert view.separator == 2 and view.context == 64


def test_other_families_are_refused_with_the_list_of_supported_ones():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8))
    with pytest.raises(ConfigError, match="'gpt2' are not supported: supported are opt, llama"):
        anatomy(model)


def test_opt_with_another_activation_is_refused():
    with pytest.raises(ConfigError, match="gelu"):
        anatomy(tiny_opt(activation_function="gelu"))


class Listener(Observer):
    def __init__(self):
        self.seen = {}

    def residual(self, layer, residual_ND):
        self.seen["residual", layer] = residual_ND

    def middle(self, layer, middle_ND):
        self.seen["middle", layer] = middle_ND

    def heads(self, layer, heads_NE):
        self.seen["heads", layer] = heads_NE

    def neurons(self, layer, activations_NF):
        self.seen["neurons", layer] = activations_NF


@pytest.mark.parametrize("build", MODELS)
def test_the_four_points_are_what_the_definitions_say(build):
    """m_l = (norm of) r_l + attention, and r_{l+1} = (norm of) m_l + MLP, put together from what the hooks see."""
    model = build()
    listener, view = Listener(), anatomy(model)
    ids = torch.randint(4, 96, (2, 7), generator=torch.Generator().manual_seed(0))
    with observed(view, listener):
        hidden = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for layer, block in enumerate(view.blocks):
        seen = {point: listener.seen[point, layer] for point in ("residual", "middle", "heads", "neurons")}
        torch.testing.assert_close(seen["residual"].view(2, 7, -1), hidden[layer])
        after_attention = seen["residual"] + block.attention_output(seen["heads"])
        after_mlp = seen["middle"] + block.mlp_output(seen["neurons"])
        if view.post_norm:
            after_attention, after_mlp = block.mlp_norm(after_attention), block.layer.final_layer_norm(after_mlp)
        torch.testing.assert_close(seen["middle"], after_attention)
        if layer + 1 < view.layers:
            torch.testing.assert_close(listener.seen["residual", layer + 1], after_mlp)


@pytest.mark.parametrize("build", MODELS)
def test_contributions_equal_their_definition(build):
    model = build()
    view = anatomy(model)
    c, block = Contributions(view), view.blocks[1]
    activations, heads = torch.randn(5, 64), torch.randn(5, 4, 8)
    columns = block.mlp_output.weight
    direct = torch.stack([activations[:, j].abs() * columns[:, j].norm() for j in range(64)], 1)
    torch.testing.assert_close(c.of_neurons(1, activations), direct)
    w_o = block.attention_output.weight
    direct = torch.stack([(heads[:, h] @ w_o[:, 8 * h : 8 * h + 8].T).norm(dim=-1) for h in range(4)], 1)
    torch.testing.assert_close(c.of_heads(1, heads), direct, atol=1e-5, rtol=1e-5)


def test_taps_clamp_to_the_first_residual():
    first = TapSource("residual", 0)
    assert [tap_source("overlap", "heads", layer) for layer in (0, 1, 2)] == [
        first,
        TapSource("middle", 0),
        TapSource("middle", 1),
    ]
    assert tap_source("previous", "heads", 1) == first and tap_source("previous", "heads", 2) == TapSource("middle", 0)
    assert tap_source("previous", "mlp", 0) == first and tap_source("previous", "mlp", 1) == first
    for kind, layer in (("heads", 0), ("heads", 2), ("mlp", 2)):
        assert tap_source("mixed", kind, layer) == tap_source("overlap", kind, layer)
    assert tap_source("mixed", "mlp", 0) == tap_source("direct", "mlp", 0) != tap_source("overlap", "mlp", 0)
    assert {tap_source(tap, "mlp", 3) for tap in TAPS} == {
        TapSource("residual", 3),
        TapSource("middle", 3),
        TapSource("residual", 2),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_copy_in_another_precision_has_the_same_fingerprint(dtype):
    """Of weights published in 16 bits, as OPT's are."""
    published = tiny_opt().to(dtype)
    copies = [fingerprint(published.to(copy)) for copy in (dtype, torch.float32, torch.bfloat16)]
    assert len(set(copies)) == 1


def test_other_weights_have_another_fingerprint():
    assert len({fingerprint(model) for model in (tiny_opt(), tiny_opt(seed=1), tiny_llama())}) == 3


def test_random_weights_have_the_shape_and_no_tokenizer():
    shape = {"model_type": "opt", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 64}
    shape |= {"vocab_size": 96, "word_embed_proj_dim": 32}
    loaded = load_model(Config(model=Model(name="x", random_init=True, architecture=shape), dtype="bfloat16"))
    assert loaded.tokenizer is None and loaded.model.dtype == torch.bfloat16 and loaded.anatomy.neurons == 64
    with pytest.raises(ConfigError, match=r"model\.architecture"):
        load_model(Config(model=Model(name="x", random_init=True)))


def test_models_that_cannot_be_had_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no config\.json"):
        load_model(Config(model=Model(name="x", path=str(tmp_path))))
    with pytest.raises(DataError, match="neither in the package nor on the hub"):
        load_model(Config(model=Model(name="opt-175b")))
    with pytest.raises(DataError, match="the network"):
        load_model(Config(model=Model(name="opt-125m", hub="facebook/opt-125m")))


def test_asking_for_cuda_without_a_device_is_refused():
    if torch.cuda.is_available():
        assert load_model(Config(device="cuda")).device.type == "cuda"
    else:
        with pytest.raises(ConfigError, match="no CUDA device"):
            load_model(Config(device="cuda"))


@pytest.mark.cuda
def test_cuda_scores_equal_the_cpus():
    requests = [Request([2, 30, 40, 50], [60, 70, 80])]
    scores = [Scorer(load_model(Config(device=device))).score(requests)[0].loglikelihood for device in ("cpu", "cuda")]
    assert scores[0] == pytest.approx(scores[1], abs=1e-2)

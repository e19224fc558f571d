"""From a config to an engine: what is checked first, what is kept of the model, which predictors are packed."""

import numpy as np
import pytest
import torch
from bundles import untrained_bundle
from tiny import tiny_llama, tiny_opt

from dejavu.decode import ops
from dejavu.decode.build import make_engine
from dejavu.errors import ConfigError, DataError
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel, fingerprint
from dejavu.schema import KERNEL_DEVICES, Config, Decode, Sparsity
from dejavu.sparsity.budget import make_budget


def loaded(family=tiny_opt, **overrides) -> LoadedModel:
    model = family(**overrides)
    return LoadedModel("tiny", model, None, anatomy(model))


def config(selector: str = "predictor", **sparsity) -> Config:
    return Config(sparsity=Sparsity(selector, **sparsity), decode=Decode(storage="float32"))


@pytest.fixture(scope="module")
def last_layer(tmp_path_factory):
    """A bundle with predictors of layer 1 alone."""
    return untrained_bundle(tiny_opt(), tmp_path_factory.mktemp("bundle") / "bundle", layers=[1])


def test_a_bundle_is_checked_although_the_weights_are_freed(last_layer):
    own, model = loaded(), tiny_opt()
    make_engine(own, config(ratio=0.5, dense_layers=[0]), last_layer)
    assert own.model.model.decoder.layers[0].fc1.weight.numel() == 0
    assert own.fingerprint == fingerprint(model), "what a record says is of the whole model"
    assert own.parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(DataError, match="was trained on other weights"):
        make_engine(loaded(seed=1), config(ratio=0.5), last_layer)


def test_a_layer_without_predictors_is_named_and_may_stay_dense(last_layer):
    with pytest.raises(DataError, match="has predictors for the layers 1 and not for 0"):
        make_engine(loaded(), config(ratio=0.5), last_layer)
    engine = make_engine(loaded(), config(ratio=0.5, dense_layers=[0]), last_layer)
    engine.prefill(np.full((3, 9), 5))
    engine.step(np.array([5, 6, 7]))
    assert engine.counters.used_per_layer == {"mlp": [3 * 64, 3 * 32], "heads": [3 * 4, 3 * 2]}
    assert set(engine.weights.predictors) == {("mlp", 1), ("heads", 1)}


@pytest.mark.parametrize("selector", ["predictor", "static", "random"])
def test_nobody_chooses_where_nothing_is_left_out(selector, last_layer):
    assert make_engine(loaded(), config(selector, ratio=0.0), last_layer).chooser is None


def test_what_the_engine_does_not_have_is_refused():
    with pytest.raises(DataError, match="selector=static needs predictors=DIR"):
        make_engine(loaded(), config("static"), None)
    with pytest.raises(ConfigError, match="has no selector oracle"):
        make_engine(loaded(), config("oracle"), None)
    with pytest.raises(ConfigError, match="rule=topk so far, not threshold"):
        make_engine(loaded(), config("predictor", rule="threshold"), None)


def test_a_device_without_kernels_is_refused(monkeypatch):
    own = loaded()
    monkeypatch.setattr(LoadedModel, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="backend=kernel has no kernels for cuda, only for cpu: use device=cpu, or "):
        make_engine(own, config("dense"), None)


def test_the_devices_that_are_named_are_those_that_have_kernels():
    """Every operator, and no other device of torch's."""
    for name in ops.OPERATORS:
        keys = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}
        found = {device for device, key in keys.items() if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
        assert found == set(KERNEL_DEVICES), name


def test_heads_are_kept_in_whole_groups_where_they_are_asked_to_be():
    """Of 4 heads in 2 groups a quarter is not computed: 3 heads, or both groups (2 * 0.75 rounds to 2)."""
    for family, head_unit, kept in ((tiny_llama, "head", 3), (tiny_llama, "group", 4), (tiny_opt, "group", 3)):
        sparsity = Sparsity("random", mlp=0, heads=0.25, head_unit=head_unit)
        assert make_budget(sparsity, anatomy(family())).heads == (kept, kept)
    chosen = make_engine(loaded(tiny_llama), config("random", ratio=0.5, head_unit="group"), None).chooser
    sets = {tuple(chosen("heads", 0, 1)[0].tolist()) for _ in range(40)}
    assert sets == {(0, 1), (2, 3)}, "each group is drawn, and no half of one"

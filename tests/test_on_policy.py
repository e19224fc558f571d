"""Recording the stream that predictors leave: taps of it, and what every unit would contribute there."""

import numpy as np
import pytest
import torch
from bundles import untrained_bundle
from tiny import VOCABULARY, tiny_opt

from dejavu.activations.cache import ActivationCache
from dejavu.activations.collect import cache_head, collect
from dejavu.activations.writer import CacheWriter
from dejavu.analysis.lineage import lineage
from dejavu.errors import ConfigError, DataError
from dejavu.models.contribution import Contributions
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel
from dejavu.models.taps import TapSource
from dejavu.predictors.bundle import describe
from dejavu.schema import Collect, Config, Sparsity
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Predicted, Tokens
from dejavu.stages.collect import on_policy
from dejavu.stages.inputs import check_backend, resolve_inputs

BLOCKS, LENGTH = 4, 12


class Listening(Sparsifier):
    """A sparsifier that keeps what it read: residuals, and contributions before anything is left out."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.seen, self.of = {}, Contributions(self.anatomy)

    def residual(self, layer, residual_ND):
        self.seen["residual", layer] = residual_ND.clone()
        super().residual(layer, residual_ND)

    def neurons(self, layer, activations_NF):
        self.seen["mlp", layer] = self.of.of_neurons(layer, activations_NF)
        return super().neurons(layer, activations_NF)

    def heads(self, layer, heads_NE):
        self.seen["heads", layer] = self.of.of_heads(layer, heads_NE.unflatten(1, (self.anatomy.heads, -1)))
        return super().heads(layer, heads_NE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(model, config, bundle, token blocks, cache of the thinned stream, cache of the dense one)."""
    folder = tmp_path_factory.mktemp("on_policy")
    model = tiny_opt()
    loaded = LoadedModel("tiny", model, None, anatomy(model))
    bundle = untrained_bundle(model, folder / "bundle")
    config = Config(predictors=str(folder / "bundle"), sparsity=Sparsity(ratio=0.5), collect=Collect(on_policy=True))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (BLOCKS, LENGTH), dtype=np.int32)
    numbers = np.zeros_like(ids) + np.arange(BLOCKS, dtype=np.int32)[:, None]
    masked, stream = on_policy(loaded, config)
    caches = []
    for name, more in (("thin", {"masked": masked}), ("dense", {})):
        head = cache_head(loaded, ids, numbers, BLOCKS, Collect()) | {"stream": stream if more else {}}
        head |= {"corpus": {"name": "noise", "hash": "0"}, "document_hashes": [str(n) for n in range(BLOCKS)]}
        with CacheWriter(folder / name, head) as writer:
            collect(loaded, ids, numbers, writer, BLOCKS, Collect(), **more)
            writer.finish()
        caches.append(ActivationCache(folder / name))
    return loaded, config, bundle, ids, *caches


def test_taps_and_labels_are_of_the_stream_that_is_served(recorded):
    loaded, _, bundle, ids, thin, dense = recorded
    units = (loaded.anatomy.neurons // 2,) * 2, (loaded.anatomy.heads // 2,) * 2
    served = Listening(loaded.anatomy, Predicted(bundle, loaded.device), Budget(*units))
    place = torch.arange(ids.size)
    with torch.inference_mode(), served.attached():
        served.begin(Tokens(torch.ones(ids.size, dtype=torch.bool), place, place))
        loaded.model(input_ids=torch.from_numpy(ids).long(), use_cache=False)
    every = slice(None)
    for layer in (0, 1):
        for point, found in (
            ("residual", thin.tap(TapSource("residual", layer), every)),
            ("mlp", thin.mlp(layer, every)),
            ("heads", thin.heads_of(layer, every)),
        ):
            np.testing.assert_allclose(found, served.seen[point, layer], atol=2e-3, rtol=2e-3)
    assert np.array_equal(thin.tap(TapSource("residual", 0), every), dense.tap(TapSource("residual", 0), every))
    assert np.abs(thin.tap(TapSource("residual", 1), every) - dense.tap(TapSource("residual", 1), every)).max() > 0.01


def test_the_bundle_that_follows_knows_all_documents_and_its_teacher(recorded):
    _, config, bundle, _, thin, dense = recorded
    described = describe(thin, config, [0, 1], {})
    assert described["stream"] == {"bundle": bundle.id, "mlp": [32, 32], "heads": [2, 2]}
    assert described["document_hashes"] == ["0", "1", "2", "3"]  # "0" is of both
    assert describe(dense, config, [0, 1], {})["stream"] == {}


def test_what_cannot_be_recorded_is_refused(recorded, tmp_path):
    _, config, *_ = recorded
    assert resolve_inputs("collect", config)["bundle"] is not None
    with pytest.raises(ConfigError, match=r"use sparsity\.selector=predictor, not oracle"):
        check_backend("collect", Config(sparsity=Sparsity("oracle"), collect=Collect(on_policy=True)))
    other = tiny_opt(seed=5)
    with pytest.raises(DataError, match="trained on other weights"):
        on_policy(LoadedModel("other", other, None, anatomy(other)), config)


def test_an_on_policy_cache_comes_from_the_bundle_that_thinned_it_out(recorded):
    _, _, bundle, _, thin, dense = recorded
    origin = lineage(thin.folder, thin.folder.parent)
    assert [(parent.kind, parent.id, parent.folder) for parent in origin.parents] == [
        ("bundle", bundle.id, bundle.folder)
    ]
    assert lineage(dense.folder, dense.folder.parent).parents == ()

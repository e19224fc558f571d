"""Scoring with the engine against scoring with the simulated model: log-likelihoods, densities, shares, batches."""

import numpy as np
import pytest
from bundles import untrained_bundle
from tiny import FAMILIES

from dejavu.decode.build import make_engine
from dejavu.decode.engine import Engine
from dejavu.errors import ConfigError
from dejavu.evaluation.decoded import EngineScorer, batches
from dejavu.evaluation.scoring import Request
from dejavu.evaluation.sparsified import make_scorer, make_scoring
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel
from dejavu.schema import Config, Decode, Sparsity
from dejavu.stages.inputs import check_backend

CONTEXT = 64


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """Makes a tiny model of each family."""
    return FAMILIES[request.param]


def loaded(family) -> LoadedModel:
    """Made anew for every scorer, since the engine takes the model's weights."""
    model = family()
    return LoadedModel("tiny", model, None, anatomy(model))


def settings(
    selector: str, mlp: float = 0.5, heads: float = 0.5, backend: str = "kernel", batch_size: int = 16, **sparsity
) -> Config:
    sparsity = Sparsity(selector, positions="decode", mlp=mlp, heads=heads, **sparsity)
    return Config(sparsity=sparsity, decode=Decode(storage="float32", window=4), backend=backend, batch_size=batch_size)


def requests(count: int = 9) -> list[Request]:
    """Of all lengths, with one that fills the context from a prompt of one token and one from a long prompt."""
    random = np.random.default_rng(0)
    lengths = [*random.integers(1, 20, size=(count, 2)).tolist(), (1, CONTEXT), (CONTEXT - 20, 21)]
    return [Request(random.integers(4, 90, a).tolist(), random.integers(4, 90, b).tolist()) for a, b in lengths]


def scored(family, config: Config, bundle=None):
    """Log-likelihoods and greedy flags of all requests, and what was measured."""
    own = loaded(family)
    scorer = make_scoring(own, config, bundle) if config.backend == "kernel" else make_scorer(own, config, bundle)
    with scorer.attached():
        results = scorer.score(requests())
    return [(result.loglikelihood, result.greedy) for result in results], scorer.measured()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, family):
    return untrained_bundle(family(), tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.mark.parametrize("head_unit", ["head", "group"])
@pytest.mark.parametrize("selector", ["dense", "static", "predictor"])
def test_the_engine_scores_what_the_simulated_model_scores(selector, head_unit, bundle, family):
    """Within 1e-4 a token; predictors decide alike as long as no unit is that near to the cut."""
    needed = None if selector == "dense" else bundle
    found, measured = scored(family, settings(selector, head_unit=head_unit), needed)
    expected, simulated = scored(family, settings(selector, backend="simulate", head_unit=head_unit), needed)
    for request, (value, greedy), (wanted, likeliest) in zip(requests(), found, expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-4 * len(request.continuation))
        assert greedy == likeliest
    densities = {key for key in measured if "density" in key or key == "sparse_token_share"}
    assert densities >= {"mlp_density", "head_density", "body_density", "sparse_token_share"}
    for key in densities:
        assert measured[key] == pytest.approx(simulated[key], abs=1e-12), key
    assert (measured["sparse_token_share"] > 0.5) == (selector != "dense")
    assert measured["ms_per_token"] > 0


@pytest.mark.parametrize("selector", ["dense", "static", "predictor"])
def test_batches_give_what_single_sequences_give(selector, bundle, family):
    """Also where the sets of a batch together are all of a layer, which at a crossover below 1 would run whole."""
    needed = None if selector == "dense" else bundle
    (found, together), (expected, alone) = (
        scored(family, settings(selector, batch_size=size), needed) for size in (16, 1)
    )
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=2e-3)
    together.pop("ms_per_token"), alone.pop("ms_per_token")
    assert together == alone


def test_a_budget_that_leaves_nothing_out_is_dense(bundle, family):
    found, measured = scored(family, settings("static", mlp=0, heads=0), bundle)
    expected, _ = scored(family, settings("dense"))
    assert found == expected and measured["sparse_token_share"] == 0


def test_batches_hold_every_request_once_and_fit_the_context():
    asked = requests()
    made = list(batches(asked, 8, CONTEXT))
    assert sorted(index for batch in made for index in batch) == list(range(len(asked)))
    for batch in made:
        longest = [max(len(part(asked[i])) for i in batch) for part in (lambda r: r.context, lambda r: r.continuation)]
        assert len(batch) <= 8 and sum(longest) - 1 <= CONTEXT


def test_a_context_is_read_once_for_all_its_continuations(bundle, family, monkeypatch):
    question, other = [5, 6, 7, 8], [9, 10, 11]
    asked = [Request(question, [12, 13, 14]), Request(other, [15]), Request(question, [16]), Request(other, [17, 18])]
    prefill, read = Engine.prefill, []

    def reading(self, tokens_BT, *others, **named):
        read.append(len(tokens_BT))
        return prefill(self, tokens_BT, *others, **named)

    monkeypatch.setattr(Engine, "prefill", reading)
    expected, found = (
        make_scoring(loaded(family), settings("predictor", batch_size=size), bundle).score(asked) for size in (1, 4)
    )
    assert read == [1, 1, 1, 1, 2]
    wanted = [each.loglikelihood for each in expected]
    assert [each.loglikelihood for each in found] == pytest.approx(wanted, abs=1e-4)


def test_what_ran_is_timed_and_counted(family):
    own = loaded(family)
    scorer = EngineScorer(own, make_engine(own, settings("dense"), None), batch_size=4)
    assert scorer.measured()["ms_per_token"] == 0
    scorer.score([Request([5, 6], [7, 8, 9]), Request([5], [7])])
    assert scorer.engine.counters.tokens == 2, "the first token of each is the prompt's"
    assert scorer.measured()["ms_per_token"] == 1000 * scorer.seconds / 2 > 0


def test_positions_and_selectors_that_do_not_decode_are_refused(family):
    config = settings("static")
    config.sparsity.positions = "all"
    with pytest.raises(ConfigError, match=r"backend=kernel decodes, so it needs sparsity.positions=decode, not all"):
        check_backend("evaluate", config)
    with pytest.raises(ConfigError, match=r"backend=kernel has no selector oracle.*choose one of dense, predictor"):
        make_scoring(loaded(family), settings("oracle"), None)

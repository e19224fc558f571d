"""The same scores and the same choices whatever shares a batch with a request, and nothing left behind by a run."""

import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_opt

from dejavu.evaluation.scoring import Request, Scorer
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel
from dejavu.models.topk import top_k_mask
from dejavu.predictors.network import Predictor
from dejavu.schema import Sparsity
from dejavu.sparsity.budget import make_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Choice, Oracle, Random, Selector

BATCHES = (1, 3, 8)  # sequences of 256 tokens: 4, 13 and 35 of these requests at a time, padded to different lengths


@pytest.fixture(scope="module", params=[tiny_opt, tiny_llama], ids=["opt", "llama"])
def loaded(request) -> LoadedModel:
    model = request.param()
    return LoadedModel("tiny", model, None, anatomy(model))


def requests(count: int = 40) -> list[Request]:
    random = np.random.default_rng(3)
    lengths = np.stack([random.integers(2, 40, count), random.integers(1, 20, count)], 1)
    return [Request(random.integers(0, 96, a).tolist(), random.integers(0, 96, b).tolist()) for a, b in lengths]


class Static(Selector):
    """The lower half of the units."""

    name = "static"

    def scores(self, choice: Choice) -> torch.Tensor:
        return -torch.arange(64 if choice.kind == "mlp" else 4).float()


class Predicted(Selector):
    """Untrained predictors of the tap."""

    name = "predictor"
    reads_tap = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.networks = {
            (kind, layer): Predictor(32, n, 8) for kind, n in (("mlp", 64), ("heads", 4)) for layer in (0, 1)
        }

    @torch.no_grad()
    def scores(self, choice: Choice) -> torch.Tensor:
        return self.networks[choice.kind, choice.layer](choice.tap_ND)


class Remembered(Selector):
    """What another selector chose when a token was first seen; from then on the same, whatever its batch."""

    name = "remembered"

    def __init__(self, inner: Selector) -> None:
        self.inner, self.reads_tap = inner, inner.reads_tap
        self.sets: dict[tuple, torch.Tensor] = {}

    def scores(self, choice: Choice) -> torch.Tensor:
        units = 64 if choice.kind == "mlp" else 4
        chosen = top_k_mask(self.inner.scores(choice), units // 2).float()
        for row, token in enumerate(
            zip(choice.tokens.document_N.tolist(), choice.tokens.position_N.tolist(), strict=True)
        ):
            chosen[row] = self.sets.setdefault((choice.kind, choice.layer, *token), chosen[row])
        return chosen


def score(loaded: LoadedModel, selector: Selector | None, batch_size: int) -> list[float]:
    if selector is None:
        return [result.loglikelihood for result in Scorer(loaded, batch_size=batch_size).score(requests())]
    sparsifier = Sparsifier(loaded.anatomy, selector, make_budget(Sparsity(ratio=0.5), loaded.anatomy))
    with sparsifier.attached():
        scorer = Scorer(loaded, sparsifier, batch_size=batch_size)
        return [result.loglikelihood for result in scorer.score(requests())]


SELECTORS = {
    "dense": lambda: None,
    "static": Static,
    "random": lambda: Random(0, {"mlp": 64, "heads": 4}),
    "oracle, replayed": lambda: Remembered(Oracle()),
    "predictor, replayed": lambda: Remembered(Predicted()),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_scores_do_not_depend_on_the_batch(loaded, name):
    selector = SELECTORS[name]()
    first, *others = (score(loaded, selector, size) for size in BATCHES)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-4)


class Listening(Selector):
    """Keeps what another selector chooses, by token."""

    name = "listening"

    def __init__(self, inner: Selector) -> None:
        self.inner, self.reads_tap = inner, inner.reads_tap
        self.sets: dict[tuple, torch.Tensor] = {}

    def scores(self, choice: Choice) -> torch.Tensor:
        scores = self.inner.scores(choice)
        chosen = top_k_mask(scores, scores.shape[1] // 2)
        sparse = choice.tokens.sparse_N.tolist()
        tokens = zip(choice.tokens.document_N.tolist(), choice.tokens.position_N.tolist(), strict=True)
        self.sets |= {(choice.kind, choice.layer, *key): chosen[row] for row, key in enumerate(tokens) if sparse[row]}
        return scores


@pytest.mark.parametrize("inner", [Oracle, Predicted])
def test_free_running_choices_hardly_depend_on_the_batch(loaded, inner):
    """Rounding may flip a unit at the cut: in at most one of a thousand token-layers."""
    found = []
    for size in BATCHES:
        listening = Listening(inner())
        score(loaded, listening, size)
        found.append(listening.sets)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        different = sum(not torch.equal(other[key], chosen) for key, chosen in found[0].items())
        assert different <= len(found[0]) / 1000


def test_a_sparse_run_leaves_nothing_behind(loaded):
    before = score(loaded, None, 8)
    sparse = score(loaded, Static(), 8)
    assert np.abs(np.subtract(sparse, before)).max() > 0.1
    assert score(loaded, None, 8) == before, "dense after sparse is the dense model bit for bit"
    assert score(loaded, Static(), 8) == sparse

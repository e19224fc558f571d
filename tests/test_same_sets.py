"""One bundle, every ratio: evaluate, generate and benchmark compute the same units for the same tap values."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import untrained_bundle
from tiny import tiny_opt

from dejavu.benchmark.engines import engines
from dejavu.benchmark.peers import base
from dejavu.benchmark.variants import variant
from dejavu.decode.build import make_engine
from dejavu.decode.engine import Engine
from dejavu.evaluation.sparsified import make_scorer
from dejavu.models.families import anatomy, shape_of
from dejavu.models.load import LoadedModel
from dejavu.models.topk import kept
from dejavu.predictors.bundle import load_bundle, recalibrated
from dejavu.schema import Config, Decode, Sparsity
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.calibration import Point, skipped_share
from dejavu.sparsity.selectors import Tokens

PROMPT, LENGTH, WINDOW = 6, 18, 4
NEAR = 1e-4  # scores of units that rounding may put on the other side of the cut

Sets = dict[tuple[str, int, int], tuple[set[int], np.ndarray]]  # (kind, layer, position) -> chosen, scores


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The model as `benchmark` reads it, and its bundle."""
    folder = tmp_path_factory.mktemp("same")
    tiny_opt().save_pretrained(folder / "model")
    untrained_bundle(tiny_opt(), folder / "bundle")
    return folder


def ids() -> torch.Tensor:
    return torch.randint(4, 90, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def decoded(engine) -> Sets:
    """What an engine chose for every token after the prompt."""
    found: Sets = {}
    engine.prefill(ids()[:, :PROMPT].numpy())
    for position in range(PROMPT, LENGTH):
        engine.step(ids()[:, position].numpy())
        for half in engine.halves:
            if half.choice is not None:
                chosen = set(half.choice.units_BK[0].tolist())
                found[half.kind, half.layer, position] = chosen, half.choice.scores_BU[0].copy()
    return found


def timed(config: Config, sparsity: Sparsity, folder: Path) -> Engine:
    """The engine that `benchmark` builds in its process, with the bundle of `config.predictors`."""
    architecture = tiny_opt().config.to_dict()
    states = [variant(shape_of(architecture), sparsity, load_bundle(Path(str(config.predictors))))]
    spec = base(config, str(folder / "model"), architecture, 1) | {"storage": "float32", "variants": states}
    return engines(spec)[0].engine


def masked(config: Config, bundle) -> dict[tuple[str, int], torch.Tensor]:
    """Masks of the simulated model over the same text."""
    model = tiny_opt()
    scorer = make_scorer(LoadedModel("tiny", model, None, anatomy(model)), config, bundle)
    assert scorer.sparsifier is not None
    scorer.sparsifier.masks = {}
    position_N = torch.arange(LENGTH)
    with torch.no_grad(), scorer.attached():
        scorer.sparsifier.begin(Tokens(position_N >= PROMPT, position_N * 0, position_N))
        model(input_ids=ids(), use_cache=False)
    return scorer.sparsifier.masks


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.65, 0.75, 0.9])
def test_evaluate_generate_and_benchmark_choose_alike(ratio, saved):
    bundle, model = load_bundle(saved / "bundle"), tiny_opt()
    sparsity = Sparsity("predictor", positions="decode", mlp=ratio, heads=ratio)
    config = Config(sparsity=sparsity, decode=Decode(storage="float32", window=WINDOW))
    generating = decoded(make_engine(LoadedModel("tiny", model, None, anatomy(model)), config, bundle))
    config.predictors = str(saved / "bundle")
    benchmark = decoded(timed(config, sparsity, saved))
    assert generating.keys() == benchmark.keys() and len(generating) == 4 * (LENGTH - PROMPT)
    assert all(generating[key][0] == benchmark[key][0] for key in generating), (
        "the engine that is timed chooses otherwise"
    )
    masks, units = masked(config, bundle), {"mlp": anatomy(model).neurons, "heads": anatomy(model).heads}
    for (kind, layer, position), (chosen, scores) in generating.items():
        assert len(chosen) == kept(ratio, units[kind])
        simulated = set(masks[kind, layer][position].nonzero()[:, 0].tolist())
        cut = np.sort(scores)[-len(chosen)]
        assert all(abs(scores[unit] - cut) < NEAR for unit in chosen ^ simulated), (kind, layer, position)


def test_a_calibrated_budget_is_timed_as_it_decodes(saved, tmp_path):
    """One half block is left whole, so that its predictor is not asked."""
    parts = anatomy(tiny_opt())
    budget = Budget((16, parts.neurons), (2, 1))
    point = Point(skipped_share(budget, parts), budget, 0.1)
    recalibrated(load_bundle(saved / "bundle"), tmp_path / "bundle", {"curve": [point.as_json()]}, [])
    sparsity = Sparsity("predictor", positions="decode", ratio=point.skipped, budget="calibrated")
    config = Config(sparsity=sparsity, decode=Decode(storage="float32", window=WINDOW))
    config.predictors = str(tmp_path / "bundle")
    loaded = LoadedModel("tiny", tiny_opt(), None, parts)
    generating = decoded(make_engine(loaded, config, load_bundle(tmp_path / "bundle")))
    benchmark = decoded(timed(config, sparsity, saved))
    assert {key[:2] for key in generating} == {("mlp", 0), ("heads", 0), ("heads", 1)} == {key[:2] for key in benchmark}
    assert {key: chosen for key, (chosen, _) in generating.items()} == {
        key: chosen for key, (chosen, _) in benchmark.items()
    }
    assert {len(chosen) for (kind, layer, _), (chosen, _) in benchmark.items() if kind == "mlp"} == {16}

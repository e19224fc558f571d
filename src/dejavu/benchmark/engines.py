"""This project's engine as contenders: dense and sparse variants over the same weights in one storage."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dejavu.benchmark.contenders import DejaVu
from dejavu.benchmark.variants import Variant, budget_of
from dejavu.decode.build import pack_predictors
from dejavu.decode.choosing import Predicted
from dejavu.decode.engine import Engine
from dejavu.decode.random_weights import random_weights
from dejavu.decode.weights import Weights, repack
from dejavu.models.anatomy import KINDS
from dejavu.models.load import pretrained_model
from dejavu.predictors.bundle import load_bundle

LOUD = 100.0  # so that the random part decides, not the predictor's own scores
POOL = 61  # vectors of random scores, drawn before anything is timed


class FreshSets(DejaVu):
    """The engine over random weights. Before each token every predictor's bias becomes a random vector, another each.

    Random predictors would choose nearly the same units for every token, and those would stay in the cache. So the
    predictors run as ever, and choose a random set.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__(engine)
        self.calls, random, weights = 0, np.random.default_rng(seed), engine.weights
        scored = {kind: len(weights.predictors[kind, 0].up.bias) for kind in KINDS}
        self.pool = {kind: random.standard_normal((POOL, scored[kind]), dtype=np.float32) * LOUD for kind in KINDS}

    def prepare(self) -> None:
        """Draw the next token's sets; not timed."""
        for (kind, _), predictor in self.engine.weights.predictors.items():
            self.calls += 1
            predictor.up.bias[:] = self.pool[kind][self.calls % POOL]


def engines(spec: dict[str, Any]) -> list[DejaVu]:
    """One contender for each of the spec's variants."""
    tap = "overlap"
    if spec["source"] is None:
        weights = random_weights(spec["architecture"], spec["storage"], spec["ranks"], spec["seed"], spec["head_unit"])
    else:
        weights = repack(pretrained_model(spec["source"], torch.float32), spec["storage"])
        if spec["bundle"] is not None:
            bundle = load_bundle(Path(spec["bundle"]))
            tap = str(bundle.config["tap"])
            groups = [(kind, layer) for kind in KINDS for layer in bundle.layers]
            pack_predictors(weights, bundle, groups, spec["head_unit"])
    decode, random = spec["decode"], spec["source"] is None
    made = [
        Engine(
            weights, chooser(weights, variant, random), tap=tap, kv=decode["kv"],
            window=decode["window"], threads=spec["threads"], overlap=decode["overlap"], skip_zeros=not random,
        )
        for variant in spec["variants"]
    ]  # fmt: skip
    return [FreshSets(engine, spec["seed"]) if random else DejaVu(engine) for engine in made]


def chooser(weights: Weights, variant: Variant, random: bool) -> Predicted | None:
    """The predictors' budget; None where all is computed. Random hidden vectors are not skipped where they are zero."""
    budget = budget_of(variant)
    return None if budget.is_whole(weights) else Predicted(budget, not random)

"""This project's engine as contenders: dense and sparse variants over the same weights in one storage."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu.benchmark.contenders import DejaVu
from dejavu.decode.choosing import Chooser, Chosen, Predicted, union
from dejavu.decode.engine import Engine
from dejavu.decode.weights import Weights, pack_predictor, random_weights, repack
from dejavu.models.anatomy import KINDS
from dejavu.models.load import pretrained_model
from dejavu.models.topk import kept
from dejavu.predictors.bundle import load_bundle
from dejavu.sparsity.budget import Budget

POOL = 61  # random sets of each kind, drawn before anything is timed


class FreshSets(Predicted):
    """Runs the predictors for their cost and takes a random set instead, another for every layer and token.

    Random predictors would choose nearly the same units for every token, and those would stay in the cache.
    """

    def __init__(self, weights: Weights, budget: Budget, threads: int, seed: int) -> None:
        super().__init__(weights, budget, threads, skip_zeros=False)
        self.calls, random = 0, np.random.default_rng(seed)
        self.pool = {
            kind: [
                np.sort(random.choice(weights.units(kind), self.kept(kind, 0), replace=False))[None]
                for _ in range(POOL)
            ]
            for kind in KINDS
        }

    def __call__(self, kind: str, layer: int, tap_BD: Tensor) -> Chosen | None:
        if super().__call__(kind, layer, tap_BD) is None:
            return None
        self.calls += 1
        return union(self.pool[kind][self.calls % POOL], self.weights.units(kind))


def engines(spec: dict[str, Any]) -> list[DejaVu]:
    """One contender for each of the spec's variants, {mlp, heads} NOT computed."""
    tap = "overlap"
    if spec["source"] is None:
        weights = random_weights(spec["architecture"], spec["storage"], spec["rank"], spec["seed"])
    else:
        weights = repack(pretrained_model(spec["source"], torch.float32), spec["storage"])
        if spec["bundle"] is not None:
            bundle = load_bundle(Path(spec["bundle"]))
            tap = str(bundle.config["tap"])
            for kind in KINDS:
                for layer in bundle.layers:
                    weights.predictors[kind, layer] = pack_predictor(bundle.predictor(kind, layer), weights.storage)
    decode, random = spec["decode"], spec["source"] is None
    return [
        DejaVu(
            Engine(
                weights, chooser(weights, variant, random, spec), tap=tap, kv=decode["kv"], window=decode["window"],
                threads=spec["threads"], overlap=decode["overlap"], skip_zeros=not random,
            )
        )
        for variant in spec["variants"]
    ]  # fmt: skip


def chooser(weights: Weights, variant: dict[str, float], random: bool, spec: dict[str, Any]) -> Chooser | None:
    """Predictors, with random weights for their cost only; None for the dense variant."""
    if variant["mlp"] == variant["heads"] == 0:
        return None
    layers = len(weights.blocks)
    budget = Budget(
        (kept(variant["mlp"], weights.neurons),) * layers, (kept(variant["heads"], weights.heads),) * layers
    )
    if random:
        return FreshSets(weights, budget, spec["threads"], spec["seed"])
    return Predicted(weights, budget, spec["threads"])

"""What an engine holds for a batch: keys, values and waiting inputs, and the half blocks in the order they run.

Everything that stays from token to token is bound to the operators here, once, so that a token costs few steps in
Python. Shape suffixes as in `engine`; R a predictor's rank, U what it scores.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu.decode import ops
from dejavu.decode.choosing import Predicted
from dejavu.decode.weights import NOTHING, Weights, matrix, normed, normed_matrix
from dejavu.models.taps import tap_source

Place = tuple[str, int]  # (kind, layer) of a half block
OPERATORS = {"heads": ("attention", "choose_attention"), "mlp": ("mlp", "choose_mlp")}


@dataclass
class Choice:
    """A predictor's buffers for a batch."""

    hidden_BR: np.ndarray
    scores_BU: np.ndarray
    units_BK: np.ndarray
    bound_first: ops.Bound  # its first half alone

    @property
    def hidden(self) -> Tensor:
        return torch.from_numpy(self.hidden_BR)


@dataclass
class Half:
    """One half block: its operator over given units and, where a predictor chooses, the one that asks it."""

    kind: str
    layer: int
    bound: ops.Bound
    choosing: ops.Bound | None = None
    choice: Choice | None = None  # its predictor's buffers
    first: list[Choice] = field(default_factory=list)  # predictors that read its input and do not ride along
    whole: int = 0  # tokens that still run with all units

    def __post_init__(self) -> None:
        self.operator, self.choose = (getattr(ops, name) for name in OPERATORS[self.kind])


class State:
    """Caches of a batch with room for some positions, zeroed."""

    def __init__(self, weights: Weights, batch: int, room: int, window: int) -> None:
        layers, width = len(weights.blocks), weights.width
        shape = (layers, batch, weights.kv_heads, room, weights.head_dim)
        self.keys_LBGTK, self.values_LBGTK = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        kind = np.int16 if weights.storage == "int8" else np.float32
        self.pending_LBWD = np.zeros((layers, batch, window, width), kind)
        self.pending_scale_LBW = np.ones((layers, batch, window), np.float32)
        self.start_B, self.length_B = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.filled_LBG = np.zeros((layers, batch, weights.kv_heads), np.int64)
        self.active_B = np.ones(batch, bool)

    @property
    def batch(self) -> int:
        return len(self.length_B)


def predicted(weights: Weights, chooser: Any) -> dict[Place, int]:
    """Units that a predictor chooses for each token, by half block; without those that run whole."""
    if not isinstance(chooser, Predicted):
        return {}
    return {
        (kind, layer): kept
        for layer in range(len(weights.blocks))
        for kind in ("heads", "mlp")
        if (kept := chooser.budget.of(kind)[layer]) < weights.units(kind)
    }


def riders(readers: list[Place], tap: str) -> dict[Place, list[Place]]:
    """The predictors that read each half block's own input."""
    found: dict[Place, list[Place]] = {}
    for kind, layer in readers:
        source = tap_source(tap, kind, layer)
        place = ("heads" if source.point == "residual" else "mlp", source.layer)
        found.setdefault(place, []).append((kind, layer))
    return found


def make_plan(
    weights: Weights, chooser: Any, tap: str, state: State, read_LPC: dict[str, np.ndarray], threads: int, period: int,
    overlap: bool, skip_zeros: bool,
) -> list[Half]:  # fmt: skip
    """The half blocks in their order, bound to a state. `period`: once in so many tokens all heads catch up."""
    kept = predicted(weights, chooser)
    choices = {place: _choice(weights, place, kept[place], state.batch, threads) for place in kept}
    read_by = riders(list(kept), tap)
    sums_PBD = np.empty((threads, state.batch, weights.width), np.float32)
    halves = []
    for layer in range(len(weights.blocks)):
        for kind in ("heads", "mlp"):
            place = (kind, layer)
            readers = read_by.get(place, [])
            # A half block cannot carry the predictor it waits for.
            beside = next((reader for reader in readers if overlap and reader != place), None)
            standing = _attention if kind == "heads" else _mlp
            rest = (*standing(weights, layer, state, sums_PBD, read_LPC[kind][layer], period, skip_zeros),
                    *_beside(weights, beside, choices))  # fmt: skip
            half = Half(kind, layer, ops.Bound(OPERATORS[kind][0], *rest))
            half.first = [choices[reader] for reader in readers if reader != beside]
            if place in kept:
                choice, predictor = choices[place], weights.predictors[place]
                half.choice = choice
                asked = (
                    choice.hidden_BR, choice.scores_BU, choice.units_BK, state.active_B, *matrix(predictor.up),
                    threads, chooser.skip_zeros, predictor.together,
                )  # fmt: skip
                half.choosing = ops.Bound(OPERATORS[kind][1], asked, rest)
            halves.append(half)
    return halves


def _choice(weights: Weights, place: Place, kept: int, batch: int, threads: int) -> Choice:
    predictor = weights.predictors[place]
    return Choice(
        np.zeros((batch, predictor.down.rows.shape[0]), np.float32),
        np.empty((batch, len(predictor.up.bias)), np.float32), np.empty((batch, kept // predictor.together), np.int64),
        ops.Bound("project", *normed_matrix(predictor.norm, predictor.down), predictor.relu, threads),
    )  # fmt: skip


def _attention(
    weights: Weights, layer: int, state: State, sums_PBD: np.ndarray, read_PC: np.ndarray, period: int, skip: bool
) -> tuple[Any, ...]:
    block = weights.blocks[layer]
    return (
        *normed_matrix(block.attention_norm, block.queries), *matrix(block.keys), *matrix(block.values),
        *matrix(block.output), state.keys_LBGTK[layer], state.values_LBGTK[layer], state.pending_LBWD[layer],
        state.pending_scale_LBW[layer], state.start_B, state.length_B, state.filled_LBG[layer], period, layer,
        np.float32(weights.head_dim**-0.5), weights.turns, sums_PBD, read_PC,
    )  # fmt: skip


def _mlp(
    weights: Weights, layer: int, state: State, sums_PBD: np.ndarray, read_PC: np.ndarray, period: int, skip: bool
) -> tuple[Any, ...]:
    block = weights.blocks[layer]
    return *normed_matrix(block.mlp_norm, block.first), *matrix(block.second), skip, sums_PBD, read_PC


def _beside(weights: Weights, reader: Place | None, choices: dict[Place, Choice]) -> tuple[Any, ...]:
    """The first half of the predictor that shares a half block's work list; of none, no rows."""
    if reader is None:
        none_RC = np.zeros((0, 1), weights.embedding.data_RC.dtype)
        return *normed(None), none_RC, NOTHING, NOTHING, False, np.zeros((1, 0), np.float32)
    predictor = weights.predictors[reader]
    return *normed_matrix(predictor.norm, predictor.down), predictor.relu, choices[reader].hidden_BR

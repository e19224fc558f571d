"""Decoding token by token with only the chosen rows read.

    x = embedding (+ learned position)
    for each block:
        A = heads chosen from an earlier tensor;    m = x + sum_{h in A} W_o[:, h] head_h + b_o
        S = neurons chosen from an earlier tensor;  x = m + sum_{j in S} a_j W2[:, j] + b2
    logits = output embedding . norm(x)

K and V exist for every head at every position, but those of a head that was not chosen are computed later (`kv=lazy`):
the inputs of the last `window` positions are kept for each layer, a chosen head catches up before it attends, and once
in a window all heads of a layer do. Layers do so at different tokens, so that none pays for all of them. Heads that
share keys and values catch up as one, and rotary positions turn a key by the position of its own input.

Shape suffixes: B sequences, D width, H heads, G key/value groups, K head_dim, T positions, N chosen units, F neurons,
L layers, W window, P threads, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.decode import ops, reference
from dejavu.decode.choosing import Chooser, Predicted
from dejavu.decode.plan import Half, State, make_plan, predicted
from dejavu.decode.storage import unpack
from dejavu.decode.weights import Block, Weights, normed
from dejavu.errors import ConfigError, DataError
from dejavu.models.anatomy import KINDS

ROWS = {"mlp": ("first", "second"), "heads": ("q", "kv", "o")}  # what the kernels of a kind count


@dataclass
class Counters:
    """Tokens, rows read by the kernels and units used, since the engine was made.

    `first`: neurons whose rows of W1 (gated: of both) were read. Keys and values that two threads share count twice.
    """

    read_LPC: dict[str, np.ndarray]
    tokens: int = 0
    used_per_layer: dict[str, list[int]] = field(default_factory=dict)

    @property
    def used(self) -> dict[str, int]:
        """Units used, all layers together."""
        return {kind: sum(layers) for kind, layers in self.used_per_layer.items()}

    @property
    def rows(self) -> dict[str, int]:
        """Rows read of each matrix, all layers together."""
        return {
            name: int(self.read_LPC[kind][:, :, column].sum())
            for kind, names in ROWS.items()
            for column, name in enumerate(names)
        }


class Engine:
    """One batch at a time: `prefill(tokens, start)`, then `step(tokens)` for each further token."""

    def __init__(
        self,
        weights: Weights,
        chooser: Predicted | Chooser | None = None,
        *,
        tap: str = "overlap",
        kv: str = "lazy",
        window: int = 16,
        threads: int | None = None,
        overlap: bool = False,
        crossover: float = 1.0,
        skip_zeros: bool = True,
    ) -> None:
        self.weights, self.chooser, self.tap, self.window, self.crossover = weights, chooser, tap, window, crossover
        self.period = window if kv == "lazy" else 1
        self.threads = threads or default_threads()
        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        if self.threads > most:
            raise ConfigError(f"decode.threads={threads}: this process has {most}")
        layers, columns = len(weights.blocks), 8  # a cache line for each thread's counts
        self.counters = Counters(
            {kind: np.zeros((layers, self.threads, columns), np.int64) for kind in KINDS},
            used_per_layer={kind: [0] * layers for kind in KINDS},
        )
        self.overlap, self.skip_zeros = overlap, skip_zeros
        self.predicted = predicted(weights, chooser)
        self.capacity = 0

    @property
    def layers(self) -> int:
        return len(self.weights.blocks)

    @torch.inference_mode()
    def prefill(self, tokens_BT: np.ndarray, start_B: np.ndarray | None = None, capacity: int | None = None) -> Tensor:
        """Run the prompts densely and keep K and V of all heads; logits at the last position, (B, V).

        Prompts are padded on the left: sequence b starts at position `start_B[b]`. Raises DataError for a prompt longer
        than the context.
        """
        batch, length = tokens_BT.shape
        self._allocate(batch, max(capacity or self.weights.context, length), length)
        state = self.state
        state.start_B[:] = 0 if start_B is None else start_B
        state.length_B[:] = length
        position_BT = np.maximum(np.arange(length)[None] - state.start_B[:, None], 0)
        x_BTD = self._embedded(tokens_BT, position_BT)
        place = torch.arange(length)
        after_B11 = torch.from_numpy(state.start_B)[:, None, None]
        mask_BTT = (place[None, None, :] <= place[None, :, None]) & (place >= after_B11)
        mask_BTT |= torch.eye(length, dtype=torch.bool)  # padding attends to itself, so that nothing is NaN
        largest = max(self.weights.blocks[0].first.rows.data_RC.size, self.weights.blocks[0].queries.rows.data_RC.size)
        room = torch.empty(0 if self.weights.storage == "float32" else largest)
        turns_B1TK = None
        if self.weights.turns.ndim == 2:
            turns_B1TK = torch.from_numpy(self.weights.turns[position_BT])[:, None]
        for number, block in enumerate(self.weights.blocks):
            x_BTD = self._dense_block(number, block, x_BTD, mask_BTT, turns_B1TK, room)
        state.filled_LBG[:] = length
        return self._logits(x_BTD[:, -1].contiguous())

    def continue_from(self, other: "Engine", index_B: np.ndarray | None = None) -> None:
        """Take over what an engine with the same weights, this one or another, has read; nothing may be pending there.

        Sequence b goes on where sequence `index_B[b]` was read to, each where it is without `index_B`.
        """
        read = other.state
        index_B = np.arange(read.batch) if index_B is None else index_B
        self._allocate(len(index_B), other.capacity, 1)
        for name in ("keys_LBGTK", "values_LBGTK", "filled_LBG"):
            getattr(self.state, name)[:] = getattr(read, name)[:, index_B]
        for name in ("start_B", "length_B"):
            getattr(self.state, name)[:] = getattr(read, name)[index_B]

    def _dense_block(
        self, number: int, block: Block, x_BTD: Tensor, mask_BTT: Tensor, turns_B1TK: Tensor | None, room: Tensor
    ) -> Tensor:
        """One block over the whole prompt, K and V of all heads stored; `room` holds one matrix at a time."""
        batch, length, _ = x_BTD.shape
        h_BTD = reference.normed(x_BTD, block.attention_norm)
        q, k, v = (
            F.linear(h_BTD, unpack(part.rows, room), torch.from_numpy(part.bias))
            .view(batch, length, -1, self.weights.head_dim)
            .transpose(1, 2)
            for part in (block.queries, block.keys, block.values)
        )
        q, k = (reference.turned(part, turns_B1TK) for part in (q, k))
        self.state.keys_LBGTK[number, :, :, :length] = k.numpy()
        self.state.values_LBGTK[number, :, :, :length] = v.numpy()
        shared = self.weights.heads > self.weights.kv_heads
        heads = F.scaled_dot_product_attention(q, k, v, mask_BTT[:, None], enable_gqa=shared)
        x_BTE = heads.transpose(1, 2).flatten(2)
        m_BTD = x_BTD + x_BTE @ unpack(block.output.rows, room) + torch.from_numpy(block.output.bias)
        h_BTD = reference.normed(m_BTD, block.mlp_norm)
        a_BTF = reference.activations(h_BTD, unpack(block.first.rows, room), torch.from_numpy(block.first.bias))
        return m_BTD + a_BTF @ unpack(block.second.rows, room) + torch.from_numpy(block.second.bias)

    def _allocate(self, batch: int, capacity: int, length: int) -> None:
        """Caches for a batch, and the half blocks over them."""
        weights = self.weights
        if length > weights.context:
            raise DataError(f"a prompt of {length} tokens is longer than the context of {weights.context}: shorten it")
        self.capacity = min(capacity, weights.context)
        self.state = State(weights, batch, self.capacity, self.window)
        self.halves = make_plan(
            weights, self.chooser, self.tap, self.state, self.counters.read_LPC, self.threads, self.period,
            self.overlap, self.skip_zeros,
        )  # fmt: skip
        no_bias = np.zeros(weights.output.shape[0], np.float32)
        output = weights.output.data_RC, weights.output.scale_R, no_bias
        self.bound_logits = ops.Bound("project", *normed(weights.final_norm), *output, False, self.threads)

    def step(self, tokens_B: np.ndarray, active_B: np.ndarray | None = None) -> Tensor:
        """Read one more token of every sequence; logits (B, V). Raises DataError when the cache is full.

        Sequences that are not active have ended: they choose no units and their logits mean nothing.
        """
        state = self.state
        if int(state.length_B.max()) >= self.capacity:
            raise DataError(f"the cache holds {self.capacity} positions and is full: ask for fewer new tokens")
        state.active_B[:] = True if active_B is None else active_B
        position_B = state.length_B - state.start_B
        state.length_B += 1
        ended_B = ~state.active_B
        state.filled_LBG[:, ended_B] = state.length_B[ended_B, None]  # what has ended waits for nothing
        x_BD = self._embedded(tokens_B[:, None], position_B[:, None])[:, 0].contiguous()
        active = int(state.active_B.sum())
        with kernel_threads(self.threads):
            for half in self.halves:
                for choice in half.first:
                    ops.project(x_BD, choice.hidden, choice.bound_first.number)
                if half.choosing is None or half.whole > 0:
                    self._run_given(half, x_BD)
                else:
                    self._run_chosen(half, half.choosing, x_BD, active)
            self.counters.tokens += active
            return self._logits(x_BD)

    def _run_chosen(self, half: Half, choosing: ops.Bound, x_BD: Tensor, active: int) -> None:
        """x += what the units add that a predictor chooses. Raises DataError for NaN."""
        read = half.choose(x_BD, choosing.number)
        if read < 0:
            raise DataError(
                f"the predictor of {half.kind} in layer {half.layer} gave NaN: check the model, the weights and the "
                "bundle"
            )
        self.counters.used_per_layer[half.kind][half.layer] += active * self.predicted[half.kind, half.layer]
        if self.state.batch > 1 and read > self.crossover * self.weights.units(half.kind):
            half.whole = self.window

    def _run_given(self, half: Half, x_BD: Tensor) -> None:
        """x += what the units add that no predictor of the weights chooses: all, or what the chooser says."""
        state, units = self.state, self.weights.units(half.kind)
        given = None
        if half.whole > 0:
            half.whole -= 1
        elif self.chooser is not None and not isinstance(self.chooser, Predicted):
            given = self.chooser(half.kind, half.layer, state.batch)
            if state.batch > 1 and given is not None and len(given[0]) > self.crossover * units:
                half.whole = self.window
        units_N, mask_BN = given or (np.arange(units), np.ones((state.batch, units), dtype=bool))
        if not state.active_B.all():
            mask_BN = mask_BN & state.active_B[:, None]
            wanted_N = mask_BN.any(0)
            units_N, mask_BN = units_N[wanted_N], mask_BN[:, wanted_N]
        self.counters.used_per_layer[half.kind][half.layer] += int(np.count_nonzero(mask_BN))
        mask_BN = np.ascontiguousarray(mask_BN)  # numpy's indexing may give columns first
        half.operator(x_BD, torch.from_numpy(units_N), torch.from_numpy(mask_BN), half.bound.number)

    def _embedded(self, tokens_BT: np.ndarray, position_BT: np.ndarray) -> Tensor:
        """Token embeddings, with learned positions theirs too, (B, T, D)."""
        rows, flat = self.weights.embedding, tokens_BT.reshape(-1)
        picked = type(rows)(rows.data_RC[flat], rows.scale_R[flat], rows.storage)
        x_BTD = unpack(picked).view(*tokens_BT.shape, -1)
        learned = self.weights.positions
        return x_BTD if learned is None else x_BTD + torch.from_numpy(learned[position_BT])

    def _logits(self, x_BD: Tensor) -> Tensor:
        logits_BV = torch.empty(len(x_BD), self.weights.output.shape[0])
        ops.project(x_BD, logits_BV, self.bound_logits.number)
        return logits_BV


def default_threads() -> int:
    """As many as torch has: who gives a process fewer (OMP_NUM_THREADS) means the kernels too, whose threads would
    otherwise wait for cores that another process holds."""
    of_torch = torch.get_num_threads()
    found = min(of_torch, numba.get_num_threads())
    torch.set_num_threads(of_torch)  # numba's first call sets it to its own: both ask the same OpenMP
    return found


@contextmanager
def kernel_threads(threads: int) -> Iterator[None]:
    """Run the kernels on this many threads, and torch on one: its idle threads would spin on the same cores."""
    before_torch = torch.get_num_threads()  # before numba, see default_threads
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(before)
        torch.set_num_threads(before_torch)

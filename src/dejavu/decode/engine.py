"""Decoding token by token with only the chosen rows read.

    x = embedding + position
    for each block:
        A = heads chosen from an earlier tensor;    m = x + sum_{h in A} W_o[:, h] head_h + b_o
        S = neurons chosen from an earlier tensor;  x = m + sum_{j in S} relu(.) W2[:, j] + b2
    logits = embedding . norm(x)

K and V exist for every head at every position, but those of a head that was not chosen are computed later (`kv=lazy`):
the inputs of the last `window` positions are kept for each layer, a chosen head catches up before it attends, and once
in a window all heads of a layer do. Layers do so at different tokens, so that none pays for all of them.

Shape suffixes: B sequences, D width, H heads, K head_dim, T positions, N chosen units, L layers, W window, P threads,
V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.decode import ops
from dejavu.decode.choosing import Chooser, Chosen, Predicted
from dejavu.decode.storage import unpack
from dejavu.decode.weights import NOTHING, Block, Norm, Weights, matrix, normed, normed_matrix
from dejavu.errors import ConfigError, DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.taps import TapSource, tap_source

ROWS = {"mlp": ("fc1", "fc2"), "heads": ("q", "kv", "o")}  # what the kernels of a kind count


@dataclass
class Counters:
    """Tokens, rows read by the kernels and units used, since the engine was made."""

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
        chooser: Chooser | None = None,
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
        self.threads = threads or numba.get_num_threads()
        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        if self.threads > most:
            raise ConfigError(f"decode.threads={threads}: this process has {most}")
        layers, columns = len(weights.blocks), 8  # a cache line for each thread's counts
        self.counters = Counters(
            {kind: np.zeros((layers, self.threads, columns), np.int64) for kind in KINDS},
            used_per_layer={kind: [0] * layers for kind in KINDS},
        )
        self.beside = predictors_beside(chooser, tap, layers) if overlap else {}
        self.skip_zeros = skip_zeros
        self.whole: dict[tuple[str, int], int] = {}  # (kind, layer) -> tokens that still run whole
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
        self.start_B[:] = 0 if start_B is None else start_B
        self.length_B[:] = length
        x_BTD = self._embedded(tokens_BT, np.maximum(np.arange(length)[None] - self.start_B[:, None], 0))
        place = torch.arange(length)
        after_B11 = torch.from_numpy(self.start_B)[:, None, None]
        mask_BTT = (place[None, None, :] <= place[None, :, None]) & (place >= after_B11)
        mask_BTT |= torch.eye(length, dtype=torch.bool)  # padding attends to itself, so that nothing is NaN
        for number, block in enumerate(self.weights.blocks):
            x_BTD = self._dense_block(number, block, x_BTD, mask_BTT)
        self.filled_LBH[:] = length
        self.whole.clear()
        return self._logits(x_BTD[:, -1].contiguous())

    def continue_from(self, other: "Engine") -> None:
        """Take over what another engine with the same weights has read; nothing may be pending there."""
        self._allocate(len(other.length_B), other.capacity, 1)
        for mine, theirs in (
            (self.keys_LBHTK, other.keys_LBHTK), (self.values_LBHTK, other.values_LBHTK),
            (self.start_B, other.start_B), (self.length_B, other.length_B), (self.filled_LBH, other.filled_LBH),
        ):  # fmt: skip
            mine[:] = theirs
        self.whole.clear()

    def _dense_block(self, number: int, block: Block, x_BTD: Tensor, mask_BTT: Tensor) -> Tensor:
        """One block over the whole prompt, K and V of all heads stored."""
        batch, length, _ = x_BTD.shape
        shape = (batch, length, self.weights.heads, self.weights.head_dim)
        h_BTD = normed_prompt(x_BTD, block.attention_norm)
        q, k, v = (
            F.linear(h_BTD, unpack(part.rows), torch.from_numpy(part.bias)).view(shape).transpose(1, 2)
            for part in (block.queries, block.keys, block.values)
        )
        self.keys_LBHTK[number, :, :, :length] = k.numpy()
        self.values_LBHTK[number, :, :, :length] = v.numpy()
        heads = F.scaled_dot_product_attention(q, k, v, mask_BTT[:, None]).transpose(1, 2).flatten(2)
        m_BTD = x_BTD + heads @ unpack(block.output.rows) + torch.from_numpy(block.output.bias)
        h_BTD = normed_prompt(m_BTD, block.mlp_norm)
        a_BTF = F.relu(F.linear(h_BTD, unpack(block.first.rows), torch.from_numpy(block.first.bias)))
        return m_BTD + a_BTF @ unpack(block.second.rows) + torch.from_numpy(block.second.bias)

    def _allocate(self, batch: int, capacity: int, length: int) -> None:
        """Caches for a batch, and the kernels' standing arguments over them."""
        weights = self.weights
        if length > weights.context:
            raise DataError(f"a prompt of {length} tokens is longer than the context of {weights.context}: shorten it")
        shape = (self.layers, batch, weights.heads, min(capacity, weights.context), weights.head_dim)
        self.capacity = shape[3]
        self.keys_LBHTK, self.values_LBHTK = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        kind = np.int16 if weights.storage == "int8" else np.float32
        pending_LBWD = np.zeros((self.layers, batch, self.window, weights.width), kind)
        pending_scale_LBW = np.ones((self.layers, batch, self.window), np.float32)
        self.start_B, self.length_B = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.filled_LBH = np.zeros((self.layers, batch, weights.heads), np.int64)
        sums_PBD = np.empty((self.threads, batch, weights.width), np.float32)
        scaling = np.float32(weights.head_dim**-0.5)
        self.hidden = {
            place: np.empty((batch, weights.predictors[reader].down.rows.shape[0]), np.float32)
            for place, reader in self.beside.items()
        }
        no_bias = np.zeros(weights.embedding.shape[0], np.float32)
        embedding = weights.embedding.data_RC, weights.embedding.scale_R, no_bias
        self.bound_logits = ops.Bound("project", *normed(weights.final_norm), *embedding, False, self.threads)
        self.bound: dict[tuple[str, int], ops.Bound] = {}
        for number, block in enumerate(weights.blocks):
            self.bound["heads", number] = ops.Bound(
                "attention", *normed_matrix(block.attention_norm, block.queries), *matrix(block.keys),
                *matrix(block.values), *matrix(block.output), self.keys_LBHTK[number], self.values_LBHTK[number],
                pending_LBWD[number], pending_scale_LBW[number], self.start_B, self.length_B, self.filled_LBH[number],
                self.period, number, scaling, sums_PBD, self.counters.read_LPC["heads"][number],
                *self._beside("heads", number),
            )  # fmt: skip
            self.bound["mlp", number] = ops.Bound(
                "mlp", *normed_matrix(block.mlp_norm, block.first), *matrix(block.second), self.skip_zeros, sums_PBD,
                self.counters.read_LPC["mlp"][number], *self._beside("mlp", number),
            )  # fmt: skip

    def _beside(self, kind: str, layer: int) -> tuple[object, ...]:
        """The first half of the predictor that shares a half block's work list; of none, no rows."""
        if (kind, layer) in self.beside:
            predictor = self.weights.predictors[self.beside[kind, layer]]
            return *normed_matrix(predictor.norm, predictor.down), predictor.relu, self.hidden[kind, layer]
        none_RC = np.zeros((0, 1), self.weights.embedding.data_RC.dtype)
        return *normed(None), none_RC, NOTHING, NOTHING, False, np.zeros((1, 0), np.float32)

    def step(self, tokens_B: np.ndarray, active_B: np.ndarray | None = None) -> Tensor:
        """Read one more token of every sequence; logits (B, V). Raises DataError when the cache is full.

        Sequences that are not active have ended: they choose no units and their logits mean nothing.
        """
        if int(self.length_B.max()) >= self.capacity:
            raise DataError(f"the cache holds {self.capacity} positions and is full: ask for fewer new tokens")
        self.active_B = np.ones(len(tokens_B), bool) if active_B is None else active_B
        position_B = self.length_B - self.start_B
        self.length_B += 1
        self.filled_LBH[:, ~self.active_B] = self.length_B[~self.active_B, None]  # what has ended waits for nothing
        x_BD = self._embedded(tokens_B[:, None], position_B[:, None])[:, 0].contiguous()
        taps: dict[TapSource, Tensor] = {}
        if isinstance(self.chooser, Predicted):
            self.chooser.ready.clear()
        with kernel_threads(self.threads):
            for number in range(self.layers):
                taps[TapSource("residual", number)] = x_BD.clone()
                self._half("heads", number, x_BD, taps)
                taps[TapSource("middle", number)] = x_BD.clone()
                self._half("mlp", number, x_BD, taps)
            self.counters.tokens += int(self.active_B.sum())
            return self._logits(x_BD)

    def _half(self, kind: str, layer: int, x_BD: Tensor, taps: dict[TapSource, Tensor]) -> None:
        """x += what the chosen heads or neurons of a layer add."""
        units_N, mask_BN = self._choose(kind, layer, taps)
        operator = ops.mlp if kind == "mlp" else ops.attention
        mask_BN = np.ascontiguousarray(mask_BN)  # numpy's indexing may give columns first
        operator(x_BD, torch.from_numpy(units_N), torch.from_numpy(mask_BN), self.bound[kind, layer].number)
        if (kind, layer) in self.beside:
            assert isinstance(self.chooser, Predicted)
            self.chooser.ready[self.beside[kind, layer]] = torch.from_numpy(self.hidden[kind, layer])

    def _choose(self, kind: str, layer: int, taps: dict[TapSource, Tensor]) -> Chosen:
        """The chosen units, all of them where nothing chooses or nearly all would be read anyway."""
        batch, units = len(self.length_B), self.weights.units(kind)
        chosen = None
        if self.whole.get((kind, layer), 0) > 0:
            self.whole[kind, layer] -= 1
        elif self.chooser is not None:
            chosen = self.chooser(kind, layer, taps[tap_source(self.tap, kind, layer)])
            if batch > 1 and chosen is not None and len(chosen[0]) > self.crossover * units:
                self.whole[kind, layer] = self.window
        if chosen is None:
            chosen = np.arange(units), np.ones((batch, units), dtype=bool)
        if not self.active_B.all():
            units_N, mask_BN = chosen[0], chosen[1] & self.active_B[:, None]
            wanted_N = mask_BN.any(0)
            chosen = units_N[wanted_N], mask_BN[:, wanted_N]
        self.counters.used_per_layer[kind][layer] += int(np.count_nonzero(chosen[1]))
        return chosen

    def _embedded(self, tokens_BT: np.ndarray, position_BT: np.ndarray) -> Tensor:
        """Token and position embeddings, (B, T, D)."""
        rows, flat = self.weights.embedding, tokens_BT.reshape(-1)
        picked = type(rows)(rows.data_RC[flat], rows.scale_R[flat], rows.storage)
        x_BTD = unpack(picked).view(*tokens_BT.shape, -1)
        return x_BTD + torch.from_numpy(self.weights.positions[position_BT])

    def _logits(self, x_BD: Tensor) -> Tensor:
        logits_BV = torch.empty(len(x_BD), self.weights.embedding.shape[0])
        ops.project(x_BD, logits_BV, self.bound_logits.number)
        return logits_BV


def predictors_beside(chooser: Chooser | None, tap: str, layers: int) -> dict[tuple[str, int], tuple[str, int]]:
    """(half block) -> the predictor that reads that half block's own input and is wanted after it."""
    if not isinstance(chooser, Predicted):
        return {}
    halves = [
        (half, layer, TapSource("residual" if half == "heads" else "middle", layer))
        for layer in range(layers)
        for half in ("heads", "mlp")
    ]
    readers = [
        (kind, layer)
        for layer in range(layers)
        for kind in KINDS
        if chooser.kept(kind, layer) < chooser.weights.units(kind)
    ]
    found = {}
    for half, layer, source in halves:
        for reader in readers:
            later = reader[1] > layer or (reader == ("mlp", layer) and half == "heads")
            if later and tap_source(tap, *reader) == source:
                found[half, layer] = reader
    return found


@contextmanager
def kernel_threads(threads: int) -> Iterator[None]:
    """Run the kernels on this many threads, and torch on one: its idle threads would spin on the same cores."""
    before, before_torch = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(before)
        torch.set_num_threads(before_torch)


def normed_prompt(x_BTD: Tensor, norm: Norm) -> Tensor:
    """LayerNorm over a whole prompt."""
    width = x_BTD.shape[-1:]
    return F.layer_norm(x_BTD, width, torch.from_numpy(norm.weight_D), torch.from_numpy(norm.bias_D), norm.epsilon)

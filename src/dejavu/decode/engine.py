"""Decoding token by token with only the chosen rows read.

    x = embedding + position
    for each block:
        A = heads chosen from an earlier tensor;    m = x + sum_{h in A} W_o[:, h] head_h + b_o
        S = neurons chosen from an earlier tensor;  x = m + sum_{j in S} relu(.) W2[:, j] + b2
    logits = embedding . norm(x)

K and V exist for every head at every position, but those of a head that was not chosen are computed later (`kv=lazy`):
the inputs of the last `window` positions are kept for each layer, a chosen head catches up before it attends, and when
a layer's window is full all its heads do. Layers fill their windows one token apart, so no token pays for all of them.

Shape suffixes: B sequences, D width, H heads, K head_dim, T positions, N chosen units, L layers, W window, P threads,
V vocabulary.
"""

from dataclasses import dataclass, field

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.decode import kernels
from dejavu.decode.choosing import Chooser, Chosen
from dejavu.decode.storage import unpack
from dejavu.decode.vectors import normed, reading
from dejavu.decode.weights import Block, Norm, Weights
from dejavu.errors import DataError
from dejavu.models.taps import TapSource, tap_source


@dataclass
class Counters:
    """Rows read by the kernels and units used, since the engine was made."""

    tokens: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("q", "kv", "o", "fc1", "fc2"), 0))
    used: dict[str, int] = field(default_factory=lambda: {"mlp": 0, "heads": 0})


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
    ) -> None:
        self.weights, self.chooser, self.tap, self.lazy, self.window = weights, chooser, tap, kv == "lazy", window
        self.threads = threads or numba.get_num_threads()
        self.counters = Counters()
        self.scaling = np.float32(weights.head_dim**-0.5)
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
        self.start_B = np.zeros(batch, np.int64) if start_B is None else start_B.astype(np.int64)
        self.length_B = np.full(batch, length, np.int64)
        x_BTD = self._embedded(tokens_BT, np.maximum(np.arange(length)[None] - self.start_B[:, None], 0))
        place = torch.arange(length)
        after_B11 = torch.from_numpy(self.start_B)[:, None, None]
        mask_BTT = (place[None, None, :] <= place[None, :, None]) & (place >= after_B11)
        mask_BTT |= torch.eye(length, dtype=torch.bool)  # padding attends to itself, so that nothing is NaN
        for number, block in enumerate(self.weights.blocks):
            x_BTD = self._dense_block(number, block, x_BTD, mask_BTT)
        self.filled_LBH[:] = length
        return self._logits(x_BTD[:, -1].contiguous().numpy())

    def _dense_block(self, number: int, block: Block, x_BTD: Tensor, mask_BTT: Tensor) -> Tensor:
        """One block over the whole prompt, K and V of all heads stored."""
        batch, length, _ = x_BTD.shape
        shape = (batch, length, self.weights.heads, self.weights.head_dim)
        h_BTD = normed(x_BTD, block.attention_norm)
        q, k, v = (
            F.linear(h_BTD, unpack(part.rows), torch.from_numpy(part.bias)).view(shape).transpose(1, 2)
            for part in (block.queries, block.keys, block.values)
        )
        self.keys_LBHTK[number, :, :, :length] = k.numpy()
        self.values_LBHTK[number, :, :, :length] = v.numpy()
        heads = F.scaled_dot_product_attention(q, k, v, mask_BTT[:, None]).transpose(1, 2).flatten(2)
        m_BTD = x_BTD + heads @ unpack(block.output.rows) + torch.from_numpy(block.output.bias)
        h_BTD = normed(m_BTD, block.mlp_norm)
        a_BTF = F.relu(F.linear(h_BTD, unpack(block.first.rows), torch.from_numpy(block.first.bias)))
        return m_BTD + a_BTF @ unpack(block.second.rows) + torch.from_numpy(block.second.bias)

    def _allocate(self, batch: int, capacity: int, length: int) -> None:
        weights = self.weights
        if length > weights.context:
            raise DataError(f"a prompt of {length} tokens is longer than the context of {weights.context}: shorten it")
        shape = (self.layers, batch, weights.heads, min(capacity, weights.context), weights.head_dim)
        self.capacity = shape[3]
        self.keys_LBHTK, self.values_LBHTK = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        kind = np.int16 if weights.storage == "int8" else np.float32
        self.pending_LBWD = np.zeros((self.layers, batch, self.window, weights.width), kind)
        self.pending_scale_LBW = np.ones((self.layers, batch, self.window), np.float32)
        self.filled_LBH = np.zeros((self.layers, batch, weights.heads), np.int64)
        self.sums_PBD = np.empty((self.threads, batch, weights.width), np.float32)

    def step(self, tokens_B: np.ndarray) -> Tensor:
        """Read one more token of every sequence; logits (B, V). Raises DataError when the cache is full."""
        if int(self.length_B.max()) >= self.capacity:
            raise DataError(f"the cache holds {self.capacity} positions and is full: ask for fewer new tokens")
        position_B = self.length_B - self.start_B
        self.length_B += 1
        x_BD = self._embedded(tokens_B[:, None], position_B[:, None])[:, 0].contiguous().numpy().copy()
        taps: dict[TapSource, np.ndarray] = {}
        for number, block in enumerate(self.weights.blocks):
            taps[TapSource("residual", number)] = x_BD.copy()
            self._attention(number, block, x_BD, self._choose("heads", number, taps))
            taps[TapSource("middle", number)] = x_BD.copy()
            self._mlp(number, block, x_BD, self._choose("mlp", number, taps))
        self.counters.tokens += len(tokens_B)
        return self._logits(x_BD)

    def _choose(self, kind: str, layer: int, taps: dict[TapSource, np.ndarray]) -> Chosen:
        """The chosen units, all of them where nothing chooses."""
        batch = len(self.length_B)
        chosen = None if self.chooser is None else self.chooser(kind, layer, taps[tap_source(self.tap, kind, layer)])
        if chosen is None:
            units = self.weights.units(kind)
            chosen = np.arange(units), np.ones((batch, units), dtype=bool)
        self.counters.used[kind] += int(np.count_nonzero(chosen[1]))
        return chosen

    def _attention(self, layer: int, block: Block, x_BD: np.ndarray, chosen: Chosen) -> None:
        """x += what the chosen heads add."""
        slot_B, batch = (self.length_B - 1) % self.window, len(x_BD)
        h_BD, scale_B = self._reading(x_BD, block.attention_norm)
        pending_BWD, pending_scale_BW = self.pending_LBWD[layer], self.pending_scale_LBW[layer]
        pending_BWD[np.arange(batch), slot_B] = h_BD
        pending_scale_BW[np.arange(batch), slot_B] = scale_B
        keys, values, filled_BH = block.keys, block.values, self.filled_LBH[layer]
        projections = (
            keys.rows.data_RC, keys.rows.scale_R, keys.bias, values.rows.data_RC, values.rows.scale_R, values.bias,
        )  # fmt: skip
        # Layers flush one token apart; the longest wait of any head decides, so nothing is overwritten.
        waiting = int((self.length_B[:, None] - filled_BH).max())
        if not self.lazy or waiting >= self.window - layer % max(1, self.window // 2):
            read_P = np.zeros(self.threads, np.int64)
            kernels.flush(
                filled_BH, pending_BWD, pending_scale_BW, self.length_B, *projections,
                self.keys_LBHTK[layer], self.values_LBHTK[layer], read_P,
            )  # fmt: skip
            self.counters.rows["kv"] += int(read_P.sum())
        units_N, mask_BN = chosen
        read_P4 = np.zeros((self.threads, 4), np.int64)
        kernels.heads(
            units_N, mask_BN, pending_BWD, pending_scale_BW, self.start_B, self.length_B, filled_BH,
            block.queries.rows.data_RC, block.queries.rows.scale_R, block.queries.bias, *projections,
            block.output.rows.data_RC, block.output.rows.scale_R, self.keys_LBHTK[layer], self.values_LBHTK[layer],
            self.scaling, self.sums_PBD, read_P4,
        )  # fmt: skip
        for column, name in enumerate(("q", "kv", "o")):
            self.counters.rows[name] += int(read_P4[:, column].sum())
        kernels.add_partial(self.sums_PBD, block.output.bias, x_BD)

    def _mlp(self, layer: int, block: Block, m_BD: np.ndarray, chosen: Chosen) -> None:
        """m += what the chosen neurons add."""
        h_BD, scale_B = self._reading(m_BD, block.mlp_norm)
        read_P2 = np.zeros((self.threads, 2), np.int64)
        kernels.neurons(
            *chosen, h_BD, scale_B, block.first.rows.data_RC, block.first.rows.scale_R, block.first.bias,
            block.second.rows.data_RC, block.second.rows.scale_R, self.sums_PBD, read_P2,
        )  # fmt: skip
        for column, name in enumerate(("fc1", "fc2")):
            self.counters.rows[name] += int(read_P2[:, column].sum())
        kernels.add_partial(self.sums_PBD, block.second.bias, m_BD)

    def _reading(self, x_BD: np.ndarray, norm: Norm | None) -> tuple[np.ndarray, np.ndarray]:
        """What rows are multiplied with: x normalised, for int8 in 16 bits with a scale a row."""
        return reading(x_BD, norm, self.weights.storage)

    def _embedded(self, tokens_BT: np.ndarray, position_BT: np.ndarray) -> Tensor:
        """Token and position embeddings, (B, T, D)."""
        rows, flat = self.weights.embedding, tokens_BT.reshape(-1)
        picked = type(rows)(rows.data_RC[flat], rows.scale_R[flat], rows.storage)
        x_BTD = unpack(picked).view(*tokens_BT.shape, -1)
        return x_BTD + torch.from_numpy(self.weights.positions[position_BT])

    def _logits(self, x_BD: np.ndarray) -> Tensor:
        weights = self.weights
        h_BD, scale_B = self._reading(x_BD, weights.final_norm)
        logits_BV = np.empty((len(x_BD), weights.embedding.shape[0]), np.float32)
        no_bias = np.zeros(weights.embedding.shape[0], np.float32)
        kernels.project(
            weights.embedding.data_RC, weights.embedding.scale_R, no_bias, h_BD, scale_B, False, self.threads, logits_BV
        )
        return torch.from_numpy(logits_BV)

"""Who says which units a token gets while decoding. Shapes: B sequences, D width, U units, N the union's units."""

from collections.abc import Callable

import numba
import numpy as np

from dejavu.decode import kernels
from dejavu.decode.vectors import reading
from dejavu.decode.weights import PackedPredictor, Weights
from dejavu.errors import DataError

Chosen = tuple[np.ndarray, np.ndarray]  # units of the batch's union, rising (N,); which sequence chose which (B, N)
Chooser = Callable[[str, int, np.ndarray], Chosen | None]  # (kind, layer, tap_BD); None: all units


class Predicted:
    """Chooses by packed predictors: the k best units of each sequence."""

    def __init__(
        self, weights: Weights, mlp: tuple[int, ...], heads: tuple[int, ...], threads: int | None = None
    ) -> None:
        self.predictors, self.storage = weights.predictors, weights.storage
        self.kept = {"mlp": mlp, "heads": heads}
        self.units = {"mlp": weights.neurons, "heads": weights.heads}
        self.threads = threads or numba.get_num_threads()

    def scores(self, kind: str, layer: int, tap_BD: np.ndarray) -> np.ndarray:
        """Scores of all units, (B, units)."""
        predictor: PackedPredictor = self.predictors[kind, layer]
        h_BD, scale_B = reading(tap_BD, predictor.norm, self.storage)
        hidden_BR = np.empty((len(tap_BD), predictor.down.rows.shape[0]), np.float32)
        down, up = predictor.down, predictor.up
        kernels.project(
            down.rows.data_RC, down.rows.scale_R, down.bias, h_BD, scale_B, predictor.relu, self.threads, hidden_BR
        )
        r_BR, r_scale_B = reading(hidden_BR, None, self.storage)
        scores_BU = np.empty((len(tap_BD), up.rows.shape[0]), np.float32)
        kernels.project(up.rows.data_RC, up.rows.scale_R, up.bias, r_BR, r_scale_B, False, self.threads, scores_BU)
        return scores_BU

    def __call__(self, kind: str, layer: int, tap_BD: np.ndarray) -> Chosen | None:
        kept = self.kept[kind][layer]
        if kept == self.units[kind]:
            return None
        return best(self.scores(kind, layer, tap_BD), kept)


def best(scores_BU: np.ndarray, kept: int) -> Chosen:
    """The `kept` best units of each row as a union and a mask. Raises DataError for NaN."""
    batch, units = scores_BU.shape
    found_BK, work_U = np.empty((batch, kept), np.int64), np.empty(units, np.float32)
    for b in range(batch):
        if kept and not kernels.top_k(scores_BU[b], kept, work_U, found_BK[b]):
            raise DataError("a predictor gave NaN: check the weights and the bundle")
    if batch == 1:
        return found_BK[0], np.ones((1, kept), dtype=bool)
    chosen_BU = np.zeros((batch, units), dtype=bool)
    np.put_along_axis(chosen_BU, found_BK, True, axis=1)
    union_N = np.flatnonzero(chosen_BU.any(0))
    return union_N, chosen_BU[:, union_N]

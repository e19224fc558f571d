"""Taps: which tensor a predictor reads. One definition for recording, training, simulation and decoding.

`r_l` is the residual handed to block l, `m_l` the one its MLP half adds back. Deja Vu's lookahead (paper, section 4.3
and figure 2) reads one half block early, so that the prediction can run beside the block it overlaps.

    tap        neurons of MLP l    heads of attention l
    overlap    r_l                 m_{l-1}
    direct     m_l                 r_l
    previous   r_{l-1}             m_{l-2}
    mixed      as overlap, but neurons of the first layer as direct

Indices below the first clamp to r_0. In r_0, the embedding, there is nothing of the context yet: `mixed` does not have
neurons foreseen from it, at the price of one predictor that runs beside nothing.
"""

from typing import NamedTuple


class TapSource(NamedTuple):
    """A recorded tensor: point "residual" (r) or "middle" (m) of a layer."""

    point: str
    layer: int


_SOURCES = {  # (tap, kind) -> (point, how many layers back)
    ("overlap", "mlp"): ("residual", 0),
    ("overlap", "heads"): ("middle", 1),
    ("direct", "mlp"): ("middle", 0),
    ("direct", "heads"): ("residual", 0),
    ("previous", "mlp"): ("residual", 1),
    ("previous", "heads"): ("middle", 2),
}


def tap_source(tap: str, kind: str, layer: int) -> TapSource:
    """What the predictor of `kind` ("mlp" or "heads") in `layer` reads under `tap`."""
    if tap == "mixed":
        tap = "direct" if (kind, layer) == ("mlp", 0) else "overlap"
    point, back = _SOURCES[tap, kind]
    return TapSource(point, layer - back) if layer >= back else TapSource("residual", 0)

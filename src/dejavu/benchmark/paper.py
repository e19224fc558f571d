"""The paper's own latency setting beside its floor: OPT-175B on eight A100, dense and at its densities.

Published milliseconds a token (Liu et al., 2023, table of latencies; batch 1, fp16, tensor parallel) by prompt length;
densities and ranks as stated there and in its latency code. The paper's model of its own IO, 324 GB in 27 ms, says at
what speed it thinks the eight read.
"""

from dataclasses import dataclass

from dejavu.benchmark import devices
from dejavu.benchmark.floor import Terms
from dejavu.benchmark.plan import Sized
from dejavu.models.anatomy import KINDS

MODEL, DEVICES = "opt-175b", "8xA100-80G"
PROMPTS = (128, 512, 1024)
FP16 = 2
IO_MODEL_GB_S = 324 / 27 * 1000


@dataclass(frozen=True)
class Published:
    """A row of the paper: shares of units computed, ranks of its predictors (no biases, no norm), and what it took."""

    name: str
    density: dict[str, float]
    rank: dict[str, int]
    ms: dict[int, float]


ROWS = (
    Published(
        "dense (FasterTransformer)", {"mlp": 1.0, "heads": 1.0}, {}, {128: 40.5, 256: 40.9, 512: 41.7, 1024: 43.4}
    ),
    Published(
        "Deja Vu", {"mlp": 0.10, "heads": 0.42}, {"mlp": 1000, "heads": 512},
        {128: 15.9, 256: 17.1, 512: 19.8, 1024: 23.6},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A published time beside what its bytes take."""

    name: str
    prompt: int
    terms: Terms
    published_ms: float
    half_blocks: int  # each ends with an all-reduce of all devices

    @property
    def floor_ms(self) -> float:
        """Reading at the devices' peak."""
        return self.terms.floor_ms(devices.parse(DEVICES).all_bandwidth_gb_s)

    @property
    def reading_ms(self) -> float:
        """Reading as fast as in the paper's own model."""
        return self.terms.floor_ms(IO_MODEL_GB_S)

    @property
    def rest_ms(self) -> float:
        """What is not reading: all-reduces, launches of kernels, what they wait for."""
        return self.published_ms - self.reading_ms

    @property
    def rest_us_per_half(self) -> float:
        return 1000 * self.rest_ms / self.half_blocks


def compared(sized: Sized) -> list[Compared]:
    """The paper's rows for a model of its size, at some of its prompt lengths."""
    return [
        Compared(row.name, prompt, terms(sized, row, prompt), row.ms[prompt], 2 * sized.anatomy.layers)
        for prompt in PROMPTS
        for row in ROWS
    ]


def terms(sized: Sized, row: Published, prompt: int) -> Terms:
    """Bytes of one token at a row's densities, all devices together."""
    parts = sized.anatomy
    body = sum(row.density[kind] * parts.units(kind) * parts.unit_weights(kind) for kind in KINDS)
    predictors = sum(rank * (parts.width + parts.units(kind)) for kind, rank in row.rank.items())
    cached = 2 * row.density["heads"] * parts.kv_heads * parts.head_dim * prompt
    return Terms(
        body=round(parts.layers * body * FP16),
        predictors=parts.layers * predictors * FP16,
        embedding=sized.embedding * FP16,
        cache=round(parts.layers * cached * FP16),
    )

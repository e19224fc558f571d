"""The predictor: from a tap to one score per unit, higher for units expected to contribute more.

Two thin layers as in Deja Vu (Liu et al., ICML 2023, section 4.1), with what its code leaves out: a normalisation of
the raw residual, whose size differs by an order of magnitude between layers and tokens, biases, and a ReLU between.
With a trunk the first of the two is one for all layers of a kind.

Shape suffixes: N tokens, D width of the model, R rank, U units (neurons or heads).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dejavu.schema import Predictor as Settings

ACTIVATIONS = ("relu", "none")


def default_rank(width: int) -> int:
    """An eighth of the model's width, at least 1."""
    return max(1, width // 8)


def ranks(width: int, settings: Settings) -> tuple[int, int]:
    """(in the first layer, in all others). Unless said otherwise an eighth of the width, in the first layer a half.

    The first layer reads bare embeddings, and its neurons are the hardest to foresee: docs/predictors.md has figures.
    One trunk for all layers has one rank.
    """
    others = settings.rank or default_rank(width)
    return (others if settings.trunk else settings.first_rank or max(1, width // 2)), others


class Predictor(nn.Module):
    """LayerNorm (optional), Linear to `rank`, ReLU (optional), Linear to `units`; biases are optional too.

    The scores order the units of a token. They are no probabilities and have no threshold: any number of the best can
    be taken.
    """

    def __init__(
        self,
        width: int,
        units: int,
        rank: int | None = None,
        norm: bool = True,
        activation: str = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        rank = default_rank(width) if rank is None else rank
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.down = nn.Linear(width, rank, bias=bias)
        self.activation = {"relu": nn.ReLU(), "none": nn.Identity()}[activation]
        self.up = nn.Linear(rank, units, bias=bias)

    def forward(self, tap_ND: Tensor) -> Tensor:
        """Scores (N, U) in the predictor's own dtype, from a tap in any float dtype."""
        return self.up(self.activation(self.down(self.norm(tap_ND.to(self.down.weight.dtype)))))

    @property
    def rank(self) -> int:
        return self.down.out_features

    @property
    def units(self) -> int:
        return self.up.out_features

    def bytes(self, bytes_per_weight: int = 2) -> int:
        """Bytes read to score one token: every weight once, in a storage type of that many bytes."""
        return bytes_per_weight * sum(parameter.numel() for parameter in self.parameters())

    def flops(self) -> int:
        """Floating point operations of the two products for one token; norm and biases are below a hundredth of it."""
        return 2 * self.rank * (self.down.in_features + self.units)


def seeded_predictor(
    seed: int, layer: int, width: int, units: int, rank: int | None, norm: bool, activation: str, bias: bool = True
) -> Predictor:
    """A predictor whose first weights depend on the seed, its layer and its shape, not on which others are built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed * 1_000_003 + layer) % 2**63)
        return Predictor(width, units, rank, norm, activation, bias)


def share_trunk(predictors: Mapping[tuple[str, int], Predictor]) -> None:
    """Give the predictors of each kind one first layer: that of the lowest layer."""
    for kind, layer in sorted(predictors):
        first = min(other for name, other in predictors if name == kind)
        predictors[kind, layer].down = predictors[kind, first].down

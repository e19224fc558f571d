"""What a predictor learns: the square root of each unit's contribution, measured in the layer's mean contribution.

Deja Vu's code learns `a > 0` for neurons and "among the best K" for heads, with binary cross entropy. Both lose what
matters for a choice: a neuron at the edge of firing costs as much as a strong one, and a fixed K serves one ratio only.
Here the scores learn the order of contributions, so one predictor serves every ratio:

    target = sqrt(c / mean c),   loss = mean over tokens and units of (score - target)^2

The root keeps the order and tames the tail (contributions span three orders of magnitude, and squared errors of the
raw values would be spent on few tokens). The scale is one number per layer and kind: it brings all predictors to the
same learning rate. Units and tokens weigh alike: a token whose contributions are larger already counts more.

Shape suffixes: N tokens, U units.
"""

from torch import Tensor
from torch.nn import functional as F

from dejavu.predictors.statistics import UnitStatistics


def targets(contributions_NU: Tensor, statistics: UnitStatistics) -> Tensor:
    """What the scores should be, (N, U), 0 and above."""
    return (contributions_NU / statistics.scale).sqrt()


def loss(scores_NU: Tensor, contributions_NU: Tensor, statistics: UnitStatistics) -> Tensor:
    """The scalar that training lowers."""
    return F.mse_loss(scores_NU, targets(contributions_NU, statistics))


def initial_bias(statistics: UnitStatistics) -> Tensor:
    """The mean target of each unit (U,): with it a predictor starts from what is known without looking at the token."""
    return statistics.root_U / statistics.scale**0.5

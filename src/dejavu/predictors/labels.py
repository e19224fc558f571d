"""What a predictor learns, by `predictor.label`; in every case a higher score means a unit more worth computing.

    contribution   target = contributes, and more than half of the units do,   binary cross entropy of sigmoid(score),
                   in which a unit with that target weighs sqrt(c / mean c)
    amount         target = sqrt(c / mean c),   loss = mean over tokens and units of (score - target)^2
    top            target = among the best by c at label_density,   binary cross entropy
    nonzero        target = c > 0,   binary cross entropy; heads, which all contribute, learn `top`

Deja Vu's code learns `nonzero` for neurons and `top` for heads. Both lose what matters for a choice: a neuron at the
edge of firing costs as much as a strong one, and a fixed share serves one ratio only. `amount` knows it, but a thin
network that has to fit nine tenths of a ReLU layer to 0 has little room left for the rest. `contribution` asks whether
a unit is worth computing, and asks the louder the more it contributes, so that its scores order units for every ratio;
docs/predictors.md has what each keeps. The root tames the tail: contributions span three orders of magnitude. The
scale is one number per layer and kind: it brings all predictors to the same learning rate. Tokens weigh alike; units
do as well, or by their mean contribution (`predictor.weighting`).

Shape suffixes: N tokens, U units, P places in the flattened (N, U).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.models.topk import kept, top_k_mask
from dejavu.predictors.statistics import UnitStatistics
from dejavu.schema import Predictor

RAREST = 1e-3  # no unit starts from a chance below this, or above one less this
WORTH = 0.5  # label=contribution: the share of units that can be worth computing


def for_kind(settings: Predictor, kind: str) -> Predictor:
    """The settings by which a kind learns."""
    return replace(settings, label="top") if kind == "heads" and settings.label == "nonzero" else settings


def targets(contributions_NU: Tensor, statistics: UnitStatistics, settings: Predictor) -> Tensor:
    """What the scores should say, (N, U): 0 and above, but for `amount` 0 or 1."""
    units = contributions_NU.shape[-1]
    if settings.label == "amount":
        return roots(contributions_NU, statistics)
    if settings.label == "top":
        return top_k_mask(contributions_NU, kept(1 - settings.label_density, units)).float()
    if settings.label == "contribution":
        target_NU = torch.zeros_like(contributions_NU)
        target_NU.view(-1)[worth_computing(contributions_NU)] = 1.0
        return target_NU
    return (contributions_NU > 0).float()


def worth_computing(contributions_NU: Tensor) -> Tensor:
    """Places (P,) in the flattened (N, U) of units that contribute and are among the best half of their token's."""
    tokens, units = contributions_NU.shape
    most = kept(1 - WORTH, units)
    place_P = places(contributions_NU > 0)
    if len(place_P) and int(torch.bincount(place_P // units, minlength=tokens).max()) > most:
        place_P = places((contributions_NU > 0) & top_k_mask(contributions_NU, most))
    return place_P


def places(mask_NU: Tensor) -> Tensor:
    """Where a mask is True, in the flattened (N, U); on a CPU by numpy, which is ten times as fast."""
    if mask_NU.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask_NU.numpy()))
    return mask_NU.flatten().nonzero()[:, 0]


def roots(contributions_NU: Tensor, statistics: UnitStatistics) -> Tensor:
    """sqrt(c / mean c)."""
    return (contributions_NU / statistics.scale).sqrt()


def loss(scores_NU: Tensor, contributions_NU: Tensor, statistics: UnitStatistics, settings: Predictor) -> Tensor:
    """The scalar that training lowers."""
    if settings.label == "contribution" and settings.weighting == "none":
        place_P = worth_computing(contributions_NU)
        weight_P = roots(contributions_NU.flatten()[place_P], statistics)
        mean: Tensor = WeightedCrossEntropy.apply(scores_NU, place_P, weight_P)
        return mean
    target_NU = targets(contributions_NU, statistics, settings)
    if settings.label == "amount":
        loss_NU = F.mse_loss(scores_NU, target_NU, reduction="none")
    else:
        loss_NU = F.binary_cross_entropy_with_logits(scores_NU, target_NU, reduction="none")
    if settings.label == "contribution":
        loss_NU = loss_NU * torch.where(target_NU > 0, roots(contributions_NU, statistics), 1.0)
    if settings.weighting == "none":
        return loss_NU.mean()
    return (loss_NU * (statistics.mean_U / statistics.scale).to(loss_NU.device)).mean()


class WeightedCrossEntropy(torch.autograd.Function):
    """Mean binary cross entropy of sigmoid(score) where the targets that are 1 stand at P places and weigh differently.

    The default loss was most of a training step: a chain of operators that read and wrote a dozen tensors of (N, U).
    Most targets are 0 and weigh 1, and the gradient needs what the value does, so a third of that is enough.
    """

    @staticmethod
    def forward(ctx: Any, scores_NU: Tensor, place_P: Tensor, weight_P: Tensor) -> Tensor:
        """The mean; `place_P` indexes the flattened scores, `weight_P` is what the targets there weigh."""
        against_NU = scores_NU.neg().sigmoid_()
        slope_NU = 1 - against_NU
        # The loss of a target 0, log(1 + exp(s)), which is s where exp overflows; that of a target 1 is less by s.
        loss_NU = against_NU.clamp_min_(torch.finfo(against_NU.dtype).tiny).log_().neg_().maximum(scores_NU)
        score_P, loss_P = scores_NU.flatten()[place_P], loss_NU.flatten()[place_P]
        total = loss_NU.sum() + (weight_P * (loss_P - score_P) - loss_P).sum()
        slope_NU.view(-1)[place_P] = weight_P * (slope_NU.view(-1)[place_P] - 1)
        ctx.save_for_backward(slope_NU)
        return total / scores_NU.numel()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (slope_NU,) = ctx.saved_tensors
        return slope_NU * (upstream[0] / slope_NU.numel()), None, None


def initial_bias(statistics: UnitStatistics, settings: Predictor) -> Tensor:
    """The score of each unit, (U,), from which a predictor starts: what is known without looking at the token."""
    if settings.label == "amount":
        return statistics.root_U / statistics.scale**0.5
    known_U = statistics.active_U
    if settings.label == "contribution":
        known_U = WORTH * statistics.mean_U / statistics.mean_U.max().clamp(min=torch.finfo(torch.float32).tiny)
    if settings.label == "top":  # the order is the mean contribution's; the level, one for all units, is the density's
        known_U = torch.full_like(known_U, settings.label_density)
    return known_U.clamp(RAREST, 1 - RAREST).logit()

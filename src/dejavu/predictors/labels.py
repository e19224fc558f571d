"""What a predictor learns, by `predictor.label`; in every case a higher score means a unit more worth computing.

    amount         target = sqrt(c / mean c),   loss = mean over tokens and units of (score - target)^2
    contribution   the same, but of units that do not contribute (c = 0) only where the score is above 0
    top            target = among the best by c at label_density,   binary cross entropy of sigmoid(score)
    nonzero        target = c > 0,   binary cross entropy of sigmoid(score); heads, which all contribute, learn `top`

Deja Vu's code learns `nonzero` for neurons and `top` for heads. Both lose what matters for a choice: a neuron at the
edge of firing costs as much as a strong one, and a fixed share serves one ratio only. The order of contributions serves
every ratio, and ends where they do: a thin network that has to fit nine tenths of a ReLU layer to 0 has little room
left for the rest (docs/predictors.md has both). The root keeps the order and tames the tail (contributions span three
orders of magnitude, and squared errors of the raw values would be spent on few tokens). The scale is one number per
layer and kind: it brings all predictors to the same learning rate. Tokens weigh alike: one whose contributions are
larger already counts more; units do as well, or by their mean contribution (`predictor.weighting`).

Shape suffixes: N tokens, U units.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.models.topk import kept, top_k_mask
from dejavu.predictors.statistics import UnitStatistics
from dejavu.schema import Predictor

ORDERS = ("contribution", "amount")  # labels whose scores stand for amounts
RAREST = 1e-3  # no unit starts from a chance below this, or above one less this


def for_kind(settings: Predictor, kind: str) -> Predictor:
    """The settings by which a kind learns."""
    return replace(settings, label="top") if kind == "heads" and settings.label == "nonzero" else settings


def targets(contributions_NU: Tensor, statistics: UnitStatistics, settings: Predictor) -> Tensor:
    """What the scores should say, (N, U): 0 and above, for top and nonzero 0 or 1."""
    if settings.label in ORDERS:
        return (contributions_NU / statistics.scale).sqrt()
    if settings.label == "nonzero":
        return (contributions_NU > 0).float()
    return top_k_mask(contributions_NU, kept(1 - settings.label_density, contributions_NU.shape[-1])).float()


def loss(scores_NU: Tensor, contributions_NU: Tensor, statistics: UnitStatistics, settings: Predictor) -> Tensor:
    """The scalar that training lowers."""
    target_NU = targets(contributions_NU, statistics, settings)
    if settings.label in ORDERS:
        if settings.label == "contribution":
            scores_NU = torch.where(target_NU > 0, scores_NU, scores_NU.clamp(min=0))
        loss_NU = F.mse_loss(scores_NU, target_NU, reduction="none")
    else:
        loss_NU = F.binary_cross_entropy_with_logits(scores_NU, target_NU, reduction="none")
    if settings.weighting == "none":
        return loss_NU.mean()
    return (loss_NU * (statistics.mean_U / statistics.scale).to(loss_NU.device)).mean()


def initial_bias(statistics: UnitStatistics, settings: Predictor) -> Tensor:
    """The score of each unit, (U,), from which a predictor starts: what is known without looking at the token."""
    if settings.label in ORDERS:
        return statistics.root_U / statistics.scale**0.5
    known_U = statistics.active_U
    if settings.label == "top":  # the order is the mean contribution's; the level, one for all units, is the density's
        known_U = torch.full_like(known_U, settings.label_density)
    return known_U.clamp(RAREST, 1 - RAREST).logit()

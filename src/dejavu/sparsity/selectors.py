"""Selectors: who says which units matter for a token. A new one is a class here and its name in the schema.

A selector only scores units; how many of the best are computed is the budget's business. Shape suffixes: N tokens
(batch and time flattened), D width, U units of the kind at hand (neurons or heads).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.topk import top_k_mask

if TYPE_CHECKING:
    from dejavu.predictors.bundle import Bundle


SLOTS = 2048  # draws of `random` for each layer and kind


@dataclass(frozen=True)
class Tokens:
    """What is known of the N tokens of a forward pass: which run sparse, and the identity of each."""

    sparse_N: Tensor  # bool; False: computed whole (padding, positions outside sparsity.positions)
    document_N: Tensor  # int64, any number that tells the scored texts apart
    position_N: Tensor  # int64, position within the text
    context_N: Tensor | None = None  # bool, what comes before the sparse positions of the same text
    row_N: Tensor | None = None  # int64, which text of the batch a token is of


@dataclass(frozen=True)
class Choice:
    """What is to be chosen, and all that a selector may look at."""

    kind: str
    layer: int
    tap_ND: Tensor | None  # only for selectors that read one
    contributions: Callable[[], Tensor]  # c of this very forward pass, (N, U)
    tokens: Tokens
    together: int = 1  # how many neighbouring units are kept or left out as one


class Selector(ABC):
    """Scores the units of one kind in one layer; higher is more important."""

    name: str
    reads_tap = False
    reads_context = False  # chooses from the context of a text, which then runs whole
    own_tap: str | None = None  # the tap it reads whatever `predictor.tap` says

    @abstractmethod
    def scores(self, choice: Choice) -> Tensor:
        """(N, U), or (U,) when the choice is the same for every token."""

    def choose(self, choice: Choice, k: int) -> Tensor:
        """True at the k units of highest score, ties to the lower index; bool (N, U), or (1, U) for all alike."""
        return top_k_mask(alike(torch.atleast_2d(self.scores(choice)), choice.together), k)


class Oracle(Selector):
    """Top by c of this very forward pass, on its current (already sparsified) stream: a reference, not a bound."""

    name = "oracle"

    def scores(self, choice: Choice) -> Tensor:
        return choice.contributions()


class Random(Selector):
    """Top-k of a hash of (seed, layer, kind, document, position, unit): the same whatever the batch looks like.

    Document and position are hashed to one of `SLOTS` draws first, so that a set is drawn once and looked up for every
    token: hashing each unit for each token took longer than the model.
    """

    name = "random"

    def __init__(self, seed: int, units: Mapping[str, int]) -> None:
        self.seed, self.units = seed, units
        self._masks: dict[tuple[str, int, int], Tensor] = {}

    def scores(self, choice: Choice) -> Tensor:
        slot_N = self._slots(choice.tokens)
        return self._draws(choice.kind, choice.layer).to(slot_N.device)[slot_N]

    def choose(self, choice: Choice, k: int) -> Tensor:
        slot_N, key = self._slots(choice.tokens), (choice.kind, choice.layer, k)
        if key not in self._masks:
            draws_SU = alike(self._draws(choice.kind, choice.layer), choice.together)
            self._masks[key] = top_k_mask(draws_SU, k).to(slot_N.device)
        return self._masks[key][slot_N]

    def _slots(self, tokens: Tokens) -> Tensor:
        return (mixed(mixed(tokens.document_N.int()) + tokens.position_N.int()) & (SLOTS - 1)).long()

    def _draws(self, kind: str, layer: int) -> Tensor:
        """A number for every unit in every slot, (SLOTS, U)."""
        stream = (self.seed * 1_000_003 + layer) * 2 + KINDS.index(kind)
        key_S = mixed(torch.arange(SLOTS, dtype=torch.int32) * 40503 + stream)
        unit_U = torch.arange(self.units[kind], dtype=torch.int32) * -1640531527  # 2**32 / golden ratio
        return mixed(key_S[:, None] + unit_U).float()


class Static(Selector):
    """The units of highest mean c over the cache, for every token the same; the means are kept in the bundle."""

    name = "static"

    def __init__(self, bundle: "Bundle") -> None:
        self.bundle = bundle

    def scores(self, choice: Choice) -> Tensor:
        return self.bundle.mean_contribution(choice.kind, choice.layer).to(choice.tokens.sparse_N.device)


class Prompt(Selector):
    """Chosen once for a text, by the sum of c over its context (GRIFFIN's idea; Dong et al., 2024)."""

    name = "prompt"
    reads_context = True

    def scores(self, choice: Choice) -> Tensor:
        row_N, context_N = choice.tokens.row_N, choice.tokens.context_N
        assert row_N is not None and context_N is not None
        contributions_NU = choice.contributions()
        sums_BU = contributions_NU.new_zeros(int(row_N.max()) + 1, contributions_NU.shape[1])
        sums_BU.index_add_(0, row_N[context_N], contributions_NU[context_N])
        return sums_BU[row_N]


class Predicted(Selector):
    """Trained predictors, reading the tap they were trained on."""

    name = "predictor"
    reads_tap = True

    def __init__(self, bundle: "Bundle", device: torch.device) -> None:
        self.predictors = {
            (kind, layer): bundle.predictor(kind, layer).to(device) for kind in KINDS for layer in bundle.layers
        }

    @torch.no_grad()
    def scores(self, choice: Choice) -> Tensor:
        assert choice.tap_ND is not None
        key = choice.kind, choice.layer
        if key not in self.predictors:
            raise DataError(f"the bundle has no predictor for layer {key[1]}: add {key[1]} to sparsity.dense_layers")
        # Predictors learn from the fp16 taps of the cache; in fp32 the difference is far below their error.
        scores: Tensor = self.predictors[key](choice.tap_ND.float())
        return scores


class Replay(Selector):
    """Sets recorded elsewhere: two paths are compared on the same sets, since top-k flips on rounding."""

    name = "replay"

    def __init__(self, masks_NU: Mapping[tuple[str, int], Tensor]) -> None:
        self.masks_NU = masks_NU

    def scores(self, choice: Choice) -> Tensor:
        return self.masks_NU[choice.kind, choice.layer].float()


def alike(scores_NU: Tensor, together: int) -> Tensor:
    """Scores under which neighbours that are chosen together are equal: each gets the mean of its group."""
    if together == 1:
        return scores_NU
    means_NG = scores_NU.float().unflatten(-1, (-1, together)).mean(-1)
    return means_NG.repeat_interleave(together, -1)


def mixed(value: Tensor) -> Tensor:
    """A bijective 32-bit mixer (multiply and xor-shift): every input bit reaches every output bit. Works in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        value = (value ^ _right(value, shift)) * factor
    return value ^ _right(value, 15)


def _right(value: Tensor, shift: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (value >> shift) & ((1 << (32 - shift)) - 1)

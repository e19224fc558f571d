"""The simulate back end: masks on the live model's own layers.

    MLP:        y = sum_{j in S} a_j W2[:, j] + b2
    attention:  o = sum_{h in A} W_o[:, h] head_h + b_o

A unit left out is replaced by zero before W2 or W_o reads it, even where it is NaN; K and V exist for every head. A
layer whose budget keeps all units is not touched at all, so nothing left out is the unmodified model bit for bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dejavu.errors import DataError
from dejavu.models.anatomy import Anatomy
from dejavu.models.contribution import Contributions
from dejavu.models.observe import Observer, observed
from dejavu.models.taps import TapSource, tap_source
from dejavu.sparsity.accounting import Density, Recall, count_true
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.selectors import Choice, Selector, Tokens, alike


class Sparsifier(Observer):
    """Chooses units at every layer of a forward pass and leaves the others out.

    Use: `with sparsifier.attached(): sparsifier.begin(tokens); model(...)`. `record=True` keeps the masks of the last
    pass in `masks`; `force=True` sends layers that keep everything through the sparse path too (for tests);
    `recall_tokens` is the number of tokens, from the first, over which recall is measured.

    `rule=threshold` needs thresholds: a forward pass within `calibrating()` sets each layer's, in turn and on the
    already sparsified stream, so that just the budget's share of that pass is above it.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        selector: Selector | None,
        budget: Budget,
        *,
        rule: str = "topk",
        tap: str = "overlap",
        head_unit: str = "head",
        force: bool = False,
        record: bool = False,
        recall_tokens: int = 0,
    ) -> None:
        self.anatomy, self.selector, self.budget = anatomy, selector, budget
        self.rule, self.force = rule, force
        self.together = {"mlp": 1, "heads": anatomy.together(head_unit)}
        self.tap = tap if selector is None or selector.own_tap is None else selector.own_tap
        self.contributions = Contributions(anatomy)
        self.density = Density(anatomy)
        self.recall = Recall(anatomy, recall_tokens)
        self.thresholds: dict[tuple[str, int], float] = {}
        self._calibrating = False
        self.masks: dict[tuple[str, int], Tensor] | None = {} if record else None
        self._taps: dict[TapSource, Tensor] = {}
        self._tokens: Tokens | None = None
        self._sparse_count = 0

    @contextmanager
    def attached(self) -> Iterator["Sparsifier"]:
        """Hook into the model within the context; outside of it the model is as it was."""
        if not self.touches_anything:
            yield self
            return
        with observed(self.anatomy, self):
            yield self
        self._taps.clear()

    @contextmanager
    def calibrating(self) -> Iterator["Sparsifier"]:
        """A forward pass within sets the thresholds; what it uses counts in nothing."""
        density, recall = self.density, self.recall
        self.density, self.recall = Density(self.anatomy), Recall(self.anatomy, 0)
        self._calibrating = True
        try:
            yield self
        finally:
            self._calibrating = False
            self.density, self.recall = density, recall

    @property
    def reads_context(self) -> bool:
        """Whether units are chosen from the context of a text, which has to run whole for it."""
        return self.selector is not None and self.selector.reads_context

    @property
    def touches_anything(self) -> bool:
        """Whether any layer is sparse at all."""
        kinds = ("mlp", "heads")
        return any(self.is_sparse(kind, layer) for kind in kinds for layer in range(self.anatomy.layers))

    def is_sparse(self, kind: str, layer: int) -> bool:
        """Whether units of this kind are chosen in this layer."""
        if self.selector is None:
            return False
        return self.force or self.rule == "nonzero" or self.budget.of(kind)[layer] < self.anatomy.units(kind)

    def begin(self, tokens: Tokens) -> None:
        """Announce the tokens of the next forward pass."""
        self._tokens = tokens
        self._sparse_count = int(tokens.sparse_N.sum())
        if self.touches_anything:
            self.density.add_positions(self._sparse_count)
            self.recall.begin(tokens.sparse_N)

    def residual(self, layer: int, residual_ND: Tensor) -> None:
        self._keep_tap(TapSource("residual", layer), residual_ND)

    def middle(self, layer: int, middle_ND: Tensor) -> None:
        self._keep_tap(TapSource("middle", layer), middle_ND)

    def heads(self, layer: int, heads_NE: Tensor) -> Tensor | None:
        if not self.is_sparse("heads", layer):
            return None
        heads_NHK = heads_NE.unflatten(1, (self.anatomy.heads, self.anatomy.head_dim))

        def contributions() -> Tensor:
            return alike(self.contributions.of_heads(layer, heads_NHK), self.together["heads"])

        if self.rule == "nonzero":
            mask_NH = alike(heads_NHK.ne(0).any(-1), self.together["heads"]).bool()
        else:
            mask_NH = self._choose("heads", layer, contributions)
        mask_NH = self._count("heads", layer, mask_NH, contributions)
        return torch.where(mask_NH[..., None], heads_NHK, 0).flatten(1)

    def neurons(self, layer: int, activations_NF: Tensor) -> Tensor | None:
        if not self.is_sparse("mlp", layer):
            return None

        def contributions() -> Tensor:
            return self.contributions.of_neurons(layer, activations_NF)

        mask_NF = activations_NF.ne(0) if self.rule == "nonzero" else self._choose("mlp", layer, contributions)
        return torch.where(self._count("mlp", layer, mask_NF, contributions), activations_NF, 0)

    def _choose(self, kind: str, layer: int, contributions: Callable[[], Tensor]) -> Tensor:
        assert self.selector is not None and self._tokens is not None, "begin(tokens) comes before every forward pass"
        tap_ND = self._taps[tap_source(self.tap, kind, layer)] if self.selector.reads_tap else None
        choice = Choice(kind, layer, tap_ND, contributions, self._tokens, self.together[kind])
        try:
            if self.rule == "threshold":
                return self._above_threshold(kind, layer, alike(self.selector.scores(choice), self.together[kind]))
            return self.selector.choose(choice, self.budget.of(kind)[layer])
        except FloatingPointError as error:
            unit = "neurons" if kind == "mlp" else "heads"
            raise DataError(
                f"choosing {unit} in layer {layer} with selector {self.selector.name}: {error}; use dtype=float32, or "
                "check the weights and predictors"
            ) from error

    def _above_threshold(self, kind: str, layer: int, scores_NU: Tensor) -> Tensor:
        if bool(scores_NU.amax().isnan()):
            raise FloatingPointError(f"the scores of {len(scores_NU)} tokens hold NaN: they give no order")
        if self._calibrating:
            assert self._tokens is not None
            pool = scores_NU[self._tokens.sparse_N].flatten()
            share = self.budget.of(kind)[layer] / self.anatomy.units(kind)
            wanted = min(max(round(share * pool.numel()), 1), pool.numel())
            cut = pool.kthvalue(pool.numel() - wanted + 1).values
            if int((pool >= cut).sum()) > wanted:  # most scores of ReLU neurons are 0: none of them, not all of them
                cut = torch.nextafter(cut, torch.full_like(cut, torch.inf))
            self.thresholds[kind, layer] = float(cut)
        return scores_NU >= self.thresholds[kind, layer]

    def _count(self, kind: str, layer: int, mask_NU: Tensor, contributions: Callable[[], Tensor]) -> Tensor:
        """Book what was used and widen the mask to everything for tokens that do not run sparse."""
        assert self._tokens is not None
        sparse_N = self._tokens.sparse_N
        every_NU = mask_NU.expand(len(sparse_N), -1)
        if self.masks is not None:
            self.masks[kind, layer] = every_NU
        if len(mask_NU) == 1:
            self.density.add_used(kind, layer, count_true(mask_NU) * self._sparse_count)
        else:
            chosen_NU = mask_NU if self._sparse_count == len(sparse_N) else mask_NU[sparse_N]
            self.density.add_used(kind, layer, count_true(chosen_NU))
        self.recall.add(kind, layer, every_NU, contributions)
        return mask_NU if self._sparse_count == len(sparse_N) else mask_NU | ~sparse_N[:, None]

    def _keep_tap(self, source: TapSource, tensor: Tensor) -> None:
        """Keep what later layers may read: at most two layers back, and r_0, to which early indices clamp."""
        if self.selector is None or not self.selector.reads_tap:
            return
        if source == TapSource("residual", 0):
            self._taps.clear()
        self._taps[source] = tensor
        for old in [key for key in self._taps if key.layer < source.layer - 2 and key != TapSource("residual", 0)]:
            del self._taps[old]

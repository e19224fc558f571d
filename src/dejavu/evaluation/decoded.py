"""Scoring with the engine that decodes, so that the object that is fast is the object that is accurate.

A request's context is the prompt, run densely; its continuation is fed token by token, each position sparse. Same
results, densities and shares as `scoring.Scorer` with `sparsity.positions=decode`. Shapes: B sequences, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu.decode.engine import Engine
from dejavu.decode.sampling import left_padded
from dejavu.errors import DataError
from dejavu.evaluation.scoring import Request, Scored
from dejavu.models.anatomy import KINDS
from dejavu.models.load import LoadedModel
from dejavu.sparsity.accounting import Density

MOST_AT_ONCE = 8  # sequences in a batch: the union of their sets is read


@dataclass
class EngineScorer:
    """Scores requests by decoding them; counts how many scored tokens were produced by a sparse position."""

    loaded: LoadedModel
    engine: Engine
    batch_size: int = 1
    scored_tokens: int = field(default=0, init=False)
    sparse_tokens: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)  # of the engine's steps alone

    def __post_init__(self) -> None:
        self.engine.crossover = 1.0  # a batch must not change what is scored, however much of a layer it reads

    @property
    def sparse_token_share(self) -> float:
        """Scored tokens whose producing position ran sparse in at least one layer / scored tokens."""
        return self.sparse_tokens / self.scored_tokens if self.scored_tokens else 0.0

    @property
    def sparse(self) -> bool:
        """Whether units are chosen at all."""
        return self.engine.chooser is not None

    @property
    def reads(self) -> None:
        """No selector here reads a tap of its own."""
        return None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The engine stands beside the model: nothing has to be hooked."""
        yield

    def measured(self) -> dict[str, Any]:
        """Densities over all decoded positions, per layer and together, the share of tokens, and `ms_per_token`."""
        counters, parts = self.engine.counters, self.loaded.anatomy
        speed = {"ms_per_token": 1000 * self.seconds / max(1, counters.tokens)}
        share = {"sparse_token_share": self.sparse_token_share}
        if not self.sparse:
            return {"mlp_density": 1.0, "head_density": 1.0, "body_density": 1.0, "sparse_token_share": 0.0} | speed
        density = Density(parts)
        density.add_positions(counters.tokens)
        for kind in KINDS:
            for layer in range(parts.layers):
                density.add_used(kind, layer, torch.tensor(counters.used_per_layer[kind][layer]))
        per_layer = {
            f"{name}_density_per_layer": density.per_layer(kind) for kind, name in (("mlp", "mlp"), ("heads", "head"))
        }
        return density.measured() | share | per_layer | speed

    def score(self, requests: Sequence[Request], advance: Callable[[int], None] = lambda count: None) -> list[Scored]:
        """Score all requests, those of one context together. `advance(n)` is called as n more are done."""
        results: dict[int, Scored] = {}
        for batch in batches(requests, min(self.batch_size, MOST_AT_ONCE), self.engine.weights.context):
            results |= zip(batch, self._score_batch([requests[index] for index in batch]), strict=True)
            advance(len(batch))
        return [results[index] for index in range(len(requests))]

    def _score_batch(self, requests: list[Request]) -> list[Scored]:
        longest = max(len(request.continuation) for request in requests)
        totals, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
        logits_BV = self._read([request.context for request in requests], longest)
        for place in range(longest):
            active_B = np.array([len(request.continuation) > place for request in requests])
            next_B = np.array([(*request.continuation, *[0] * longest)[place] for request in requests])
            if not bool(torch.isfinite(logits_BV[torch.from_numpy(active_B)]).all()):
                raise DataError("the model gave a logit that is not finite: check the weights and predictors")
            logprobs_BV = logits_BV.double().log_softmax(-1)
            picked_B = logprobs_BV.gather(1, torch.from_numpy(next_B)[:, None])[:, 0].numpy()
            totals += np.where(active_B, picked_B, 0)
            greedy &= ~active_B | (logits_BV.argmax(-1).numpy() == next_B)
            self.scored_tokens += int(active_B.sum())
            self.sparse_tokens += int(active_B.sum()) if place else 0  # the first is the prompt's, which ran whole
            more_B = np.array([len(request.continuation) > place + 1 for request in requests])
            if more_B.any():
                started = time.perf_counter()
                logits_BV = self.engine.step(next_B, more_B)
                self.seconds += time.perf_counter() - started
        return [Scored(float(total), bool(right)) for total, right in zip(totals, greedy, strict=True)]

    def _read(self, contexts: list[Sequence[int]], longest: int) -> Tensor:
        """Run every context once, however many sequences go on from it by up to `longest` tokens; logits (B, V)."""
        different = {tuple(context): context for context in contexts}
        tokens_CT, start_C = left_padded(list(different.values()))
        logits_CV = self.engine.prefill(tokens_CT, start_C, capacity=tokens_CT.shape[1] + longest)
        if len(different) == len(contexts):
            return logits_CV
        place = {context: number for number, context in enumerate(different)}
        index_B = np.array([place[tuple(context)] for context in contexts])
        self.engine.continue_from(self.engine, index_B)
        return logits_CV[torch.from_numpy(index_B)]


def batches(requests: Sequence[Request], size: int, context: int) -> Iterator[list[int]]:
    """Indices of at most `size` requests at a time, which padded to their longest fit the context.

    Requests with the same context, such as a question's answers, come one after another, to be read once; then those
    with continuations of like length.
    """
    longest_of: dict[tuple[int, ...], int] = {}
    for request in requests:
        key = tuple(request.context)
        longest_of[key] = max(longest_of.get(key, 0), len(request.continuation))

    def place(index: int) -> tuple[int, int, tuple[int, ...], int]:
        key = tuple(requests[index].context)
        return -longest_of[key], -len(key), key, -len(requests[index].continuation)

    order = sorted(range(len(requests)), key=place)
    batch: list[int] = []
    for index in order:
        together = [requests[other] for other in (*batch, index)]
        longest = max(len(request.context) for request in together) - 1
        longest += max(len(request.continuation) for request in together)
        if batch and (len(batch) == size or longest > context):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

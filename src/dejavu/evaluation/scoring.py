"""Log-probabilities of continuations, and which positions of each request run sparse.

A request is context + continuation; position p produces the score of token p+1, so the model reads all tokens but the
last. Requests are padded on the right, which a causal model cannot see; padding runs whole and counts in nothing.
Shape suffixes: B requests in a batch, T positions, V vocabulary, N = B * T.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dejavu.errors import DataError
from dejavu.models.load import LoadedModel
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Tokens

TOKENS_PER_SEQUENCE = 256  # batch_size counts sequences of this length; shorter ones go more at a time


@dataclass(frozen=True)
class Request:
    """Token ids; the continuation is what is scored."""

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class Scored:
    """Sum of log-probabilities of the continuation in nats, and whether it is what greedy decoding would say."""

    loglikelihood: float
    greedy: bool


@dataclass
class Scorer:
    """Scores requests with a model, sparsified or not, and keeps count of how many scored tokens ran sparse."""

    loaded: LoadedModel
    sparsifier: Sparsifier | None = None
    positions: str = "all"
    fraction: float = 0.5  # for positions=last_fraction
    batch_size: int = 16
    scored_tokens: int = field(default=0, init=False)
    sparse_tokens: int = field(default=0, init=False)

    @property
    def sparse_token_share(self) -> float:
        """Scored tokens whose producing position ran sparse in at least one layer / scored tokens."""
        return self.sparse_tokens / self.scored_tokens if self.scored_tokens else 0.0

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], advance: Callable[[int], None] = lambda count: None) -> list[Scored]:
        """Score all requests; the longest go first. `advance(n)` is called as n more are done."""
        order = sorted(range(len(requests)), key=lambda index: -_length(requests[index]))
        results: dict[int, Scored] = {}
        while order:
            limit = max(1, self.batch_size * TOKENS_PER_SEQUENCE // _length(requests[order[0]]))
            batch, order = order[:limit], order[limit:]
            results |= zip(batch, self._score_batch([requests[index] for index in batch]), strict=True)
            advance(len(batch))
        return [results[index] for index in range(len(requests))]

    def _score_batch(self, requests: list[Request]) -> list[Scored]:
        tokens_BT = np.zeros((len(requests), _length(requests[0])), dtype=np.int64)
        sparse_BT = np.zeros(tokens_BT.shape, dtype=bool)
        for row, request in enumerate(requests):
            tokens_BT[row, : _length(request)] = [*request.context, *request.continuation][:-1]
            start, stop = sparse_span(request, self.positions, self.fraction)
            sparse_BT[row, start:stop] = True
            if self.sparsifier is not None and self.sparsifier.touches_anything:
                self.sparse_tokens += max(0, stop - max(start, len(request.context) - 1))
            self.scored_tokens += len(request.continuation)
        logits_BTV = self._logits(tokens_BT, sparse_BT, [_document_number(request) for request in requests])
        return [_scored(logits_BTV[row], request) for row, request in enumerate(requests)]

    def _logits(self, tokens_BT: np.ndarray, sparse_BT: np.ndarray, documents: list[int]) -> Tensor:
        device = self.loaded.device
        input_ids = torch.from_numpy(tokens_BT).to(device)
        if self.sparsifier is None:
            return self.loaded.model(input_ids=input_ids, use_cache=False).logits
        rows, length = tokens_BT.shape
        self.sparsifier.begin(
            Tokens(
                sparse_N=torch.from_numpy(sparse_BT).flatten().to(device),
                document_N=torch.tensor(documents, device=device).repeat_interleave(length),
                position_N=torch.arange(length, device=device).repeat(rows),
            )
        )
        return self.loaded.model(input_ids=input_ids, use_cache=False).logits


def sparse_span(request: Request, positions: str, fraction: float) -> tuple[int, int]:
    """First and past-last position of a request that run sparse (DESIGN: `sparsity.positions`).

    decode: the context is the prompt, which an engine runs whole; its last position produces the first scored token.
    """
    length = _length(request)
    start = {
        "all": 0,
        "decode": len(request.context),
        "last_fraction": length - int(fraction * length),
        "last": length - 1,
    }[positions]
    return start, length


def _length(request: Request) -> int:
    """Positions the model reads: all tokens but the last, which nothing follows."""
    return len(request.context) + len(request.continuation) - 1


def _document_number(request: Request) -> int:
    """A number that depends on the request's own tokens only, so `random` chooses alike in any batch and order."""
    return zlib.crc32(np.array([*request.context, *request.continuation], dtype=np.int64).tobytes())


def _scored(logits_TV: Tensor, request: Request) -> Scored:
    last = _length(request)
    logits_CV = logits_TV[last - len(request.continuation) : last].float()
    if not torch.isfinite(logits_CV).all():
        raise DataError(
            "the model gave a logit that is not finite: use dtype=float32, or check the weights and predictors"
        )
    logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
    wanted_C = torch.tensor(request.continuation, device=logits_TV.device)
    loglikelihood = logprobs_CV.gather(1, wanted_C[:, None]).double().sum()
    return Scored(float(loglikelihood), bool((logits_CV.argmax(-1) == wanted_C).all()))

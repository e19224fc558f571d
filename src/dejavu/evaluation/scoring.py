"""Log-probabilities of continuations, and which positions of each request run sparse.

A request is context + continuation; position p produces the score of token p+1, so the model reads all tokens but the
last. Requests are padded on the right, which a causal model cannot see; padding runs whole and counts in nothing. The
output embedding, a fifth of a small model's work, is computed at scored positions only.
Shape suffixes: B requests in a batch, T positions, D width, V vocabulary, N = B * T, S scored positions.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dejavu.errors import DataError
from dejavu.evaluation.broken import broken_place
from dejavu.models.load import LoadedModel
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Tokens

TOKENS_PER_SEQUENCE = 256  # batch_size counts sequences of this length; shorter ones go more at a time
LOGITS_AT_ONCE = 1 << 26  # values of logits in memory at a time: 256 MB


@dataclass(frozen=True)
class Request:
    """Token ids; the continuation is what is scored. A `window` is running text: its context is no prompt."""

    context: Sequence[int]
    continuation: Sequence[int]
    window: bool = False


@dataclass(frozen=True)
class Scored:
    """Sum of log-probabilities of the continuation in nats, and whether it is what greedy decoding would say."""

    loglikelihood: float
    greedy: bool


class Scoring(Protocol):
    """What tasks and lm-eval's adapter need of a back end: `Scorer` here, `decoded.EngineScorer`."""

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def sparse(self) -> bool: ...
    @property
    def sparse_token_share(self) -> float: ...
    @property
    def reads(self) -> dict[str, Any] | None: ...
    def attached(self) -> AbstractContextManager[None]: ...
    def measured(self) -> dict[str, Any]: ...
    def score(self, requests: Sequence[Request], advance: Callable[[int], None] = ...) -> list[Scored]: ...


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

    @property
    def sparse(self) -> bool:
        """Whether any unit of any layer may be left out."""
        return self.sparsifier is not None and self.sparsifier.touches_anything

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Scoring happens within: the sparsifier hooks into the model and goes afterwards."""
        if self.sparsifier is None:
            yield
            return
        with self.sparsifier.attached():
            yield

    def measured(self) -> dict[str, Any]:
        """Densities and share, and per layer density, recall of mass and recall; thresholds where there are some."""
        if self.sparsifier is None:
            return {"mlp_density": 1.0, "head_density": 1.0, "body_density": 1.0, "sparse_token_share": 0.0}
        sparsifier = self.sparsifier
        found: dict[str, Any] = {**sparsifier.density.measured(), "sparse_token_share": self.sparse_token_share}
        for kind, name in (("mlp", "mlp"), ("heads", "head")):
            found[f"{name}_density_per_layer"] = sparsifier.density.per_layer(kind)
            for quantity, values in sparsifier.recall.per_layer(kind).items():
                found[f"{name}_{quantity}_per_layer"] = values
        if sparsifier.thresholds:
            found["thresholds"] = {f"{kind}.{layer}": cut for (kind, layer), cut in sparsifier.thresholds.items()}
        return found

    @property
    def reads(self) -> dict[str, Any] | None:
        """{rank, tap} of a selector that computes from a tap of its own; None for others."""
        selector = None if self.sparsifier is None else self.sparsifier.selector
        if selector is None or selector.own_tap is None:
            return None
        return {"rank": getattr(selector, "rank", None), "tap": selector.own_tap}

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
        sparse_BT, context_BT = np.zeros(tokens_BT.shape, dtype=bool), np.zeros(tokens_BT.shape, dtype=bool)
        for row, request in enumerate(requests):
            tokens_BT[row, : _length(request)] = [*request.context, *request.continuation][:-1]
            start, stop = self._span(request)
            sparse_BT[row, start:stop], context_BT[row, :start] = True, True
            if self.sparsifier is not None and self.sparsifier.touches_anything:
                self.sparse_tokens += max(0, stop - max(start, len(request.context) - 1))
            self.scored_tokens += len(request.continuation)

        def forward() -> Tensor:
            documents = [_document_number(request) for request in requests]
            return self._hidden(tokens_BT, sparse_BT, context_BT, documents)

        hidden_BTD = forward()
        ends = [_length(request) for request in requests]
        counts = [len(request.continuation) for request in requests]
        spans = zip(range(len(requests)), ends, counts, strict=True)
        hidden_SD = torch.cat([hidden_BTD[row, end - count : end] for row, end, count in spans])
        wanted_S = torch.tensor([token for request in requests for token in request.continuation])
        values_S, greedy_S = self._chosen(hidden_SD, wanted_S.to(hidden_SD.device))
        if not bool(torch.isfinite(values_S).all()):
            raise DataError(
                f"the model gave a logit that is not finite ({broken_place(self.loaded.anatomy, forward)}): "
                "use dtype=float32, or check the weights and predictors"
            )
        return [
            Scored(float(values.sum()), bool(greedy.all()))
            for values, greedy in zip(values_S.split(counts), greedy_S.split(counts), strict=True)
        ]

    def _span(self, request: Request) -> tuple[int, int]:
        """`sparse_span`, after the prompt in any case where units are chosen from it."""
        start, stop = sparse_span(request, self.positions, self.fraction)
        if self.sparsifier is not None and self.sparsifier.reads_context:
            start = max(start, prompt_length(request))
        return start, stop

    def _hidden(
        self, tokens_BT: np.ndarray, sparse_BT: np.ndarray, context_BT: np.ndarray, documents: list[int]
    ) -> Tensor:
        """What the output embedding reads, (B, T, D)."""
        device = self.loaded.device
        if self.sparsifier is not None:
            rows, length = tokens_BT.shape
            self.sparsifier.begin(
                Tokens(
                    sparse_N=torch.from_numpy(sparse_BT).flatten().to(device),
                    document_N=torch.tensor(documents, device=device).repeat_interleave(length),
                    position_N=torch.arange(length, device=device).repeat(rows),
                    context_N=torch.from_numpy(context_BT).flatten().to(device),
                    row_N=torch.arange(rows, device=device).repeat_interleave(length),
                )
            )
        input_ids = torch.from_numpy(tokens_BT).to(device)
        hidden_BTD: Tensor = self.loaded.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden_BTD.to(device)

    def _chosen(self, hidden_SD: Tensor, wanted_S: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each wanted token (float64, NaN for logits not finite), and whether it is likeliest."""
        head = self.loaded.model.get_output_embeddings()
        values, greedy = [], []
        rows = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        for hidden_CD, wanted_C in zip(hidden_SD.split(rows), wanted_S.split(rows), strict=True):
            logits_CV = head(hidden_CD).to(hidden_CD.device).float()
            wanted_logits_C = logits_CV.gather(1, wanted_C[:, None])[:, 0]
            normalised_C = wanted_logits_C.double() - logits_CV.logsumexp(-1).double()
            finite_C = torch.isfinite(logits_CV.amax(-1)) & torch.isfinite(logits_CV.amin(-1))  # a NaN is both
            values.append(torch.where(finite_C, normalised_C, torch.nan))
            greedy.append(logits_CV.argmax(-1) == wanted_C)
        return torch.cat(values), torch.cat(greedy)


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


def prompt_length(request: Request) -> int:
    """Positions from which a whole request's units may be chosen: the context, of running text the first quarter."""
    return max(1, _length(request) // 4) if request.window else len(request.context)


def _length(request: Request) -> int:
    """Positions the model reads: all tokens but the last, which nothing follows."""
    return len(request.context) + len(request.continuation) - 1


def _document_number(request: Request) -> int:
    """A number that depends on the request's own tokens only, so `random` chooses alike in any batch and order."""
    return zlib.crc32(np.array([*request.context, *request.continuation], dtype=np.int64).tobytes())

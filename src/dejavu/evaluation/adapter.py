"""lm-eval's view of a (sparsified) model: HFLM with the scoring replaced where lengths are known.

HFLM's own scoring pads with id 0, knows no mask and forgets where the context ends by the time the model is called, so
neither densities nor `sparsity.positions` could be right there. Everything else (encoding, request types) is HFLM's.
"""

import logging
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.progress import Progress

from dejavu.corpora.blocks import token_ids
from dejavu.evaluation.scoring import Request, Scored, Scoring
from dejavu.tracking.run import interactive

# Warnings about arguments that a loaded model ignores and about defaults of metrics that are not used here.
logging.getLogger("lm_eval").setLevel(logging.ERROR)


class DejaVuLM(HFLM):
    """lm-eval's interface over a back end. A document is scored after exactly one separator.

    `stock_bos` does in rolling tasks what stock lm-eval does: its own prefix token, and whatever the tokenizer adds.
    """

    def __init__(self, scorer: Scoring, stock_bos: bool = False) -> None:
        loaded = scorer.loaded
        self.stock_bos = stock_bos
        super().__init__(
            pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=loaded.anatomy.context
        )
        self.scorer = scorer

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text: the model's document separator."""
        return int(super().prefix_token_id) if self.stock_bos else self.scorer.loaded.anatomy.separator

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """HFLM's encoding of (context, continuation) pairs, without its progress bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each (_, context, continuation) in ids; too long contexts lose their start."""
        results = self._scored([self._fitted(context, continuation) for _, context, continuation in requests])
        return [(result.loglikelihood, result.greedy) for result in results]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in windows of the context length, one separator before the first only.

        HFLM encodes with the tokenizer's own `</s>` and prepends another, which scores the separator as a word
        (lm-eval#3333).
        """
        owners, windows = [], []
        for owner, request in enumerate(requests):
            text = request.args[0]
            ids = self.tok_encode(text) if self.stock_bos else token_ids([text], self.scorer.loaded.tokenizer)[0]
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                owners.append(owner)
                context, continuation = make_disjoint_window(window)
                windows.append(Request(context, continuation, window=True))
        totals = [0.0] * len(requests)
        for owner, result in zip(owners, self._scored(windows), strict=True):
            totals[owner] += result.loglikelihood
        return totals

    def _scored(self, requests: list[Request]) -> list[Scored]:
        with Progress(disable=not interactive(), transient=True) as progress:
            bar = progress.add_task("scoring", total=len(requests))
            return self.scorer.score(requests, lambda count: progress.advance(bar, count))

    def _fitted(self, context: list[int], continuation: list[int]) -> Request:
        surplus = max(0, len(context) + len(continuation) - 1 - self.max_length)
        return Request(context[surplus:], continuation)

"""From logits to the next token: greedy or drawn after temperature, top-k, top-p. Shapes: B sequences, V vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dejavu.decode.engine import Engine
from dejavu.errors import DataError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k and top_p (None: off) leave only the likeliest tokens."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def next_tokens(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> np.ndarray:
    """One token for each sequence, int64 (B,). Raises DataError for logits that are not finite."""
    if not bool(torch.isfinite(logits_BV).all()):
        raise DataError("the model gave a logit that is not finite: check the weights and predictors")
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).numpy()
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[1]:
        cut_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < cut_B1, -torch.inf)
    if sampling.top_p is not None:
        logits_BV = nucleus(logits_BV, sampling.top_p)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0].numpy()


def nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """Only the fewest likeliest tokens whose probabilities reach `top_p` keep their logits, at least one."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
    dropped_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(1, order_BV, before_BV >= top_p)
    return logits_BV.masked_fill(dropped_BV, -torch.inf)


def left_padded(prompts: Sequence[Sequence[int]], padding: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of unequal length as one array (B, T), and where each starts (B,)."""
    length = max(map(len, prompts))
    tokens_BT = np.full((len(prompts), length), padding, np.int64)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, length - len(prompt) :] = prompt
    return tokens_BT, np.array([length - len(prompt) for prompt in prompts])


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, sampling: Sampling, stop: frozenset[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens (B,), which sequences they belong to (B,)) as they come, until all have stopped or enough are made.

    A sequence ends with the first token of `stop`, which is still given out; it then costs nothing more.
    """
    tokens_BT, start_B = left_padded(prompts)
    generator = torch.Generator().manual_seed(sampling.seed)
    active_B = np.ones(len(prompts), bool)
    logits_BV = engine.prefill(tokens_BT, start_B, capacity=tokens_BT.shape[1] + new_tokens)
    for made in range(1, new_tokens + 1):
        tokens_B = next_tokens(logits_BV, sampling, generator)
        yield tokens_B, active_B.copy()
        active_B &= ~np.isin(tokens_B, list(stop))
        if made == new_tokens or not active_B.any():
            return
        logits_BV = engine.step(tokens_B, active_B)

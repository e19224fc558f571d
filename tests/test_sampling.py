"""From logits to tokens, and the loop that decodes a batch until all have ended."""

import numpy as np
import pytest
import torch
from tiny import tiny_opt

from dejavu.decode.engine import Engine
from dejavu.decode.sampling import Sampling, generate, left_padded, next_tokens, nucleus
from dejavu.decode.weights import repack
from dejavu.errors import DataError

LOGITS = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]])).repeat(400, 1)
NEVER = frozenset({-1})


def drawn(seed: int = 0, **settings) -> list[int]:
    """Which tokens come up in 400 draws, rising."""
    sampling = Sampling(**{"temperature": 1.0, **settings})
    return sorted(set(next_tokens(LOGITS, sampling, torch.Generator().manual_seed(seed)).tolist()))


def test_what_temperature_top_k_and_top_p_leave():
    assert drawn(temperature=0.0) == [1]
    assert drawn() == [0, 1, 2, 3]
    assert drawn(top_k=2) == [1, 3] and drawn(top_k=9) == [0, 1, 2, 3]
    assert drawn(top_p=0.7) == [1, 3] and drawn(top_p=0.76) == [1, 2, 3]
    assert drawn(top_p=1e-9) == [1], "at least one is left"
    assert drawn(temperature=0.01) == [1]
    assert torch.isfinite(nucleus(LOGITS, 0.7)).sum(1).eq(2).all()


def test_a_logit_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="not finite"):
        next_tokens(torch.tensor([[1.0, torch.nan]]), Sampling(), torch.Generator())


def test_prompts_are_padded_on_the_left():
    tokens_BT, start_B = left_padded([[5, 6, 7], [8]])
    assert tokens_BT.tolist() == [[5, 6, 7], [1, 1, 8]] and start_B.tolist() == [0, 2]


def test_the_same_seed_draws_the_same_text():
    engine = Engine(repack(tiny_opt(), "float32"))

    def text(seed: int) -> list[int]:
        sampling = Sampling(1.0, top_k=20, top_p=0.9, seed=seed)
        return [int(tokens_B[0]) for tokens_B, _ in generate(engine, [[5, 6]], 20, sampling, NEVER)]

    assert text(0) == text(0) != text(1)


def test_a_sequence_ends_with_its_stop_token_and_costs_nothing_more():
    engine = Engine(repack(tiny_opt(), "float32"))
    prompts = [[5, 6, 7], [8]]
    free = np.array([tokens_B for tokens_B, _ in generate(engine, prompts, 12, Sampling(), NEVER)])
    stop = int(free[3, 0])
    ends = [int(np.flatnonzero(free[:, row] == stop)[0]) if stop in free[:, row] else 11 for row in (0, 1)]
    before = engine.counters.tokens
    made = list(generate(engine, prompts, 12, Sampling(), frozenset({stop})))
    assert len(made) == max(ends) + 1
    for row, end in enumerate(ends):
        assert [int(tokens_B[row]) for tokens_B, _ in made[: end + 1]] == free[: end + 1, row].tolist()
        assert [bool(active_B[row]) for _, active_B in made] == [place <= end for place in range(len(made))]
    assert engine.counters.tokens - before == sum(ends), "the first token of each is the prompt's"

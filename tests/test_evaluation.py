"""Scoring, positions and tasks over the embedded model's tokenizer and tiny random models."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tiny import tiny_opt

from dejavu.corpora.documents import Document
from dejavu.errors import DataError
from dejavu.evaluation.continuation import continuation_questions
from dejavu.evaluation.scoring import Request, Scorer, sparse_span
from dejavu.evaluation.tasks import continuation, rolling, token_perplexity
from dejavu.models.families import anatomy
from dejavu.models.load import EMBEDDED, LoadedModel
from dejavu.schema import Sparsity, Task
from dejavu.sparsity.budget import make_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Oracle, Random


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED / "opt-tiny")


@pytest.fixture(scope="module")
def loaded(tokenizer):
    """A random model with the embedded tokenizer's vocabulary and a short context, so that windows matter."""
    model = tiny_opt(vocab_size=len(tokenizer), max_position_embeddings=64)
    return LoadedModel("tiny", model, tokenizer, anatomy(model))


def requests(count: int = 7) -> list[Request]:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 20, size=(count, 2))
    return [Request(random.integers(4, 90, a).tolist(), random.integers(4, 90, b).tolist()) for a, b in lengths]


def sparse_scorer(loaded, selector, positions="all", ratio=0.5, batch_size=16) -> Scorer:
    budget = make_budget(Sparsity(ratio=ratio), loaded.anatomy)
    return Scorer(loaded, Sparsifier(loaded.anatomy, selector, budget), positions, batch_size=batch_size)


def test_scores_equal_a_plain_computation(loaded):
    for request, scored in zip(requests(), Scorer(loaded).score(requests()), strict=True):
        ids = torch.tensor([[*request.context, *request.continuation]])
        logprobs = torch.log_softmax(loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        picked = logprobs[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(request.context) - 1 :]
        assert scored.loglikelihood == pytest.approx(float(picked.sum()), abs=1e-3)


@pytest.mark.parametrize("selector", [Oracle(), Random(0, {"mlp": 64, "heads": 4})], ids=["oracle", "random"])
def test_scores_and_densities_do_not_depend_on_batching(loaded, selector):
    """Padding enters nothing: one request at a time gives what a padded batch gives."""
    results, densities = [], []
    for batch_size in (16, 1):
        scorer = sparse_scorer(loaded, selector, batch_size=batch_size)
        with scorer.sparsifier.attached():
            if batch_size == 1:
                scored = [scorer.score([request])[0] for request in requests()]
            else:
                scored = scorer.score(requests())
        results.append([result.loglikelihood for result in scored])
        densities.append((scorer.sparsifier.density.measured(), scorer.sparsifier.density.positions))
    assert results[0] == pytest.approx(results[1], abs=2e-3)
    assert densities[0] == densities[1]
    assert densities[0][1] == sum(len(r.context) + len(r.continuation) - 1 for r in requests())


@pytest.mark.parametrize(
    ("positions", "span", "share"),
    [("all", (0, 9), 1.0), ("decode", (6, 9), 0.75), ("last_fraction", (5, 9), 1.0), ("last", (8, 9), 0.25)],
)
def test_positions(loaded, positions, span, share):
    """Six context tokens and four scored ones: position 5 gives the first score, position 8 the last."""
    request = Request([5, 6, 7, 8, 9, 10], [11, 12, 13, 14])
    assert sparse_span(request, positions, 0.5) == span
    scorer = sparse_scorer(loaded, Oracle(), positions)
    with scorer.sparsifier.attached():
        scorer.score([request])
    assert scorer.sparse_token_share == share
    assert scorer.sparsifier.density.positions == span[1] - span[0]


def test_a_logit_that_is_not_finite_is_refused(loaded):
    def spoil(module, args, output):
        return output * float("nan")

    hook = loaded.model.lm_head.register_forward_hook(spoil)
    with pytest.raises(DataError, match="not finite"):
        Scorer(loaded).score(requests(1))
    hook.remove()


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.decoder.layers.0.self_attn.out_proj", "first in the attention of layer 0"),
        ("model.decoder.layers.0.fc2", "first in the MLP of layer 0"),
        ("model.decoder.layers.1.fc2", "first in the MLP of layer 1 or after it"),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_nan_is_told_with_the_layer_it_comes_from(tokenizer, module, place, sparse):
    model = tiny_opt(vocab_size=len(tokenizer))
    model.get_submodule(module).bias[3] = float("nan")
    own = LoadedModel("tiny", model, tokenizer, anatomy(model))
    scorer = sparse_scorer(own, Random(0, {"mlp": 64, "heads": 4})) if sparse else Scorer(own)
    with pytest.raises(DataError, match=place), scorer.sparsifier.attached() if sparse else nullcontext():
        scorer.score(requests(2))


TEXTS = [
    Document(
        f"Number {n} of the stories tells how the keeper of house {n} walked along the river and found " * 3, str(n)
    )
    for n in range(6)
]


def test_rolling_scores_each_token_once_after_one_separator(loaded, tokenizer):
    samples = rolling("pydocs", Task(), TEXTS, None, Scorer(loaded))
    assert [sample["document"] for sample in samples] == sorted(text.hash for text in TEXTS)
    by_hash = {text.hash: text for text in TEXTS}
    for sample in samples:
        text = by_hash[sample["document"]].text
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sample["tokens"] == len(ids) and sample["bytes"] == len(text.encode())
        expected, done = 0.0, 0
        while done < len(
            ids
        ):  # windows of 64 predictions; later ones end where the text ends, with what context is left
            wanted = ids[done : done + 64]
            before = [2] if done == 0 else ids[max(0, done + len(wanted) - 65) : done]
            (scored,) = Scorer(loaded).score([Request(before, wanted)])
            expected, done = expected + scored.loglikelihood, done + len(wanted)
        assert sample["loglikelihood"] == pytest.approx(expected, abs=5e-3)


def test_token_perplexity_drops_the_tail_and_does_not_score_the_first_token_of_a_block(loaded, tokenizer):
    texts = [text.text for text in TEXTS]
    ids = [2, *tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]]
    samples = token_perplexity(texts, None, Scorer(loaded))
    assert len(samples) == len(ids) // 64
    assert {sample["tokens"] for sample in samples} == {63}
    (first,) = Scorer(loaded).score([Request(ids[:1], ids[1:64])])
    assert samples[0]["loglikelihood"] == pytest.approx(first.loglikelihood, abs=1e-3)
    with pytest.raises(DataError, match="fewer than one block"):
        token_perplexity(["short"], None, Scorer(loaded))


def test_questions_have_one_true_answer_and_choices_of_equal_length(tokenizer):
    questions = continuation_questions(TEXTS, tokenizer, 12, 6, 4)
    assert len(questions) >= 6
    by_hash = {text.hash: text.text for text in TEXTS}
    for question in questions:
        true = question["choices"][question["answer"]]
        assert question["context"] + true in by_hash[question["document"]]
        assert len(set(question["choices"])) == 4
        assert {len(tokenizer(choice, add_special_tokens=False)["input_ids"]) for choice in question["choices"]} == {6}
    assert {question["answer"] for question in questions} > {0}
    assert questions == continuation_questions(TEXTS[::-1], tokenizer, 12, 6, 4), (
        "the order of documents must not matter"
    )
    with pytest.raises(DataError, match="only 3 documents"):
        continuation_questions(TEXTS[:3], tokenizer, 12, 6, 4)


def test_continuation_picks_the_likeliest_choice_and_blind_sees_no_context(loaded, tokenizer):
    questions = continuation_questions(TEXTS, tokenizer, 12, 6, 4)
    for with_context in (True, False):
        task = Task(kind="continuation", context_tokens=12, continuation_tokens=6, with_context=with_context)
        samples = continuation("c", task, TEXTS, None, Scorer(loaded))
        for question, sample in list(zip(questions, samples, strict=True))[:4]:
            context = tokenizer(question["context"])["input_ids"] if with_context else [2]
            choices = [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in question["choices"]]
            scored = [result.loglikelihood for result in Scorer(loaded).score([Request(context, c) for c in choices])]
            assert sample["correct"] == float(int(np.argmax(scored)) == question["answer"])
            assert sample["loglikelihood"] == pytest.approx(scored[question["answer"]], abs=1e-3)

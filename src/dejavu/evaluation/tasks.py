"""Tasks: from a config entry to samples, one row per document or question.

`lm_eval` are lm-eval's own tasks; `rolling` and `continuation` are lm-eval tasks over generated rows;
`token_perplexity` is the pruning papers' protocol, which lm-eval does not have: rows joined by a blank line, tokenised
once with one separator, non-overlapping blocks of the context length (at most 2,048), the tail dropped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from dejavu.corpora.blocks import encode_documents, token_ids
from dejavu.corpora.documents import Document
from dejavu.corpora.sources import documents, rows
from dejavu.errors import DataError
from dejavu.evaluation.adapter import DejaVuLM
from dejavu.evaluation.continuation import continuation_questions
from dejavu.evaluation.official import official_task, sample_rows
from dejavu.evaluation.official import scored_documents as official_documents
from dejavu.evaluation.scoring import Request, Scoring
from dejavu.schema import Config, Corpus, Task

MAX_BLOCK = 2048


def run_task(name: str, task: Task, config: Config, scorer: Scoring) -> pd.DataFrame:
    """Samples of one task: columns task, document and those that its metrics read."""
    limit, root = task_limit(task, config.tasks.limit), data_folder(config)
    if task.kind == "lm_eval":
        official = official_task(task.corpus, root)
        results = lm_eval_samples(official, limit, scorer, config.evaluation.stock_bos)
        samples = list(sample_rows(official, results))
    elif task.kind == "token_perplexity":
        samples = token_perplexity(rows(task.corpus, "test", root, task_corpus(task)), limit, scorer)
    else:
        held_out = documents(task.corpus, "test", root, task_corpus(task))
        run = rolling if task.kind == "rolling" else continuation
        samples = run(name, task, held_out, limit, scorer)
    return pd.DataFrame(samples).assign(task=name)


def scored_documents(task: Task, config: Config) -> list[Document]:
    """The documents that a task scores, which no predictor may have been trained on."""
    root = data_folder(config)
    if task.kind == "lm_eval":
        return official_documents(official_task(task.corpus, root), task_limit(task, config.tasks.limit))
    return documents(task.corpus, "test", root, task_corpus(task))


def note(task: Task, config: Config, count: int) -> str | None:
    """What a reader of a task's row must know to compare it with published numbers."""
    if task.kind == "token_perplexity" and task.corpus == "c4":
        return f"C4: {count:,} documents of this workbench's own, not the published sample"
    if task.kind == "lm_eval" and config.evaluation.stock_bos:
        return "evaluation.stock_bos=true: prefix token as in stock lm-eval"
    return None


def task_limit(task: Task, limit: int | None) -> int | None:
    """The smaller of a task's own limit and the one for all."""
    return min((bound for bound in (limit, task.limit) if bound is not None), default=None)


def task_corpus(task: Task) -> Corpus:
    """The corpus that a task reads."""
    return Corpus(name=task.corpus, hub=task.hub, hub_config=task.hub_config)


def data_folder(config: Config) -> Path | None:
    """`data_root` as a path."""
    return None if config.data_root is None else Path(config.data_root)


def rolling(
    name: str, task: Task, held_out: Sequence[Document], limit: int | None, scorer: Scoring
) -> list[dict[str, Any]]:
    """Log-likelihood of each document, in the order of their hashes (so that `limit` takes a fixed random part)."""
    chosen = sorted(held_out, key=lambda document: document.hash)[:limit]
    results = evaluate_rows(
        name,
        [{"text": document.text} for document in chosen],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        scorer,
    )
    encoded = token_ids([document.text for document in chosen], scorer.loaded.tokenizer)
    return [
        {
            "document": document.hash,
            "loglikelihood": result["filtered_resps"][0],
            "tokens": len(ids),
            "bytes": len(document.text.encode()),
            "words": len(document.text.split()),
            "correct": np.nan,
        }
        for document, ids, result in zip(chosen, encoded, results, strict=True)
    ]


def continuation(
    name: str, task: Task, held_out: Sequence[Document], limit: int | None, scorer: Scoring
) -> list[dict[str, Any]]:
    """Whether the true continuation is the likeliest; without its context when `with_context` is off."""
    questions = continuation_questions(
        held_out, scorer.loaded.tokenizer, task.context_tokens, task.continuation_tokens, task.choices
    )[:limit]
    results = evaluate_rows(
        name,
        questions,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}" if task.with_context else "",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        scorer,
    )
    return [
        {
            "document": question["id"],
            "loglikelihood": result["filtered_resps"][question["answer"]][0],
            "tokens": task.continuation_tokens,
            "bytes": len(question["choices"][question["answer"]].encode()),
            "words": len(question["choices"][question["answer"]].split()),
            "correct": float(result["acc"]),
        }
        for question, result in zip(questions, results, strict=True)
    ]


def evaluate_rows(
    name: str, generated: list[dict[str, Any]], config: dict[str, Any], scorer: Scoring
) -> list[dict[str, Any]]:
    """lm-eval's samples, in the order of the rows given."""
    dataset = datasets.Dataset.from_list(generated)
    task = ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **kwargs: {"test": dataset},
            "test_split": "test",
            "metadata": {"version": 1},
            **config,
        }
    )
    return lm_eval_samples(task, None, scorer)


def lm_eval_samples(
    task: ConfigurableTask, limit: int | None, scorer: Scoring, stock_bos: bool = False
) -> list[dict[str, Any]]:
    """Run a task through lm-eval; its samples in the order of its rows."""
    name = str(task.config.task)
    language_model = DejaVuLM(scorer, stock_bos)
    results = evaluate(language_model, {name: task}, limit=limit, bootstrap_iters=0, log_samples=True)
    return sorted(results["samples"][name], key=lambda sample: sample["doc_id"])


def token_perplexity(texts: Sequence[str], limit: int | None, scorer: Scoring) -> list[dict[str, Any]]:
    """Log-likelihood of each block; the first token of a block is its context."""
    loaded = scorer.loaded
    length = min(loaded.anatomy.context, MAX_BLOCK)
    (ids,) = encode_documents(["\n\n".join(texts)], loaded.tokenizer, loaded.anatomy.separator)
    blocks = [ids[start : start + length].tolist() for start in range(0, len(ids) - length + 1, length)][:limit]
    if not blocks:
        raise DataError(f"the text has {len(ids)} tokens, fewer than one block of {length}: use more text")
    scored = scorer.score([Request(block[:1], block[1:], window=True) for block in blocks])
    return [
        {
            "document": f"block-{number:05d}",
            "loglikelihood": result.loglikelihood,
            "tokens": len(block) - 1,
            "bytes": 0,
            "words": 0,
            "correct": np.nan,
        }
        for number, (block, result) in enumerate(zip(blocks, scored, strict=True))
    ]

"""Continuation choice: which of several pieces of text follows a context? Questions made from any held-out documents.

Needs no labelled data: the true answer is what the document says next, the others are continuations of other documents.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejavu.corpora.blocks import token_ids
from dejavu.corpora.documents import Document
from dejavu.errors import DataError

QUESTIONS_PER_DOCUMENT = 4  # so that a few very long documents do not make up the test


def continuation_questions(
    documents: Sequence[Document], tokenizer: Any, context_tokens: int, continuation_tokens: int, choices: int
) -> list[dict[str, Any]]:
    """Rows {id, document, context, choices, answer}, in an order that depends on their text only.

    Context and choices are cut at word boundaries where encoding them gives back exactly the tokens cut, so that every
    choice has `continuation_tokens` tokens. Raises DataError when fewer than `choices` documents have a window.
    """
    windows = [
        window
        for document in documents
        for window in _windows(document, tokenizer, context_tokens, continuation_tokens)
    ]
    windows.sort(key=lambda window: _rank(window["id"]))
    sources = {window["document"] for window in windows}
    if len(sources) < choices:
        raise DataError(
            f"only {len(sources)} documents are long enough for a question of {context_tokens} + {continuation_tokens} "
            f"tokens, and {choices} choices need as many: use more text or shorter windows"
        )
    return [_question(window, windows, choices) for window in windows]


def _windows(document: Document, tokenizer: Any, context_tokens: int, continuation_tokens: int) -> list[dict[str, Any]]:
    """Up to `QUESTIONS_PER_DOCUMENT` windows of one document that cut cleanly, from its start, not overlapping."""
    (ids,) = token_ids([document.text], tokenizer)
    found: list[dict[str, Any]] = []
    length, start = context_tokens + continuation_tokens, 0
    while start + length <= len(ids) and len(found) < QUESTIONS_PER_DOCUMENT:
        context_ids = ids[start : start + context_tokens]
        next_ids = ids[start + context_tokens : start + length]
        context, following = tokenizer.decode(context_ids), tokenizer.decode(next_ids)
        clean = following[:1] == " " and following[1:2].isalpha() and context[-1:].strip() != ""
        if (
            clean
            and _encodes(tokenizer, following, next_ids)
            and _encodes(tokenizer, context + following, context_ids + next_ids)
        ):
            number = f"{document.hash}-{start}"
            found.append({"id": number, "document": document.hash, "context": context, "following": following})
            start += length
        else:
            start += 1
    return found


def _encodes(tokenizer: Any, text: str, ids: list[int]) -> bool:
    return token_ids([text], tokenizer) == [ids]


def _question(window: dict[str, Any], windows: list[dict[str, Any]], choices: int) -> dict[str, Any]:
    """The true continuation among those of other documents, drawn and placed by the question's own id."""
    random = np.random.default_rng(_rank(window["id"]))
    wrong: list[str] = []
    for index in random.permutation(len(windows)):
        other = windows[index]
        if other["document"] != window["document"] and other["following"] not in (window["following"], *wrong):
            wrong.append(other["following"])
        if len(wrong) == choices - 1:
            break
    answer = int(random.integers(choices))
    texts = [*wrong[:answer], window["following"], *wrong[answer:]]
    return {
        "id": window["id"],
        "document": window["document"],
        "context": window["context"],
        "choices": texts,
        "answer": answer,
    }


def _rank(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

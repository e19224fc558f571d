"""From documents to token blocks: every document starts with one separator, none are glued without it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """The one thing needed of a transformers tokenizer here."""

    def __call__(self, text: list[str], *, add_special_tokens: bool, verbose: bool) -> dict[str, list[list[int]]]: ...


def encode_documents(texts: Sequence[str], tokenizer: Tokenizer, separator: int) -> list[np.ndarray]:
    """Token ids of each text, int32, `separator` first.

    The separator is put there by hand: tokenizers disagree on whether they add one.
    """
    return [np.array([separator, *ids], dtype=np.int32) for ids in token_ids(texts, tokenizer)]


def token_ids(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each text alone, without special tokens (`verbose` would warn of texts longer than the context)."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def pack(documents: Iterable[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Join encoded documents and cut them into blocks of `length`; the unfilled tail is dropped.

    Returns (tokens, document numbers), both int32 of shape (blocks, length).
    """
    documents = list(documents)
    if not documents:
        empty = np.zeros((0, length), dtype=np.int32)
        return empty, empty
    tokens = np.concatenate(documents)
    numbers = np.repeat(np.arange(len(documents), dtype=np.int32), [len(document) for document in documents])
    whole = len(tokens) // length * length
    return tokens[:whole].reshape(-1, length), numbers[:whole].reshape(-1, length)

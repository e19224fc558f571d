"""Documents: the unit of text that is split, hashed, tokenised and scored.

A document is identified by the sha256 of its whitespace-normalised text, so that two copies that differ only in
indentation are one document, on every machine and in every split. Only the standard library is imported here.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

SHINGLE_WORDS = 8  # long enough that a chance match is rare, short enough that a reworded ending does not hide a copy


@dataclass(frozen=True)
class Document:
    """One piece of text and where it came from (`origin` is for people, it enters no hash)."""

    text: str
    origin: str

    @cached_property
    def hash(self) -> str:
        """16 hex digits of sha256 over the whitespace-normalised text."""
        return text_hash(self.text)


def text_hash(text: str) -> str:
    """The identity of a text: 16 hex digits of sha256 over its words joined by single spaces."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def corpus_hash(documents: Iterable[Document]) -> str:
    """The identity of an ordered list of documents, written into every result that used them."""
    return hashlib.sha256("\n".join(document.hash for document in documents).encode()).hexdigest()[:16]


def unique(documents: Iterable[Document]) -> list[Document]:
    """One of each set of equal documents: the text of the first, at the place of the last (opt-tiny's text is so)."""
    return list({document.hash: document for document in reversed(list(documents))}.values())[::-1]


def split_by_hash(documents: Iterable[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """(train, held out): a document's side depends on its own text only, never on what else is in the corpus."""
    train: list[Document] = []
    test: list[Document] = []
    for document in documents:
        is_held_out = int(document.hash[:8], 16) < held_out * 2**32
        (test if is_held_out else train).append(document)
    return train, test


def shingles(text: str) -> set[int]:
    """Hashes of all runs of `SHINGLE_WORDS` words (the whole text where it is shorter), letter case ignored."""
    words = text.lower().split()
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    runs = (" ".join(words[start : start + SHINGLE_WORDS]) for start in starts)
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "big") for run in runs}


def without_near_duplicates(
    documents: Sequence[Document], of: Sequence[Document], share: float = 0.5
) -> list[Document]:
    """The documents of which less than `share` of the shingles occur anywhere in `of`."""
    known: set[int] = set()
    for document in of:
        known |= shingles(document.text)
    kept = []
    for document in documents:
        own = shingles(document.text)
        if len(own & known) < share * len(own):
            kept.append(document)
    return kept

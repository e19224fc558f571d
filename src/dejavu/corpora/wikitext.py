"""WikiText: articles cut out of the raw files, and the way back from their tokenised form to ordinary text.

The files hold one paragraph a line, each line with a space at both ends; an article starts at a ` = Title = ` line
(more equal signs are headings inside it).
"""

import re
from collections.abc import Iterator

from dejavu.corpora.documents import Document

TITLE = re.compile(r" = [^=](.*[^=])? = ")
UNKNOWN = "_"  # what stands for <unk> in detokenised text: an ordinary character, so that no special id is ever learnt

_DETOKENISE = [
    (re.compile(r" @([-.,])@ "), r"\1"),  # "5 @.@ 2", "well @-@ known"
    (re.compile(r" ([.,:;?!%)\]}])"), r"\1"),
    (re.compile(r"([(\[{$£€]) "), r"\1"),
    (re.compile(r" (['’]) ?(s|t|m|d|re|ve|ll)\b"), r"\1\2"),
    (re.compile(r" n't\b"), "n't"),
    (re.compile(r"\b(s) ' "), r"\1' "),
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),
    (re.compile(r"(^|\s)' ([^'\n]*) '(?=[\s.,;:!?]|$)", re.MULTILINE), r"\1'\2'"),
    (re.compile(r"(\d) – (\d)"), r"\1–\2"),
    (re.compile(r"^ +| +$", re.MULTILINE), ""),
]


def articles(text: str, origin: str) -> Iterator[Document]:
    """The articles of one WikiText file, in order and untouched; blank text before the first title is dropped."""
    lines: list[str] = []
    number = 0
    for line in text.splitlines(keepends=True):
        if TITLE.fullmatch(line.rstrip("\n")) and any(part.strip() for part in lines):
            yield Document("".join(lines), f"{origin}:{number}")
            lines, number = [], number + 1
        lines.append(line)
    if any(part.strip() for part in lines):
        yield Document("".join(lines), f"{origin}:{number}")


def detokenise(text: str) -> str:
    """Ordinary English spacing from WikiText's (` @-@ `, spaces before punctuation), `<unk>` as `UNKNOWN`."""
    text = text.replace("<unk>", UNKNOWN)
    for pattern, replacement in _DETOKENISE:
        text = pattern.sub(replacement, text)
    return re.sub(r"\n{3,}", "\n\n", text)

"""Rows of lm-eval's own tasks, from local files into the form that each task expects, and what identifies a row.

The files keep the form in which their authors published them; lm-eval's tasks read the hub's. Only what differs is
changed: labels that the hub counts, names of keys, WikiText's pages.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dejavu.corpora.available import BENCHMARKS, source_file
from dejavu.corpora.documents import Document
from dejavu.corpora.sources import extract, json_rows, question_text, read
from dejavu.corpora.wikitext import articles
from dejavu.errors import DataError

CB_LABELS = ("entailment", "contradiction", "neutral")
RTE_LABELS = ("entailment", "not_entailment")


def benchmark_rows(name: str, data_root: Path) -> list[dict[str, Any]]:
    """All rows of a task's split below data_root, in the file's order and the hub's form.

    Raises DataError for a file that is missing, empty or has another form.
    """
    source = BENCHMARKS[name]
    (split,) = source.files
    path = source_file(f"task {name}", source, split, data_root)
    if name == "wikitext":
        rows = [{"page": page.text} for page in articles(read(path), "wikitext/test")]
    else:
        rows = [extract(FORMS[name], row, place) for place, row in json_rows(path)]
    if not rows:
        raise DataError(f"task {name}: {path} has no rows: fetch the file again")
    return rows


def row_document(name: str, row: dict[str, Any], number: int) -> Document:
    """What identifies a row: the same text as the corpus of that name has, so that training on it is found out."""
    text_of: dict[str, Callable[[Any], str]] = {
        "openbookqa": question_text,
        "wikitext": lambda row: str(row["page"]),
        "c4": lambda row: str(row["text"]),
    }
    text = text_of[name](row) if name in text_of else json.dumps(row, sort_keys=True, default=str)
    return Document(text, f"{name}:{number}")


def only(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The row's values of these keys. Raises KeyError for one that it lacks."""
    return {key: row[key] for key in keys}


def winogrande(row: dict[str, Any]) -> dict[str, Any]:
    """The answer is the text "1" or "2"; a number would find no option."""
    if row["answer"] not in ("1", "2"):
        raise ValueError(f'answer must be the text "1" or "2", found {row["answer"]!r}')
    return only(row, "sentence", "option1", "option2", "answer")


def openbookqa(row: dict[str, Any]) -> dict[str, Any]:
    """The question flat instead of nested."""
    question_text(row)  # refuses a question without its answer
    choices = row["question"]["choices"]
    texts, labels = [choice["text"] for choice in choices], [choice["label"] for choice in choices]
    flat = {"question_stem": row["question"]["stem"], "choices": {"text": texts, "label": labels}}
    return {"id": row["id"]} | flat | {"answerKey": row["answerKey"]}


def rte(row: dict[str, Any]) -> dict[str, Any]:
    """GLUE's names of the two sentences; the label as its number."""
    label = RTE_LABELS.index(row["label"])
    return {"sentence1": row["premise"], "sentence2": row["hypothesis"], "label": label, "idx": row["idx"]}


def cb(row: dict[str, Any]) -> dict[str, Any]:
    """The label as its number."""
    return only(row, "premise", "hypothesis", "idx") | {"label": CB_LABELS.index(row["label"])}


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "winogrande": winogrande,
    "openbookqa": openbookqa,
    "c4": lambda row: only(row, "text"),
    "piqa": lambda row: only(row, "goal", "sol1", "sol2", "label"),
    "copa": lambda row: only(row, "premise", "choice1", "choice2", "question", "label", "idx"),
    "cb": cb,
    "rte": rte,
    "lambada_openai": lambda row: only(row, "text"),
}

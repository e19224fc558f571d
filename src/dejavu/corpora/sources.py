"""One entry for all corpora: a name and a split give documents, from local files or from the hub.

With data_root set only its files are read; without it only the hub is. Where what lies: `available`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dejavu.corpora.available import LAYOUT, SOURCES, check_available, local_file
from dejavu.corpora.documents import Document, unique, without_near_duplicates
from dejavu.corpora.kept import kept_pydocs
from dejavu.corpora.pydocs import dependency_docstrings
from dejavu.corpora.wikitext import UNKNOWN, articles, detokenise
from dejavu.errors import DataError
from dejavu.schema import Corpus

C4_DOCUMENTS, C4_SEED, C4_BUFFER = 501, 42, 10_000  # the sample that Deja Vu's authors draw
Form = TypeVar("Form")
Row = tuple[str, Any]  # where it stands, for messages, and what it holds


def documents(
    name: str, split: str, data_root: Path | None, corpus: Corpus, packages: Sequence[str] = ()
) -> list[Document]:
    """The documents of one split ("train", "validation", "test"), read once per process.

    - pydocs has train and test, opt-tiny-text only train; C4 has no test split, so its test is its validation.
    - `corpus` names the hub's repository where it is the corpus asked for; else the usual one is taken.
    - `packages` are those whose docstrings go into opt-tiny-text; other corpora ignore them.
    Raises DataError for text that is missing, malformed or empty, and for a split that the corpus does not have.
    """
    own = corpus if corpus.name == name else Corpus(name=name)
    names = tuple(packages) if name == "opt-tiny-text" else ()
    return list(load(name, split, data_root, own.hub, own.hub_config, names))


def rows(name: str, split: str, data_root: Path | None, corpus: Corpus) -> list[str]:
    """The raw rows that token perplexity joins: WikiText's lines as the hub has them, elsewhere whole documents."""
    texts = [document.text for document in documents(name, split, data_root, corpus)]
    return lines_to_rows("".join(texts)) if name == "wikitext" else texts


@cache
def load(
    name: str, split: str, data_root: Path | None, hub: str | None, hub_config: str | None, packages: tuple[str, ...]
) -> tuple[Document, ...]:
    """`documents` with arguments that can be hashed."""
    check_available(name, split, data_root, hub)
    if name == "pydocs":
        found = tuple(cached_pydocs()[split])
    elif name == "mixture":
        found = mixture(split, data_root)
    elif name == "opt-tiny-text":
        found = opt_tiny_text(data_root, packages)
    else:
        reader = wikitext if name == "wikitext" else json_corpus
        usual = SOURCES[name]
        hub, hub_config = (hub, hub_config) if hub else (usual.hub, usual.hub_config)
        found = tuple(reader(name, split, data_root, hub, hub_config))
        if (name, split) == ("openbookqa", "train"):
            found = not_held_out(found, data_root, hub, hub_config)
    if not found:
        place = "this Python's standard library" if name == "pydocs" else data_root or hub
        raise DataError(f"corpus {name}, split {split}, has no documents in {place}: get the data again ({LAYOUT})")
    return found


@cache
def cached_pydocs() -> dict[str, list[Document]]:
    """`pydocs`, which parses the whole standard library, once."""
    return kept_pydocs()


def mixture(split: str, data_root: Path | None) -> tuple[Document, ...]:
    """OpenBookQA and WikiText of the same split, interleaved: ordered by document hash."""
    parts = (load(part, split, data_root, None, None, ()) for part in ("openbookqa", "wikitext"))
    return tuple(sorted((document for part in parts for document in part), key=lambda document: document.hash))


def not_held_out(
    train: tuple[Document, ...], data_root: Path | None, hub: str, hub_config: str | None
) -> tuple[Document, ...]:
    """OpenBookQA's train split without questions that a held-out one has too (26): scoring them is refused."""
    for split in ("validation", "test"):
        files = SOURCES["openbookqa"].files[split]
        if data_root is None or any((data_root / file).is_file() for file in files):
            train = without(train, load("openbookqa", split, data_root, hub, hub_config, ()))
    return train


def without(given: Iterable[Document], others: Iterable[Document]) -> tuple[Document, ...]:
    """The documents that are not among the others."""
    hashes = {document.hash for document in others}
    return tuple(document for document in given if document.hash not in hashes)


def opt_tiny_text(data_root: Path | None, packages: tuple[str, ...]) -> tuple[Document, ...]:
    """What opt-tiny is trained on. Neither held-out documentation nor near copies of it are in the added parts."""
    train, test = cached_pydocs()["train"], cached_pydocs()["test"]
    dependencies = without_near_duplicates(unique(dependency_docstrings(packages)), of=test)
    raw = load("wikitext", "train", data_root, None, None, ())
    encyclopaedia = [Document(detokenise(document.text), document.origin) for document in raw]
    return without(unique([*train, *dependencies, *encyclopaedia]), test)


def wikitext(name: str, split: str, data_root: Path | None, hub: str, hub_config: str | None) -> Iterator[Document]:
    """Raw articles. Of the train split a tokenised file may be all there is: `<unk>` in it becomes `UNKNOWN`."""
    if data_root is None:
        lines = (extract(wikitext_line, row, place) for place, row in hub_rows(name, split, hub, hub_config))
        return articles(rows_to_text(lines), f"{name}/{split}")
    path = local_file(name, split, data_root)
    if path.suffix == ".txt":
        return articles(read(path).replace("<unk>", UNKNOWN), f"{name}/{split} (tokenised {path.name})")
    return articles(read(path), f"{name}/{split}")


def lines_to_rows(text: str) -> list[str]:
    """The hub's form of a WikiText file: each line with its newline, a blank line (one space in the file) as ""."""
    return [f"{line}\n" if line.strip() else "" for line in text.removesuffix("\n").split("\n")]


def rows_to_text(lines: Iterable[str]) -> str:
    """The file that the hub's rows were made from."""
    return "".join(line if line.strip() else " \n" for line in lines)


def json_corpus(name: str, split: str, data_root: Path | None, hub: str, hub_config: str | None) -> Iterator[Document]:
    """C4 and OpenBookQA: one document a row."""
    text_of: dict[str, Callable[[Any], str]] = {"c4": web_text, "openbookqa": question_text}
    found: Iterable[Row]
    if data_root is None:
        found = hub_rows(name, split, hub, hub_config)
    else:
        found = json_rows(local_file(name, split, data_root))
    for number, (place, row) in enumerate(found):
        yield Document(extract(text_of[name], row, place), f"{name}/{split}:{number}")


def extract(form_of: Callable[[Any], Form], row: Any, place: str) -> Form:
    """What `form_of` makes of a row, such as its text. Raises DataError that names the place of a malformed one."""
    try:
        return form_of(row)
    except KeyError as error:
        raise DataError(f"{place} lacks the key {error}: the right form is in docs/data.md") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{place} has the wrong form ({error}): the right one is in docs/data.md") from error


def wikitext_line(row: Any) -> str:
    """The text of a WikiText row on the hub."""
    return string(row["text"], blank=True)


def web_text(row: Any) -> str:
    """The text of a C4 row."""
    return string(row["text"])


def question_text(row: Any) -> str:
    """An OpenBookQA question and its right answer, from the file's nested form or the hub's flat one."""
    if "question_stem" in row:
        stem, texts, labels = row["question_stem"], row["choices"]["text"], row["choices"]["label"]
    else:
        stem, choices = row["question"]["stem"], row["question"]["choices"]
        texts, labels = [choice["text"] for choice in choices], [choice["label"] for choice in choices]
    answer = dict(zip(labels, texts, strict=True)).get(row["answerKey"])
    if answer is None:
        raise ValueError(f"no choice is labelled {row['answerKey']!r}")
    return f"{string(stem)} {string(answer)}"


def string(value: Any, blank: bool = False) -> str:
    """The value if it is text. Raises TypeError or ValueError, which the caller gives a place."""
    if not isinstance(value, str):
        raise TypeError(f"text expected, found {value!r}")
    if not blank and not value.strip():
        raise ValueError("an empty text")
    return value


def json_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSON Lines file. Raises DataError that names the line."""
    text = read(path).rstrip()
    for number, line in enumerate(text.split("\n") if text else (), start=1):  # splitlines() would cut inside strings
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place} is not JSON ({error}): repair it or fetch the file again") from error
        yield place, row


def read(path: Path) -> str:
    """The text of a file. Raises DataError where it cannot be read as UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}): fetch the file again") from error


def hub_rows(name: str, split: str, hub: str, hub_config: str | None) -> list[Row]:
    """The rows of one split on the hub; of C4 only the sample. Raises DataError for whatever its client raises."""
    import datasets  # two seconds, and not needed for local files

    try:
        if name == "c4":
            part = "validation" if split == "test" else split
            stream = datasets.load_dataset(hub, hub_config, split=part, streaming=True)
            found = list(stream.shuffle(seed=C4_SEED, buffer_size=C4_BUFFER).take(C4_DOCUMENTS))
        else:
            found = list(datasets.load_dataset(hub, hub_config, split=split))
    except Exception as error:  # the client has a dozen types for what is one thing here
        raise DataError(
            f"{hub} ({hub_config}), split {split}, could not be read from the hub ({type(error).__name__}: {error}); "
            f"set data_root=DIR to use local files ({LAYOUT})"
        ) from error
    return [(f"{hub}, split {split}, row {number}", row) for number, row in enumerate(found)]

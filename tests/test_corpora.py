"""Corpora: the same text from files and hub, documents that split, hash and pack alike everywhere, errors that help."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dejavu.corpora import kept, sources
from dejavu.corpora.available import SOURCES, SPLITS, check_available, in_cache
from dejavu.corpora.blocks import encode_documents, pack
from dejavu.corpora.documents import (
    Document,
    corpus_hash,
    shingles,
    split_by_hash,
    text_hash,
    unique,
    without_near_duplicates,
)
from dejavu.corpora.pydocs import python_files, python_version
from dejavu.corpora.wikitext import articles, detokenise
from dejavu.errors import DataError
from dejavu.models import EMBEDDED
from dejavu.schema import CORPORA, Corpus

ROOT = Path(__file__).parents[1]
SEPARATOR = 2
patient = settings(deadline=None)  # a busy machine is not a failure
WIKITEXT = (
    " \n = First Ship = \n \n It was 5 @.@ 2 m long . \n \n = = Design = = \n \n The <unk> sank . \n"
    " = = = Hull = = = \n Oak . \n \n = Second = \n \n A pair = two . \n \n = Third = \n \n The end . \n \n"
)
WEB = ["One page\nwith two lines.", "Another page, with a \u2028 separator inside."]
QUESTIONS = [
    ("The sun is", ["a star", "a fish", "a shoe", "a song"], "A"),
    ("Ice is", ["hot", "cold", "wet", "d"], "B"),
]
TRAIN_QUESTION = ("A cat is", ["a fish", "a star", "a pet", "a shoe"], "C")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def file_question(stem: str, texts: list[str], answer: str) -> dict[str, Any]:
    choices = [{"text": text, "label": label} for text, label in zip(texts, "ABCD", strict=True)]
    return {"id": "1", "question": {"stem": stem, "choices": choices}, "answerKey": answer}


def hub_question(stem: str, texts: list[str], answer: str) -> dict[str, Any]:
    return {"question_stem": stem, "choices": {"text": texts, "label": list("ABCD")}, "answerKey": answer}


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    """A data_root of a few rows that holds every corpus."""
    (tmp_path / "wikitext2").mkdir()
    for name in ("train.txt", "wiki.valid.raw", "wiki.test.raw"):
        (tmp_path / "wikitext2" / name).write_text(WIKITEXT, "utf-8")
    for name in ("train", "valid"):
        write_rows(tmp_path / f"c4/c4_{name}.jsonl", [{"id": f"c4-{name}-0", "text": text} for text in WEB])
    for name in ("dev", "test"):
        write_rows(tmp_path / f"openbookqa/{name}.jsonl", [file_question(*question) for question in QUESTIONS])
    train = [TRAIN_QUESTION, QUESTIONS[0]]  # the second is held out, too
    write_rows(tmp_path / "openbookqa/train.jsonl", [file_question(*question) for question in train])
    return tmp_path


@pytest.fixture(autouse=True)
def without_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Offline, with an empty cache and nothing remembered from another test's hub."""
    for variable in ("HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield
    sources.load.cache_clear()


@pytest.fixture
def with_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], list[tuple[Any, ...]]]:
    """`with_hub(rows)`: a hub that can be reached and serves these rows; returns the list of what is asked of it."""
    import datasets

    asked: list[tuple[Any, ...]] = []

    def serve(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        def load_dataset(path: str, name: str, split: str, streaming: bool = False) -> Any:
            asked.append((path, name, split, streaming))
            data = datasets.Dataset.from_list(rows)
            return data.to_iterable_dataset() if streaming else data

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: socket.socket())
    return serve


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no route")


def read(name: str, split: str, data_root: Path | None) -> list[str]:
    return [document.text for document in sources.documents(name, split, data_root, Corpus(name=name))]


# The corpora from local files


def test_tables_agree_with_schema_and_configs() -> None:
    assert set(SPLITS) == set(CORPORA)
    for name, source in SOURCES.items():
        config = OmegaConf.load(ROOT / f"conf/corpus/{name}.yaml")
        assert (config.hub, config.hub_config) == (source.hub, source.hub_config)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_wikitext_is_cut_at_titles_only_and_joins_back_to_the_file(small_root: Path, split: str) -> None:
    texts = read("wikitext", split, small_root)
    assert len(texts) == 3
    assert "".join(texts) == WIKITEXT
    assert [document.text for document in articles(WIKITEXT, "")] == texts
    assert texts[1].startswith(" = Second = \n")


def test_wikitext_train_prefers_the_raw_file_and_says_where_the_other_was_used(small_root: Path) -> None:
    tokenised = sources.documents("wikitext", "train", small_root, Corpus(name="wikitext"))
    assert "".join(document.text for document in tokenised) == WIKITEXT.replace("<unk>", "_")
    assert "tokenised train.txt" in tokenised[0].origin
    sources.load.cache_clear()
    (small_root / "wikitext2/wiki.train.raw").write_text(WIKITEXT, "utf-8")
    raw = sources.documents("wikitext", "train", small_root, Corpus(name="wikitext"))
    assert "".join(document.text for document in raw) == WIKITEXT
    assert "tokenised" not in raw[0].origin


def test_rows_have_the_hubs_form(small_root: Path) -> None:
    rows = sources.rows("wikitext", "test", small_root, Corpus(name="wikitext"))
    assert rows[:4] == ["", " = First Ship = \n", "", " It was 5 @.@ 2 m long . \n"]
    assert len(rows) == WIKITEXT.count("\n")
    assert sources.rows_to_text(rows) == WIKITEXT
    assert sources.rows("c4", "validation", small_root, Corpus(name="c4")) == WEB


def test_c4_openbookqa_and_mixture(small_root: Path) -> None:
    assert read("c4", "train", small_root) == read("c4", "test", small_root) == WEB
    questions = read("openbookqa", "validation", small_root)
    assert questions == ["The sun is a star", "Ice is cold"]
    assert read("openbookqa", "train", small_root) == ["A cat is a pet"], "what is held out, too, is left out"
    mixed = read("mixture", "validation", small_root)
    assert sorted(mixed) == sorted(questions + read("wikitext", "validation", small_root))
    assert mixed == sorted(mixed, key=text_hash)


def test_opt_tiny_text_has_its_parts_in_order_and_nothing_held_out(
    small_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = Document("held out " + " ".join(map(str, range(40))), "")
    train = [Document("train one", ""), Document("train two", "")]
    near_copy = Document(held_out.text + " almost", "")
    monkeypatch.setattr(sources, "cached_pydocs", lambda: {"train": train, "test": [held_out]})
    monkeypatch.setattr(sources, "dependency_docstrings", lambda _: [Document("dependency", ""), near_copy])
    found = sources.documents("opt-tiny-text", "train", small_root, Corpus(), packages=["anything"])
    assert [document.text for document in found[:3]] == ["train one", "train two", "dependency"]
    assert [document.text.split("\n")[0] for document in found[3:]] == ["", "= Second =", "= Third ="]
    assert "It was 5.2 m long.\n" in found[3].text
    assert "The _ sank.\n" in found[3].text


def test_a_callers_changes_do_not_reach_the_cache(small_root: Path) -> None:
    sources.documents("c4", "train", small_root, Corpus(name="c4")).clear()
    assert len(read("c4", "train", small_root)) == 2


# The corpora from the hub


def test_wikitext_from_the_hub_equals_the_file(small_root: Path, with_hub: Callable) -> None:
    asked = with_hub([{"text": row} for row in sources.lines_to_rows(WIKITEXT)])
    local = sources.documents("wikitext", "test", small_root, Corpus(name="wikitext"))
    assert sources.documents("wikitext", "test", None, Corpus(name="pydocs")) == local
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test", False)]


def test_c4_from_the_hub_is_the_streamed_sample(small_root: Path, with_hub: Callable) -> None:
    asked = with_hub([{"text": text, "url": ""} for text in WEB])
    found = sources.documents("c4", "test", None, Corpus(name="c4", hub="mine/c4", hub_config="small"))
    assert sorted(document.text for document in found) == sorted(WEB)
    assert asked == [("mine/c4", "small", "validation", True)]
    with_hub([{"text": f"page {number}"} for number in range(600)])
    pages = read("c4", "train", None)
    assert len(pages) == len(set(pages)) == 501
    assert pages != sorted(pages, key=lambda page: int(page.split()[1]))


def test_openbookqa_from_the_hub_equals_the_file(small_root: Path, with_hub: Callable) -> None:
    with_hub([hub_question(*question) for question in QUESTIONS])
    local = sources.documents("openbookqa", "test", small_root, Corpus(name="openbookqa"))
    assert sources.documents("openbookqa", "test", None, Corpus(name="openbookqa")) == local


def test_what_the_hubs_client_raises_becomes_one_sentence(monkeypatch: pytest.MonkeyPatch, with_hub: Callable) -> None:
    with_hub([{"txt": "renamed"}])
    with pytest.raises(DataError, match=r"allenai/c4, split train, row 0 lacks the key 'text'"):
        read("c4", "train", None)
    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(DataError, match=r"allenai/openbookqa \(main\), split test.*OSError: no route.*data_root=DIR"):
        read("openbookqa", "test", None)


# What is missing or malformed


@pytest.mark.parametrize("name", ["wikitext", "c4", "openbookqa", "mixture"])
@pytest.mark.parametrize("offline", [True, False])
def test_no_files_and_no_hub(name: str, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not offline:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid:81")
        monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(DataError) as caught:
        read(name, "test", None)
    message = str(caught.value)
    part = "openbookqa" if name == "mixture" else name
    for words in (part, SOURCES[part].files["test"][0], "data_root=DIR", "docs/data.md", "connect to the hub"):
        assert words in message
    assert ("HF_HUB_OFFLINE=1" if offline else "hub.invalid:81 cannot be reached (no route)") in message


def test_opt_tiny_text_needs_local_files() -> None:
    with pytest.raises(DataError, match=r"data_root=DIR with wikitext2/wiki.train.raw or wikitext2/train.txt"):
        check_available("opt-tiny-text", "train", None, None)


@pytest.mark.parametrize("name", ["wikitext", "c4", "openbookqa", "mixture", "opt-tiny-text"])
def test_a_missing_file_is_named_even_where_the_hub_could_be_reached(
    name: str, tmp_path: Path, with_hub: Callable
) -> None:
    part = {"mixture": "openbookqa", "opt-tiny-text": "wikitext"}.get(name, name)
    with pytest.raises(DataError) as caught:
        read(name, "train", tmp_path)
    assert str(tmp_path / SOURCES[part].files["train"][-1]) in str(caught.value)
    assert "docs/data.md" in str(caught.value)


def test_unknown_names_and_splits() -> None:
    with pytest.raises(DataError, match="no split validation: choose one of train, test"):
        read("pydocs", "validation", None)
    with pytest.raises(DataError, match="corpus bookcorpus is not known"):
        read("bookcorpus", "train", None)


def test_a_dataset_in_the_cache_needs_no_connection(tmp_path: Path) -> None:
    assert not in_cache("Salesforce/wikitext")
    (tmp_path / "hf/datasets/Salesforce___wikitext").mkdir(parents=True)
    check_available("wikitext", "test", None, None)


def test_the_check_reaches_a_real_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        check_available("c4", "train", None, None)
    with pytest.raises(DataError, match="cannot be reached"):
        check_available("c4", "train", None, None)


def test_the_check_imports_nothing_heavy() -> None:
    heavy = ("torch", "datasets", "transformers", "numpy", "omegaconf", "huggingface_hub")
    code = f"import sys, dejavu.corpora.available; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("c4", '{"text": "cut', "is not JSON"),
        ("c4", '{"id": "x"}', "lacks the key 'text'"),
        ("c4", '{"text": 3}', "text expected, found 3"),
        ("c4", '{"text": " "}', "an empty text"),
        ("c4", "7", "has the wrong form"),
        ("openbookqa", '{"question": {"stem": "a", "choices": []}, "answerKey": "E"}', "no choice is labelled 'E'"),
        ("openbookqa", '{"question": {"stem": "a", "choices": []}}', "lacks the key 'answerKey'"),
    ],
)
def test_a_malformed_line_is_named(name: str, line: str, reason: str, small_root: Path) -> None:
    path = small_root / SOURCES[name].files["train"][0]
    path.write_text(path.read_text("utf-8") + line + "\n", "utf-8")
    with pytest.raises(DataError) as caught:
        read(name, "train", small_root)
    assert f"{path}, line 3" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["wikitext", "c4", "openbookqa"])
def test_empty_and_undecodable_files(name: str, small_root: Path) -> None:
    path = small_root / SOURCES[name].files["test"][0]
    path.write_text("\n", "utf-8")
    with pytest.raises(DataError, match=f"corpus {name}, split test, has no documents"):
        read(name, "test", small_root)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        read(name, "test", small_root)


# Documents


@patient
@given(st.lists(st.text("abc.", min_size=1), min_size=1), st.text(" \t\n", min_size=1))
def test_hashes_ignore_the_kind_of_whitespace(words: list[str], space: str) -> None:
    assert text_hash(space + space.join(words) + space) == text_hash(" ".join(words))
    assert Document(space.join(words), "here").hash == text_hash(" ".join(words))


def test_hashes_are_the_same_everywhere() -> None:
    assert text_hash("a  b\n") == "c8687a08aa5d6ed2"  # sha256("a b")
    assert text_hash("ab") != text_hash("a b")
    assert corpus_hash([Document("a", ""), Document("b", "")]) != corpus_hash([Document("b", ""), Document("a", "")])


def test_a_documents_side_depends_on_itself_only() -> None:
    documents = [Document(f"text {number}", "") for number in range(2000)]
    train, test = split_by_hash(documents, 0.2)
    assert 300 < len(test) < 500
    assert split_by_hash(reversed(documents), 0.2) == (train[::-1], test[::-1])
    assert all(split_by_hash([document], 0.2) == ([], [document]) for document in test)
    assert set(test) < set(split_by_hash(documents, 0.3)[1])


def test_unique_keeps_the_first_of_equal_documents_and_the_order_of_others() -> None:
    documents = [Document("b", "1"), Document("a", "2"), Document(" b ", "3"), Document("c", "4"), Document("a", "5")]
    assert {document.origin for document in unique(documents)} == {"1", "2", "4"}
    distinct = [Document(letter, "") for letter in "zyabx"]
    assert unique(distinct) == distinct


def test_near_duplicates_are_dropped_from_half_of_the_shingles_on() -> None:
    words = [f"w{number}" for number in range(40)]
    known = [Document(" ".join(words), "")]
    copied = Document(" ".join(["New", *words[:30]]).upper(), "")
    quoting = Document(" ".join(f"own{number}" for number in range(40)) + " " + " ".join(words[:20]), "")
    assert without_near_duplicates([copied, quoting, Document("w0 w1", "")], known) == [quoting, Document("w0 w1", "")]


@pytest.mark.parametrize(
    ("tokenised", "ordinary"),
    [
        (" It was 5 @.@ 2 m , 1 @,@ 000 kg \n", "It was 5.2 m, 1,000 kg\n"),
        (" a well @-@ known ( 24 in ) one ; two : three \n", "a well-known (24 in) one; two: three\n"),
        (" Teddy 's Story did n't end . \n", "Teddy's Story didn't end.\n"),
        (' a role as " Craig " in it \n', 'a role as "Craig" in it\n'),
        (" the <unk> of 1990 – 1995 \n", "the _ of 1990–1995\n"),
        (" = Title = \n \n \n Text . \n", "= Title =\n\nText.\n"),
    ],
)
def test_detokenise(tokenised: str, ordinary: str) -> None:
    assert detokenise(tokenised) == ordinary


@pytest.fixture(scope="module")
def pydocs() -> dict[str, list[Document]]:
    return {split: sources.documents("pydocs", split, None, Corpus()) for split in ("train", "test")}


def test_pydocs_has_held_out_text_that_training_does_not_repeat(pydocs: dict[str, list[Document]]) -> None:
    train, test = pydocs["train"], pydocs["test"]
    assert len(train) > 1000
    assert len(test) > 200
    assert len({document.hash for document in train + test}) == len(train + test)
    known = set().union(*(shingles(document.text) for document in train))
    for document in test:
        own = shingles(document.text)
        assert len(own & known) < 0.5 * len(own), document.origin


def test_pydocs_is_kept_and_made_anew_when_anything_it_follows_from_changes(tmp_path, monkeypatch) -> None:
    made = []

    def parse() -> dict[str, list[Document]]:
        made.append(1)
        return {"train": [Document("one text\n  of two lines", "a:b")], "test": [Document("two", "c:d")]}

    library = tmp_path / "library"
    library.mkdir()
    (library / "module.py").write_text("x = 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dejavu.corpora.pydocs.pydocs", parse)
    monkeypatch.setattr("dejavu.corpora.pydocs.stdlib", lambda: library)
    first = kept.kept_pydocs()
    assert kept.kept_pydocs() == first == parse() and len(made) == 2, "the second time it is read"
    (library / "module.py").write_text("x = 12")
    kept.kept_pydocs()
    assert len(made) == 3, "another library"
    for path in kept.folder().iterdir():
        path.write_text("{}")
    assert kept.kept_pydocs() == first and len(made) == 4, "what cannot be read is made anew"
    monkeypatch.setenv("XDG_CACHE_HOME", str(library / "module.py"))
    assert kept.kept_pydocs() == first, "nor does it need a disk that can be written"


def test_python_files_are_those_of_the_package_alone(tmp_path) -> None:
    for name in ("b.py", "a/c.py", "tests/d.py", "a/site-packages/e.py", "a/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    assert [str(path.relative_to(tmp_path)) for path in python_files(tmp_path)] == ["a/c.py", "b.py"]


# Blocks

token_lists = st.lists(st.lists(st.integers(3, 99), max_size=9), max_size=9)


def encode(lists: list[list[int]]) -> list[np.ndarray]:
    def tokenizer(text: list[str], *, add_special_tokens: bool, verbose: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[int(word) for word in one.split()] for one in text]}

    return encode_documents([" ".join(map(str, tokens)) for tokens in lists], tokenizer, SEPARATOR)


@patient
@given(token_lists, st.integers(1, 12))
def test_pack_keeps_every_token_in_order_up_to_the_tail(lists: list[list[int]], length: int) -> None:
    joined = [token for tokens in lists for token in (SEPARATOR, *tokens)]
    owners = [number for number, tokens in enumerate(lists) for _ in range(len(tokens) + 1)]
    tokens, numbers = pack(encode(lists), length)
    assert tokens.dtype == numbers.dtype == np.int32
    assert tokens.shape == numbers.shape == (len(joined) // length, length)
    assert tokens.ravel().tolist() == joined[: tokens.size]
    assert numbers.ravel().tolist() == owners[: tokens.size]


@patient
@given(token_lists, st.integers(1, 12))
def test_every_change_of_document_is_at_a_separator(lists: list[list[int]], length: int) -> None:
    tokens, numbers = (array.ravel() for array in pack(encode(lists), length))
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    assert np.flatnonzero(tokens == SEPARATOR).tolist() == starts.tolist()


# The real data


@pytest.mark.data
def test_sizes_of_the_real_data(data_root: Path) -> None:
    texts = read("wikitext", "test", data_root)
    assert len(texts) == 62
    assert "".join(texts) == (data_root / "wikitext2/wiki.test.raw").read_text("utf-8")
    assert len(sources.rows("wikitext", "test", data_root, Corpus(name="wikitext"))) == 4358
    assert len(read("c4", "train", data_root)) == len(read("c4", "validation", data_root)) == 501
    assert len(read("openbookqa", "train", data_root)) == 4931  # 26 of 4,957 are held out, too


@pytest.mark.data
def test_the_real_wikitext_in_the_hubs_form_gives_the_same_articles(data_root: Path, with_hub: Callable) -> None:
    text = (data_root / "wikitext2/wiki.test.raw").read_text("utf-8")
    with_hub([{"text": "" if line == " \n" else line} for line in text.splitlines(keepends=True)])
    assert read("wikitext", "test", None) == read("wikitext", "test", data_root)


@pytest.mark.data
def test_opt_tiny_was_trained_on_this_text(data_root: Path) -> None:
    packages = OmegaConf.load(ROOT / "conf/pretrain.yaml").pretrain.packages
    lock = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    names = [packages_distributions()[package][0] for package in packages]
    if python_version() != "3.11.7" or any(version(name) != lock[name] for name in names):
        pytest.skip("other versions of Python or of the locked packages carry other documentation")
    found = sources.documents("opt-tiny-text", "train", data_root, Corpus(), packages=packages)
    assert corpus_hash(found) in (EMBEDDED / "opt-tiny" / "README.md").read_text(), "the card names the text"

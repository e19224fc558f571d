"""Where the text of each corpus lies, and a check that it is there before anything heavy is imported or computed.

Only the standard library is imported, so that a command can refuse in a second what would fail after ten. The tables
below are the one place for file names and hub repositories; `sources` reads by them.
"""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dejavu.errors import DataError

LAYOUT = "layout: docs/data.md"
DEFAULT_ENDPOINT = "https://huggingface.co"
CONNECT_SECONDS = 3.0
TRUE = {"1", "ON", "YES", "TRUE"}  # what the hub's own clients take for true


@dataclass(frozen=True)
class Source:
    """One data set: files under data_root by split (the first that exists is read), and where the hub has it."""

    files: dict[str, tuple[str, ...]]
    hub: str
    hub_config: str


SOURCES = {
    "wikitext": Source(
        files={
            "train": ("wikitext2/wiki.train.raw", "wikitext2/train.txt"),
            "validation": ("wikitext2/wiki.valid.raw",),
            "test": ("wikitext2/wiki.test.raw",),
        },
        hub="Salesforce/wikitext",
        hub_config="wikitext-2-raw-v1",
    ),
    "c4": Source(
        files={
            "train": ("c4/c4_train.jsonl",),
            "validation": ("c4/c4_valid.jsonl",),
            "test": ("c4/c4_valid.jsonl",),  # C4 has no test split
        },
        hub="allenai/c4",
        hub_config="en",
    ),
    "openbookqa": Source(
        files={
            "train": ("openbookqa/train.jsonl",),
            "validation": ("openbookqa/dev.jsonl",),
            "test": ("openbookqa/test.jsonl",),
        },
        hub="allenai/openbookqa",
        hub_config="main",
    ),
}

# What lm-eval's own tasks score, by the task's name: one split each, the hub's repositories as lm-eval 0.4.13 has them.
BENCHMARKS = {
    "winogrande": Source({"validation": ("winogrande/dev.jsonl",)}, "allenai/winogrande", "winogrande_xl"),
    "openbookqa": Source({"test": ("openbookqa/test.jsonl",)}, "allenai/openbookqa", "main"),
    "wikitext": Source(
        {"test": ("wikitext2/wiki.test.raw",)}, "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"
    ),
    "c4": Source({"validation": ("c4/c4_valid.jsonl",)}, "allenai/c4", "en"),
    "piqa": Source({"validation": ("extras/piqa_valid.jsonl",)}, "baber/piqa", ""),
    "copa": Source({"validation": ("extras/copa_val.jsonl",)}, "aps/super_glue", "copa"),
    "cb": Source({"validation": ("extras/cb_val.jsonl",)}, "aps/super_glue", "cb"),
    "rte": Source({"validation": ("extras/rte_val.jsonl",)}, "nyu-mll/glue", "rte"),
    "lambada_openai": Source({"test": ("extras/lambada_openai_test.jsonl",)}, "EleutherAI/lambada_openai", "default"),
}

ALL_SPLITS = ("train", "validation", "test")
SPLITS = {
    "pydocs": ("train", "test"),
    "wikitext": ALL_SPLITS,
    "c4": ALL_SPLITS,
    "openbookqa": ALL_SPLITS,
    "mixture": ALL_SPLITS,
    "opt-tiny-text": ("train",),
}
PARTS = {name: (name,) for name in SOURCES} | {"mixture": ("openbookqa", "wikitext"), "opt-tiny-text": ("wikitext",)}


def check_available(name: str, split: str, data_root: Path | None, hub: str | None) -> None:
    """Return if the corpus can be read: from data_root where that is set, else from the hub or its local cache.

    `hub` is the repository, None for the usual one. Raises DataError that names what is missing and what would serve.
    """
    check_split(name, split)
    if name == "opt-tiny-text" and data_root is None:
        files = " or ".join(SOURCES["wikitext"].files[split])
        raise DataError(f"corpus {name} is made from local files only: set data_root=DIR with {files} ({LAYOUT})")
    for part in PARTS.get(name, ()):
        if data_root is not None:
            local_file(part, split, data_root)
        else:
            check_hub(part, split, hub if hub and part == name else SOURCES[part].hub)


def check_split(name: str, split: str) -> None:
    """Raise DataError unless the corpus is known and has this split."""
    if name not in SPLITS:
        raise DataError(f"corpus {name} is not known: choose one of {', '.join(SPLITS)}")
    if split not in SPLITS[name]:
        raise DataError(f"corpus {name} has no split {split}: choose one of {', '.join(SPLITS[name])}")


def check_benchmark(name: str, data_root: Path | None) -> None:
    """Return if the rows of one of lm-eval's own tasks can be read. Raises DataError that names what is missing."""
    if name not in BENCHMARKS:
        raise DataError(f"lm-eval's task {name} is not among those known here: choose one of {', '.join(BENCHMARKS)}")
    source = BENCHMARKS[name]
    (split,) = source.files
    if data_root is not None:
        source_file(f"task {name}", source, split, data_root)
    else:
        check_repository(f"task {name}", source, split, source.hub)


def local_file(name: str, split: str, data_root: Path) -> Path:
    """The file below data_root that holds this split of a corpus. Raises DataError that names the missing file."""
    return source_file(f"corpus {name}", SOURCES[name], split, data_root)


def source_file(what: str, source: Source, split: str, data_root: Path) -> Path:
    """The first of a split's files that exists. Raises DataError that names them all where none does."""
    names = source.files[split]
    for path in (data_root / file for file in names):
        if path.is_file():
            return path
    missing = " or ".join(str(data_root / file) for file in names)
    raise DataError(f"{what}, split {split}: no file {missing}; put it there ({LAYOUT}) or unset data_root")


def check_hub(name: str, split: str, repository: str) -> None:
    """Raise DataError if a corpus's repository is neither in the local cache nor can its host be reached."""
    check_repository(f"corpus {name}", SOURCES[name], split, repository)


def check_repository(what: str, source: Source, split: str, repository: str) -> None:
    """Raise DataError if the repository is neither in the local cache nor can its host be reached."""
    if in_cache(repository):
        return
    problem = offline_setting() or connection_problem()
    if problem:
        files = " or ".join(source.files[split])
        raise DataError(
            f"{what}, split {split}: {repository} is not in the local cache and {problem}; "
            f"set data_root=DIR with {files} ({LAYOUT}) or connect to the hub"
        )


def in_cache(repository: str) -> bool:
    """Has `datasets` prepared this repository before? Its cache is the only one it reads without the hub.

    (The hub client's `datasets--OWNER--NAME` folders hold downloads, which `datasets` does not open while offline.)
    """
    owner, _, name = repository.rpartition("/")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return (datasets_cache() / (f"{owner}___{snake}" if owner else snake)).is_dir()


def datasets_cache() -> Path:
    """The folder where `datasets` keeps what it prepared, by the rules of its own configuration."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets").expanduser()


def offline_setting() -> str | None:
    """The environment variable that forbids to use the hub, as part of a sentence."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        value = os.environ.get(variable, "")
        if value.upper() in TRUE:
            return f"{variable}={value} forbids to fetch it"
    return None


def connection_problem() -> str | None:
    """Why the hub's host (or the proxy before it) takes no connection, as part of a sentence; None if it does."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not url.hostname:
        return f"the hub's address {url.geturl()!r} is not a URL"
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        with socket.create_connection((url.hostname, port), timeout=CONNECT_SECONDS):
            return None
    except OSError as error:
        return f"{url.hostname}:{port} cannot be reached ({error})"

"""`pydocs`: the documentation that every Python carries, read without importing or running any of it.

Docstrings of the standard library (`ast`) and the language reference in `pydoc_data.topics`: about 2 MB of English
prose and code that needs no download. Different Python versions carry different text, so every result names the hash.
"""

import ast
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from dejavu.corpora.documents import Document, split_by_hash, unique, without_near_duplicates

HELD_OUT = 0.2
MIN_CHARACTERS = 200  # shorter docstrings are signatures in disguise ("Return self==value.") and repeat everywhere
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def pydocs() -> dict[str, list[Document]]:
    """The `train` and `test` documents. Held-out documents that (nearly) repeat a training document are dropped.

    The split is by each document's own hash; near duplicates are removed from the held-out side only, so that the
    training side does not depend on the threshold.
    """
    documents = unique([*standard_library(), *topics()])
    train, test = split_by_hash(documents, HELD_OUT)
    return {"train": train, "test": without_near_duplicates(test, of=train)}


def standard_library() -> Iterator[Document]:
    """Docstrings of every module of the standard library, in the order of file names."""
    yield from docstrings(stdlib())


def stdlib() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def topics() -> Iterator[Document]:
    """The language reference behind `help("topics")`: the dictionary literal in pydoc_data/topics.py."""
    path = stdlib() / "pydoc_data" / "topics.py"
    if not path.exists():  # some distributions split it off
        return
    literal = next(node.value for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Assign))
    for name, text in sorted(ast.literal_eval(literal).items()):
        yield Document(text.strip(), f"topics:{name}")


def docstrings(folder: Path) -> Iterator[Document]:
    """Docstrings of at least `MIN_CHARACTERS` in all Python files below `folder`, tests left out."""
    for path in python_files(folder):
        yield from file_docstrings(path, ".".join(path.relative_to(folder).parts).removesuffix(".py"))


def python_files(folder: Path) -> list[Path]:
    """All Python files below a folder in the order of their names, without tests and other packages."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(path for path in found if not path.is_symlink())


def file_docstrings(path: Path, module: str) -> Iterator[Document]:
    """Docstrings of one file: of the module, its classes and functions. A file that does not parse has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files are not this project's news
            tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and len(text := inspect.cleandoc(text)) >= MIN_CHARACTERS:
                yield Document(text, f"{module}:{getattr(node, 'name', '')}")


def dependency_docstrings(packages: tuple[str, ...]) -> Iterator[Document]:
    """Docstrings of installed packages, by folder name under site-packages: training text of opt-tiny only."""
    for site in map(Path, dict.fromkeys(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))):
        for package in packages:
            if (site / package).is_dir():
                yield from docstrings(site / package)


def python_version() -> str:
    """The Python whose documentation this is, for manifests and results."""
    return ".".join(map(str, sys.version_info[:3]))

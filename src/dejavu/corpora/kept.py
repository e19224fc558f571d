"""`pydocs` kept on disk: parsing the standard library takes seconds, which every stage and every job would pay.

What is kept is named from all that it depends on: Python, the library's files with their sizes and times, and the rules
of this project. So it is never stale, and what cannot be read is made anew.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from dejavu.corpora import documents, pydocs
from dejavu.corpora.documents import Document

RULES = (documents.__file__, pydocs.__file__)


def kept_pydocs() -> dict[str, list[Document]]:
    """`pydocs.pydocs()`, from disk where it was made before."""
    path = folder() / f"{state()}.json"
    try:
        read = json.loads(path.read_bytes())
        return {split: [Document(text, origin) for text, origin in read[split]] for split in ("train", "test")}
    except (OSError, ValueError, KeyError, TypeError):
        made = pydocs.pydocs()
        keep(path, {split: [(document.text, document.origin) for document in found] for split, found in made.items()})
        return made


def folder() -> Path:
    """Where it is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dejavu" / "pydocs"


def state() -> str:
    """16 hex digits over everything that the documents follow from."""
    digest = hashlib.sha256(sys.version.encode())
    for path in RULES:
        digest.update(Path(str(path)).read_bytes())
    library = pydocs.stdlib()
    for file in pydocs.python_files(library):
        found = file.stat()
        digest.update(f"{file.relative_to(library)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def keep(path: Path, content: dict[str, list[tuple[str, str]]]) -> None:
    """Write by rename; a disk that takes nothing costs time, not the run."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), "utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()

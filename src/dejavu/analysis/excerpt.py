"""What notebooks read of a folder of runs: `python -m dejavu.analysis.excerpt FROM TO [PATTERN ...]`.

Copies the small files of every run whose path below FROM matches a pattern (all without one); caches, weights, logs and
pictures stay. What an earlier excerpt left in TO goes first.
"""

import fnmatch
import shutil
import sys
from pathlib import Path

import pandas as pd

from dejavu.activations.manifest import MANIFEST
from dejavu.analysis.activity import FILE, write_activity
from dejavu.errors import DataError

KEPT = ("config.yaml", "result.json", "metrics.csv", "benchmark.csv", "bundle/config.json", FILE)
SAMPLES = "samples.parquet"


def excerpt(source: Path, target: Path, patterns: list[str]) -> list[Path]:
    """The files written. Raises DataError when nothing below `source` matches."""
    runs = [path.parent for path in sorted(source.rglob("config.yaml")) if wanted(path.parent, source, patterns)]
    if not runs:
        raise DataError(f"{source} holds no run that matches {' '.join(patterns) or 'anything'}: name another folder")
    for name in (*KEPT, SAMPLES):
        for old in target.rglob(name):
            old.unlink()
    written = []
    for run in runs:
        copied = target / run.relative_to(source)
        if (run / "cache" / MANIFEST).is_file() and not (run / FILE).is_file():
            write_activity(run)  # a cache from before this table was kept
        for name in KEPT:
            if (run / name).is_file():
                (copied / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run / name, copied / name)
                written.append(copied / name)
        if (run / SAMPLES).is_file():
            pack(run / SAMPLES, copied / SAMPLES)
            written.append(copied / SAMPLES)
    return written


def wanted(run: Path, source: Path, patterns: list[str]) -> bool:
    """Whether a run's path below the source matches."""
    name = run.relative_to(source).as_posix()
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def pack(source: Path, target: Path) -> None:
    """The same rows in fewer bytes: numbers split by byte, keys as differences."""
    rows = pd.read_parquet(source)
    encoding = {
        name: "BYTE_STREAM_SPLIT" if kind == "float64" else "DELTA_BYTE_ARRAY" if name == "document" else "PLAIN"
        for name, kind in rows.dtypes.astype(str).items()
    }
    rows.to_parquet(
        target, index=False, compression="zstd", compression_level=19, use_dictionary=False, column_encoding=encoding
    )


def main(arguments: list[str]) -> None:
    """Make an excerpt and say how large it is."""
    source, target, *patterns = arguments
    files = excerpt(Path(source), Path(target), patterns)
    print(f"{target}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1000:,.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

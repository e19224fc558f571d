"""From measured times to benchmark.csv, a table and a picture, and into a page:
`python -m dejavu.benchmark.report RUN_DIR FILE.md NAME [headlines]` replaces what stands between NAME's marker lines.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from dejavu.analysis import tables
from dejavu.analysis.latency import latency, read_benchmark, skipped
from dejavu.analysis.readme import put
from dejavu.benchmark.floor import BYTES, largest_cache, terms
from dejavu.benchmark.measure import Times
from dejavu.benchmark.variants import budget_of
from dejavu.models.families import shape_of
from dejavu.tracking.files import by_rename

COLUMNS = [
    "contender", "model", "storage", "selector", "mlp", "heads", "prompt_tokens", "batch", "ms_per_token",
    "ms_per_token_q1", "ms_per_token_q3", "first_token_ms", "bytes_per_token", "floor_ms", "peak_memory_mb", "threads",
    "kv", "overlap", "rank", "new_tokens", "repeats", "bandwidth_gb_s", "body_bytes", "predictor_bytes",
    "embedding_bytes", "cache_bytes", "note", "budget",
]  # fmt: skip
RESIDENT = "cache-resident"
HEADLINE = 0.75  # the ratio that sentences are about, where it was measured


def row(times: Times, model: str, new_tokens: int, repeats: int) -> dict[str, Any]:
    """One line of benchmark.csv."""
    spec, variant = times.spec, times.variant
    ours, sparse = spec["family"] == "dejavu", variant["mlp"] > 0 or variant["heads"] > 0
    ranks = spec["ranks"] if ours and sparse else None
    cached = 4 if spec["family"] in ("dejavu", "ctranslate2") else BYTES[spec["storage"]]
    positions = times.prompt_tokens + new_tokens * repeats // 2
    read = terms(
        shape_of(spec["architecture"]), spec["storage"], budget_of(variant), ranks, positions, cached, spec["head_unit"]
    )  # fmt: skip
    bandwidth = float(np.median(times.bandwidths)) if times.bandwidths else float("nan")
    q1, median, q3 = np.percentile(times.each, [25, 50, 75]) if times.each else [float("nan")] * 3
    sets = (
        "predictor" if spec["source"] is not None else "random"
    )  # with random weights: predictors run, sets are drawn
    return {
        "contender": f"dejavu-{'sparse' if sparse else 'dense'}" if ours else spec["family"],
        "model": model, "storage": spec["storage"], "selector": sets if sparse else "dense", "mlp": variant["mlp"],
        "heads": variant["heads"], "prompt_tokens": times.prompt_tokens, "batch": 1, "ms_per_token": median,
        "ms_per_token_q1": q1, "ms_per_token_q3": q3, "first_token_ms": times.first, "bytes_per_token": read.total,
        "floor_ms": RESIDENT if read.total <= largest_cache() else read.floor_ms(bandwidth),
        "peak_memory_mb": times.memory_mb, "threads": spec["threads"], "kv": spec["decode"]["kv"] if ours else None,
        "overlap": spec["decode"]["overlap"] if ours else None, "rank": ranks and ranks[1], "new_tokens": new_tokens,
        "repeats": repeats, "bandwidth_gb_s": bandwidth, "body_bytes": read.body, "predictor_bytes": read.predictors,
        "embedding_bytes": read.embedding, "cache_bytes": read.cache,
        "note": times.failure or spec.get("label", "").strip() or None, "budget": variant["budget"],
    }  # fmt: skip


def frame(results: list[Times], model: str, new_tokens: int, repeats: int) -> pd.DataFrame:
    """All rows, in the order of prompt length and time; what could not run comes last."""
    rows = pd.DataFrame([row(times, model, new_tokens, repeats) for times in results], columns=COLUMNS)
    return rows.sort_values(["prompt_tokens", "ms_per_token"], kind="stable", ignore_index=True)


def write(rows: pd.DataFrame, folder: Path) -> None:
    """benchmark.csv and latency.png."""
    by_rename(folder / "benchmark.csv", lambda path: rows.to_csv(path, index=False))
    if rows["ms_per_token"].notna().any():
        latency(rows, folder / "latency.png")


HEADERS = [
    "contender", "storage", "skipped", "prompt", "ms a token (quartiles)", "against fastest peer", "first token, ms",
    "MB a token", "floor, ms", "times floor", "peak GB",
]  # fmt: skip


def lines(rows: pd.DataFrame) -> list[list[str]]:
    """The table for reading, a list of cells a row."""
    records = [{str(key): value for key, value in record.items()} for record in rows.to_dict("records")]
    return [cells(record, fastest_peer(record, records)) for record in records]


def fastest_peer(entry: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The peer to beat at the same prompt: for int8 any, for 16 and 32 bits those of 16 and 32 bits."""
    peers = [
        other
        for other in records
        if not other["contender"].startswith("dejavu")
        and other["prompt_tokens"] == entry["prompt_tokens"]
        and not pd.isna(other["ms_per_token"])
        and (entry["storage"] == "int8" or other["storage"] != "int8")
    ]
    return min(peers, key=lambda other: float(other["ms_per_token"]), default=None)


def cells(entry: dict[str, Any], peer: dict[str, Any] | None) -> list[str]:
    """One row."""
    storage = f"{entry['storage']}" + (f" ({entry['note']})" if isinstance(entry["note"], str) else "")
    start = [entry["contender"], storage, skipped(entry) if entry["contender"] == "dejavu-sparse" else ""]
    start.append(str(entry["prompt_tokens"]))
    if pd.isna(entry["ms_per_token"]):
        return [*start, "did not run", "", "", "", "", "", ""]
    floor = entry["floor_ms"]
    known = str(floor) != RESIDENT
    return [
        *start, f"{entry['ms_per_token']:.1f} ({entry['ms_per_token_q1']:.1f} to {entry['ms_per_token_q3']:.1f})",
        "" if peer is None else f"{peer['ms_per_token'] / entry['ms_per_token']:.2f}x",
        f"{entry['first_token_ms']:,.0f}", f"{entry['bytes_per_token'] / 1e6:,.0f}",
        f"{float(floor):.1f}" if known else RESIDENT,
        f"{entry['ms_per_token'] / float(floor):.2f}" if known else "", f"{entry['peak_memory_mb'] / 1024:.1f}",
    ]  # fmt: skip


def rich_table(rows: pd.DataFrame) -> Table:
    """The table for a terminal."""
    table = Table(title=f"{rows['model'].iloc[0]}: time of one token", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("contender", "storage") else "right")
    for line in lines(rows):
        table.add_row(*line)
    return table


def headlines(rows: pd.DataFrame) -> list[str]:
    """One sentence for each prompt length and storage: the sparse engine against the peer to beat."""
    records = [{str(key): value for key, value in record.items()} for record in rows.to_dict("records")]
    sparse = [
        entry for entry in records if entry["contender"] == "dejavu-sparse" and not pd.isna(entry["ms_per_token"])
    ]
    ratios = {entry["mlp"] for entry in sparse}
    shown = HEADLINE if HEADLINE in ratios else max(ratios, default=HEADLINE)
    found = []
    for entry in (entry for entry in sparse if entry["mlp"] == shown):
        peer = fastest_peer(entry, records)
        if peer is not None:
            found.append(
                f"{entry['prompt_tokens']} prompt tokens, {entry['storage']}, {skipped(entry)} skipped: "
                f"{entry['ms_per_token']:.1f} ms a token, {peer['ms_per_token'] / entry['ms_per_token']:.2f} times as "
                f"fast as {peer['contender']} {peer['storage']} ({peer['ms_per_token']:.1f} ms)"
            )
    return found


def markdown(rows: pd.DataFrame) -> str:
    """The table and its headlines for a page."""
    bandwidth, threads = rows["bandwidth_gb_s"].median(), rows["threads"].iloc[0]
    measured = f"Memory bandwidth in this run: {bandwidth:.1f} GB/s, {threads} threads."
    return "\n".join([tables.markdown(HEADERS, lines(rows)), "", measured, *(f"- {line}" for line in headlines(rows))])


def main(arguments: list[str]) -> None:
    """Put a run's table, or only its headlines, into a page. Raises DataError when the page lacks the markers."""
    run, page, name = Path(arguments[0]), Path(arguments[1]), arguments[2]
    rows = read_benchmark(run)
    short = arguments[3:] == ["headlines"]
    told = "\n".join(f"- {line}" for line in headlines(rows)) if short else markdown(rows)
    put(page, name, told)


if __name__ == "__main__":
    main(sys.argv[1:])

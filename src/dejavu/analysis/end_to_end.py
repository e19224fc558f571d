"""Quality and speed of one object, beside the peers: evaluations that decoded and a benchmark, joined into one table.

python -m dejavu.analysis.end_to_end EVALUATIONS BENCHMARK FILE.md    # replaces what stands between the marker lines
"""

import sys
from pathlib import Path

import pandas as pd

from dejavu.analysis.latency import read_benchmark, skipped, speed_and_quality
from dejavu.analysis.readme import REAL, put, rows_of, valued
from dejavu.analysis.tables import in_order, markdown
from dejavu.errors import DataError

NAME = "end_to_end"


def main(arguments: list[str]) -> None:
    """Put the table into the page."""
    evaluations, benchmark, page = map(Path, arguments)
    put(page, NAME, end_to_end(speed_and_quality(evaluations), read_benchmark(benchmark)))


def end_to_end(quality: pd.DataFrame, times: pd.DataFrame) -> str:
    """A row for each evaluation, with its milliseconds a token where the benchmark has them; then the peers, dense.

    `quality` is from `speed_and_quality`, `times` is benchmark.csv. Raises DataError when they are of different models
    or the benchmark has several prompt lengths.
    """
    check_together(quality, times)
    pairs = list(dict.fromkeys(zip(quality["task"], quality["metric"], strict=True)))
    tasks = [pair for pair in REAL if pair in pairs]
    titles = [f"{REAL[task]} (n = {int(rows_of(quality, *task)['n'].max()):,})" for task in tasks]
    headers = ["decoded by", "storage", "selector", "skipped", *titles, "ms a token", "against fastest peer"]
    lines = []
    peer = fastest(times)
    keys = ["storage", "budget", "mlp", "selector"]
    for (storage, budget, _, selector), rows in in_order(quality).groupby(keys, sort=False):
        cells = [valued(rows_of(rows, *task)) for task in tasks]
        speed = time_of(times, str(storage), str(selector), str(budget), float(rows["mlp"].iloc[0]))
        state = ["dejavu", str(storage), str(selector), skipped(rows.iloc[0].to_dict())]
        lines.append([*state, *cells, *against(speed, peer)])
    for row in times[~times["contender"].str.startswith("dejavu")].sort_values("ms_per_token").to_dict("records"):
        speed = float(row["ms_per_token"])
        lines.append([row["contender"], row["storage"], "dense", "", *[""] * len(tasks), *against(speed, peer)])
    return markdown(headers, lines)


def check_together(quality: pd.DataFrame, times: pd.DataFrame) -> None:
    """Raise DataError unless both are of one model and the benchmark of one prompt length."""
    models = sorted({*quality["model"], *times["model"]})
    if len(models) > 1:
        raise DataError(f"evaluations and benchmark are of several models: {', '.join(models)}")
    prompts = sorted(set(times["prompt_tokens"]))
    if len(prompts) > 1:
        raise DataError(f"the benchmark has prompts of {prompts} tokens: make one with a single benchmark.prompts")


def fastest(times: pd.DataFrame) -> float:
    """Milliseconds a token of the fastest peer in any storage; NaN without one that ran."""
    return float(times.loc[~times["contender"].str.startswith("dejavu"), "ms_per_token"].min())


def time_of(times: pd.DataFrame, storage: str, selector: str, budget: str, share: float) -> float:
    """Milliseconds a token of this project's engine in that state; NaN where it was not measured."""
    own = times[times["contender"].str.startswith("dejavu") & (times["storage"] == storage)]
    found = own[(own["selector"] == selector) & (own["budget"] == budget) & (own["mlp"] == share)]
    return float(found["ms_per_token"].iloc[0]) if len(found) else float("nan")


def against(speed: float, peer: float) -> list[str]:
    """Milliseconds, and how many times as fast as the fastest peer; empty where not measured."""
    return ["", ""] if pd.isna(speed) else [f"{speed:.1f}", "" if pd.isna(peer) else f"{peer / speed:.2f}x"]


if __name__ == "__main__":
    main(sys.argv[1:])

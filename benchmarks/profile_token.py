"""Where the milliseconds of one token go: `python benchmarks/profile_token.py opt-1.3b int8 [0.75] [overlap]`.

Random weights, fresh random sets for every token; run it on a free machine. Each operator is timed around its call, so
what is left is the walk from one to the next in Python. Predictors' second halves run inside the half blocks; they are
timed once more by themselves and taken off.
"""

import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from dejavu.benchmark.engines import engines
from dejavu.benchmark.floor import Bandwidth, terms
from dejavu.benchmark.variants import budget_of, variant
from dejavu.decode import ops
from dejavu.decode.weights import matrix
from dejavu.models.families import shape_of
from dejavu.predictors.network import ranks
from dejavu.schema import Predictor, Sparsity

CONF = Path(__file__).resolve().parents[1] / "conf" / "model"
TOKENS, WARM, PROMPT, THREADS = 32, 4, 128, 2
NAMES = {"heads": "attention halves", "mlp": "MLP halves", "choose": "predictors, second half and top-k"}


def main(model: str, storage: str, ratio: float, overlap: bool) -> None:
    """Decode some tokens with every operator timed, and print the parts."""
    architecture = OmegaConf.to_container(OmegaConf.load(CONF / f"{model}.yaml").architecture)
    assert isinstance(architecture, dict)
    shape, read_ranks = shape_of(architecture), ranks(architecture["hidden_size"], Predictor())
    state = variant(shape, Sparsity("predictor", ratio=ratio))
    spec = {
        "source": None, "architecture": architecture, "storage": storage, "ranks": read_ranks, "seed": 0,
        "decode": {"kv": "lazy", "window": 16, "overlap": overlap}, "threads": THREADS, "head_unit": "head",
        "variants": [state],
    }  # fmt: skip
    contender = engines(spec)[0]
    contender.start(np.random.default_rng(0).integers(4, 1000, PROMPT).tolist(), TOKENS + WARM)
    contender.decode(WARM)
    bandwidth = Bandwidth(THREADS).gb_s()  # with the same operator, so before it is timed
    spent: dict[str, list[float]] = defaultdict(list)
    ops.project = timed(ops.project, "project", spent)
    for half in contender.engine.halves:
        for name in ("choose", "operator"):
            setattr(half, name, timed(getattr(half, name), half.kind, spent))
    times = contender.decode(TOKENS)
    second_halves_alone(contender.engine, spent)
    read = terms(shape, storage, budget_of(state), read_ranks, PROMPT, 4)
    table = Table(title=f"{model} {storage}, {ratio:.0%} skipped, overlap {overlap}", box=box.SIMPLE_HEAD)
    for header in ("part", "calls", "ms a token", "MB", "GB/s"):
        table.add_column(header, justify="left" if header == "part" else "right")
    total, known = float(np.mean(times)), 0.0
    for name, calls, ms, size in parts(spent, read, shape):
        known += ms
        speed = f"{size / ms / 1e6:.1f}" if size else ""
        table.add_row(name, str(calls), f"{ms:.2f}", f"{size / 1e6:.0f}" if size else "", speed)
    table.add_row("between them, in Python", "", f"{total - known:.2f}", "", "")
    floor = read.floor_ms(bandwidth)
    table.add_row("all", "", f"{total:.2f}", f"{read.total / 1e6:.0f}", f"{read.total / total / 1e6:.1f}")
    Console().print(table)
    print(f"bandwidth {bandwidth:.1f} GB/s, floor {floor:.1f} ms, {total / floor:.2f} times the floor")


def timed(operator, name, spent):  # type: ignore[no-untyped-def]
    """The operator, its milliseconds kept; the output embedding is the projection to the largest output."""

    def call(*arguments):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        result = operator(*arguments)
        large = name == "project" and arguments[1].shape[1] > arguments[0].shape[1]  # a predictor narrows
        spent["output embedding" if large else name].append((time.perf_counter() - started) * 1e3)
        return result

    return call


def second_halves_alone(engine, spent) -> None:  # type: ignore[no-untyped-def]
    """Time predictors' second halves apart from the half blocks that they run in, and take them from those."""
    asked = [half for half in engine.halves if half.choosing is not None]
    bounds = [
        ops.Bound("choose", *matrix(engine.weights.predictors[half.kind, half.layer].up), THREADS, False)
        for half in asked
    ]
    for _ in range(TOKENS):
        for half, bound in zip(asked, bounds, strict=True):
            scores, units = torch.from_numpy(half.choice.scores_BU), torch.from_numpy(half.choice.units_BK)
            started = time.perf_counter()
            ops.choose(half.choice.hidden, scores, units, bound.number)
            ms = (time.perf_counter() - started) * 1e3
            spent["choose"].append(ms)
            spent[half.kind].append(-ms)


def parts(spent, read, shape):  # type: ignore[no-untyped-def]
    """(name, calls a token, milliseconds a token, bytes) of each part; halves of a body by their rows."""
    width, neurons = shape.width, shape.neurons
    rows = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    halves = rows / (rows + shape.neuron_rows * neurons)  # heads' share of a block's rows, both kept in the same share
    sizes = {
        "heads": read.body * halves + read.cache, "mlp": read.body * (1 - halves),
        "project": read.predictors * width / (width + neurons), "choose": read.predictors * neurons / (width + neurons),
        "output embedding": read.embedding,
    }  # fmt: skip
    names = NAMES | {"project": "predictors, first half", "output embedding": "output embedding"}
    for key, label in names.items():
        if spent[key]:
            yield label, sum(ms > 0 for ms in spent[key]) // TOKENS, sum(spent[key]) / TOKENS, sizes[key]


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], words[1], float(words[2]) if len(words) > 2 else 0.75, "overlap" in words)

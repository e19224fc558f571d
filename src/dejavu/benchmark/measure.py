"""Interleaved measurement: every contender decodes a few tokens in turn, again and again, so that noise hits all alike.

Contenders live in processes of their own. As many as fit in memory are alive together (a wave); only one works at a
time. The memory's bandwidth is measured between the turns.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dejavu.errors import DataError
from dejavu.models.families import shape_of

Say = Callable[[str], None]
SETTLE = 0.3  # seconds between turns: idle threads of the one before spin for up to 0.2 s
WARM = 3  # tokens that each decodes before it is timed
SEARCH_TOKENS, SEARCH_PROMPT = 6, 16
LIMIT = 1200  # seconds that an answer may take: torch.compile of a deep model takes minutes, if it ends
HOPELESS = 3  # times the best so far, and a setting is not tried further


@dataclass
class Process:
    """A worker and what it was asked to build."""

    spec: dict[str, Any]
    process: subprocess.Popen[str]
    memory_mb: float = 0.0

    def ask(self, **order: Any) -> Any:
        """Send an order, wait for its answer. DataError with the reason when the worker fails, dies or lingers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        limit = threading.Timer(LIMIT, self.process.kill)
        limit.daemon = True
        limit.start()
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        too_slow = not limit.is_alive()
        limit.cancel()
        if not line:
            code = self.process.wait()
            if too_slow:
                raise DataError(f"gave no answer in {LIMIT / 60:.0f} minutes")
            raise DataError("ran out of memory" if code in (-9, 137) else f"its process ended with code {code}")
        reply = json.loads(line)
        self.memory_mb = max(self.memory_mb, reply["memory_mb"])
        if "error" in reply:
            raise DataError(reply["error"])
        return reply.get("ms")

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # an order may still wait for a process that died
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def command() -> list[str]:
    """What starts a worker that ends with this process."""
    return [sys.executable, "-m", "dejavu.benchmark.worker", str(os.getpid())]


@contextmanager
def worker(spec: dict[str, Any]) -> Iterator[Process]:
    """A process with the spec's environment, its contender built. Raises DataError when that fails."""
    threads = str(spec["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, **spec["environment"]}
    process = Process(
        spec,
        subprocess.Popen(
            command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        ),
    )  # fmt: skip
    try:
        process.ask(do="build", spec=spec)
        yield process
    finally:
        process.close()


@dataclass
class Times:
    """What was measured of one contender at one prompt length, in milliseconds."""

    spec: dict[str, Any]
    variant: dict[str, float]
    prompt_tokens: int
    first: float = float("nan")
    each: list[float] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    memory_mb: float = float("nan")
    failure: str | None = None


def waves(specs: list[dict[str, Any]], memory_mb: float) -> list[list[dict[str, Any]]]:
    """Specs in groups whose estimated memory fits together; one that never fits has a group of its own."""
    groups: list[list[dict[str, Any]]] = []
    for spec in specs:
        used = sum(other["memory_mb"] for other in groups[-1]) if groups else memory_mb
        if used + spec["memory_mb"] > memory_mb:
            groups.append([])
        groups[-1].append(spec)
    return groups


def measure(
    specs: list[dict[str, Any]], prompts: list[int], new_tokens: int, repeats: int, memory_mb: float, seed: int,
    bandwidth: Callable[[], float], say: Say,
) -> list[Times]:  # fmt: skip
    """Times of every variant of every spec at every prompt length; one that cannot run has its `failure`."""
    results: list[Times] = []
    for number, wave in enumerate(waves(specs, memory_mb)):
        say(f"wave {number + 1}: {', '.join(name(spec) for spec in wave)}")
        with alive(wave, prompts, results, memory_mb, say) as processes:
            for prompt_tokens in prompts:
                results += one_prompt(processes, prompt_tokens, new_tokens, repeats, seed, bandwidth)
    return results


@contextmanager
def alive(
    wave: list[dict[str, Any]], prompts: list[int], results: list[Times], memory_mb: float, say: Say
) -> Iterator[list[Process]]:
    """The processes of a wave that could be built; of others the failure goes to the results."""
    processes, open_workers = [], []
    try:
        for spec in wave:
            manager = worker(spec)
            try:
                if spec["memory_mb"] > memory_mb:
                    raise DataError(f"needs about {spec['memory_mb'] / 1024:.1f} GB, {memory_mb / 1024:.1f} are there")
                processes.append(manager.__enter__())
                open_workers.append(manager)
            except DataError as error:
                say(f"{name(spec)}: {error}")
                for prompt_tokens in prompts:
                    results += [Times(spec, variant, prompt_tokens, failure=str(error)) for variant in spec["variants"]]
        yield processes
    finally:
        for manager in open_workers:
            manager.__exit__(None, None, None)


def one_prompt(
    processes: list[Process], prompt_tokens: int, new_tokens: int, repeats: int, seed: int,
    bandwidth: Callable[[], float],
) -> list[Times]:  # fmt: skip
    """Every contender reads a prompt; then they decode in turns."""
    vocabulary = min((shape_of(process.spec["architecture"]).vocabulary for process in processes), default=5)
    prompt = np.random.default_rng(seed).integers(4, vocabulary, prompt_tokens).tolist()
    room = 1 + WARM + repeats * new_tokens  # the first token comes with the prompt
    entries: list[tuple[Process, int, Times]] = []
    for process in processes:
        for number, variant in enumerate(process.spec["variants"]):
            times = Times(process.spec, variant, prompt_tokens)
            try:
                if process.spec["family"] == "hf-compile":
                    process.ask(do="start", variant=number, prompt=prompt, room=room)  # compiles
                times.first = process.ask(do="start", variant=number, prompt=prompt, room=room)
            except DataError as error:
                times.failure = str(error)
            entries.append((process, number, times))
    running = [entry for entry in entries if entry[2].failure is None]
    for process, number, _ in running:  # after all have started: variants take over a prompt that none has left
        process.ask(do="decode", variant=number, tokens=WARM)
    bandwidths = []
    for _ in range(repeats):
        bandwidths.append(bandwidth())
        for process, number, times in running:
            time.sleep(SETTLE)
            times.each += process.ask(do="decode", variant=number, tokens=new_tokens)
            times.memory_mb = process.memory_mb
    for _, _, times in running:
        times.bandwidths = bandwidths
    return [times for _, _, times in entries]


def name(spec: dict[str, Any]) -> str:
    """How a spec is called in messages."""
    return f"{spec['family']} {spec['storage']}{spec.get('label', '')}"


def fastest(candidates: list[dict[str, Any]], memory_mb: float, say: Say) -> dict[str, Any]:
    """The setting of a peer that decodes fastest in a short trial, each printed; the first where all fail.

    What does not fit in memory is not tried: it would take the machine's memory from everybody else.
    """
    if len(candidates) == 1:
        return candidates[0]
    best, best_ms = candidates[0], float("inf")
    room = 1 + WARM + SEARCH_TOKENS  # the first token comes with the prompt
    for spec in (spec for spec in candidates if spec["memory_mb"] <= memory_mb):
        try:
            with worker(spec) as process:
                process.ask(do="start", variant=0, prompt=list(range(4, 4 + SEARCH_PROMPT)), room=room)
                ms = min(process.ask(do="decode", variant=0, tokens=WARM))
                if ms < HOPELESS * best_ms:
                    ms = float(np.median(process.ask(do="decode", variant=0, tokens=SEARCH_TOKENS)))
        except DataError as error:
            say(f"search: {name(spec)}: {error}")
            continue
        say(f"search: {name(spec)}: {ms:.1f} ms a token")
        if ms < best_ms:
            best, best_ms = spec, ms
    return best

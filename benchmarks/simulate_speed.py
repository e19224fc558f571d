"""How much slower is evaluation with masks than the dense model? Medians of interleaved rounds, as ratios to dense.

    python benchmarks/simulate_speed.py --predictors runs/demo/train
    python benchmarks/simulate_speed.py --model smollm2-135m --predictors DIR --rounds 3 --blocks 4

Measure on a machine that does nothing else. Writes nothing; docs/performance.md holds what was measured.
"""

import argparse
import time
from dataclasses import replace

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from dejavu.cli import CONF
from dejavu.config import from_config
from dejavu.corpora.blocks import encode_documents, pack
from dejavu.corpora.pydocs import pydocs
from dejavu.evaluation.scoring import Request, Scorer
from dejavu.evaluation.sparsified import calibrate_thresholds, make_scorer
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.bundle import load_bundle
from dejavu.schema import Config

CONTENDERS = {  # name -> (selector, rule)
    "dense": ("dense", "topk"),
    "static": ("static", "topk"),
    "random": ("random", "topk"),
    "oracle": ("oracle", "topk"),
    "predictor, topk": ("predictor", "topk"),
    "predictor, threshold": ("predictor", "threshold"),
}
GOALS = {"static": 1.1, "random": 1.1, "predictor, topk": 1.6, "predictor, threshold": 1.3}


def main() -> None:
    """Measure and print."""
    arguments = parse()
    keep_freed_memory()
    config = composed(arguments.model)
    loaded = load_model(config)
    requests = windows(loaded, arguments.blocks, arguments.length)
    names = [name for name in CONTENDERS if arguments.predictors or CONTENDERS[name][0] not in ("static", "predictor")]
    scorers = {name: scorer(name, arguments, config, loaded) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            elapsed = timed(scorers[name], requests)
            if number:  # the first round warms up
                seconds[name].append(elapsed)
    show(arguments, seconds, tokens=len(requests) * arguments.length)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-tiny")
    parser.add_argument("--predictors", default=None, help="bundle; without it static and predictor are left out")
    parser.add_argument("--ratio", type=float, default=0.75, help="fraction of heads and neurons not computed")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def composed(model: str) -> Config:
    """The config that `dejavu evaluate model=...` composes."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("dejavu_sweep_root", lambda run_dir, runs: "unused", replace=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return from_config(compose("config", [f"model={model}", "evaluation.recall_tokens=0"]))


def windows(loaded: LoadedModel, blocks: int, length: int) -> list[Request]:
    """Blocks of held-out documentation, each token but the first scored."""
    texts = [document.text for document in pydocs()["test"]]
    blocks_NT, _ = pack(encode_documents(texts, loaded.tokenizer, loaded.anatomy.separator), length + 1)
    return [Request(block[:1].tolist(), block[1:].tolist()) for block in blocks_NT[:blocks]]


def scorer(name: str, arguments: argparse.Namespace, config: Config, loaded: LoadedModel) -> Scorer:
    """A contender's scorer, thresholds set where it needs them."""
    selector, rule = CONTENDERS[name]
    bundle = load_bundle(bundle_folder(arguments.predictors)) if selector in ("static", "predictor") else None
    own = replace(config, sparsity=replace(config.sparsity, selector=selector, rule=rule, ratio=arguments.ratio))
    made = make_scorer(loaded, own, bundle)
    calibrate_thresholds(made, own)
    return made


def bundle_folder(path: str) -> str:
    """A bundle, or the run's folder that holds one."""
    from pathlib import Path

    inner = Path(path) / "bundle"
    return str(inner if inner.is_dir() else path)


def timed(contender: Scorer, requests: list[Request]) -> float:
    """Seconds to score all requests."""
    started = time.perf_counter()
    if contender.sparsifier is None:
        contender.score(requests)
    else:
        with contender.sparsifier.attached():
            contender.score(requests)
    return time.perf_counter() - started


def show(arguments: argparse.Namespace, seconds: dict[str, list[float]], tokens: int) -> None:
    """The table: tokens per second, and the median of each round's ratio to dense."""
    table = Table("contender", "tokens/s", "times dense", "lowest to highest", "goal")
    for name, values in seconds.items():
        ratios = np.array(values) / np.array(seconds["dense"])
        goal = f"{GOALS[name]:.1f}" if name in GOALS else ""
        speed, span = f"{tokens / np.median(values):,.0f}", f"{ratios.min():.2f} to {ratios.max():.2f}"
        table.add_row(name, speed, f"{np.median(ratios):.2f}", span, goal)
    title = f"{arguments.model}, {arguments.ratio:.0%} skipped, {arguments.blocks} blocks of {arguments.length} tokens"
    Console(width=100).print(title, table, sep="\n")


if __name__ == "__main__":
    main()

"""`dejavu evaluate`: score tasks with a sparsified model and say what really ran sparse."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from dejavu.corpora.documents import corpus_hash
from dejavu.corpora.sources import documents
from dejavu.errors import DataError
from dejavu.evaluation.metrics import measure, paired
from dejavu.evaluation.scoring import Scorer
from dejavu.evaluation.sparsified import make_scorer
from dejavu.evaluation.tasks import run_task
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.bundle import Bundle, load_bundle
from dejavu.schema import Config, Corpus, Task
from dejavu.sparsity.budget import requested_ratios
from dejavu.tracking.files import by_rename
from dejavu.tracking.run import Run, versions


def run(run: Run, loaded: LoadedModel | None = None) -> None:
    """Score every task, pair it with the dense model's samples, and keep the samples beside the result."""
    keep_freed_memory()
    config = run.config
    loaded = loaded or load_model(config)
    if loaded.tokenizer is None:
        raise DataError(f"{loaded.name} has random weights: its quality is meaningless, so evaluate refuses it")
    bundle = None if run.inputs["bundle"] is None else load_bundle(Path(str(config.predictors)))
    hashes = {name: refuse_training_text(name, task, config, bundle) for name, task in config.tasks.run.items()}
    scorer = make_scorer(loaded, config, bundle)
    samples = score_tasks(scorer, config)
    measured = measured_sparsity(scorer, config)
    dense = samples if config.sparsity.selector == "dense" else None
    dense = dense_reference(loaded, config, dense)
    by_rename(run.folder / "samples.parquet", lambda path: samples.to_parquet(path, index=False))
    mlp, heads = requested_ratios(config.sparsity)
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "sparsity": {
            "selector": config.sparsity.selector,
            "requested": {"mlp": mlp, "heads": heads},
            "measured": measured,
        },
        "predictor": None if bundle is None else {"rank": bundle.config["rank"], "tap": bundle.config["tap"]},
        "corpora": hashes,
        "metrics": {name: metrics_of(samples, dense, name, task) for name, task in config.tasks.run.items()},
    }
    run.say(summary(run.record))


def score_tasks(scorer: Scorer, config: Config) -> pd.DataFrame:
    """Samples of all tasks, in the order of the config."""
    root = None if config.data_root is None else Path(config.data_root)
    if scorer.sparsifier is None:
        parts = [run_task(name, task, config.tasks.limit, root, scorer) for name, task in config.tasks.run.items()]
    else:
        with scorer.sparsifier.attached():
            parts = [run_task(name, task, config.tasks.limit, root, scorer) for name, task in config.tasks.run.items()]
    return pd.concat(parts, ignore_index=True)


def measured_sparsity(scorer: Scorer, config: Config) -> dict[str, Any]:
    """Densities and the share of scored tokens that ran sparse. A task asked to be sparse that was not is an error."""
    if scorer.sparsifier is None:
        return {"mlp_density": 1.0, "head_density": 1.0, "sparse_token_share": 0.0}
    share = scorer.sparse_token_share
    if share == 0 and scorer.sparsifier.touches_anything:
        raise DataError(
            f"sparsity.positions={config.sparsity.positions} leaves no scored token sparse, so the result would be the "
            "dense model's: choose another value"
        )
    density = scorer.sparsifier.density
    per_layer = {
        "mlp_density_per_layer": density.per_layer("mlp"),
        "head_density_per_layer": density.per_layer("heads"),
    }
    return {**density.measured(), "sparse_token_share": share, **per_layer}


def dense_reference(loaded: LoadedModel, config: Config, samples: pd.DataFrame | None) -> pd.DataFrame:
    """The dense model's samples on the same tasks, kept under `runs/references` so that they are scored once."""
    tasks = {name: asdict(task) for name, task in config.tasks.run.items()}
    key = [loaded.fingerprint, config.dtype, config.tasks.limit, config.data_root, tasks, versions()]
    folder = Path(config.runs) / "references"
    path = folder / f"{loaded.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.parquet"
    if samples is None and path.exists():
        return pd.read_parquet(path)
    dense = score_tasks(Scorer(loaded, batch_size=config.batch_size), config) if samples is None else samples
    by_rename(path, lambda partial: dense.to_parquet(partial, index=False))
    return dense


def refuse_training_text(name: str, task: Task, config: Config, bundle: Bundle | None) -> str:
    """The hash of a task's corpus. Raises DataError when the bundle's predictors were trained on a document of it."""
    root = None if config.data_root is None else Path(config.data_root)
    scored = documents(task.corpus, "test", root, Corpus(name=task.corpus, hub=task.hub, hub_config=task.hub_config))
    seen = set() if bundle is None else set(bundle.config["document_hashes"]) & {document.hash for document in scored}
    if seen:
        raise DataError(
            f"task {name} scores {len(seen)} documents that the predictors at {config.predictors} were trained on "
            f"(first: {min(seen)}): collect from the train split and train again"
        )
    return corpus_hash(scored)


def metrics_of(samples: pd.DataFrame, dense: pd.DataFrame, name: str, task: Task) -> dict[str, dict[str, Any]]:
    """Value, standard error and n of each metric, and the paired difference to dense."""
    rows, base = samples[samples["task"] == name], dense[dense["task"] == name]
    differences = paired(rows, base, task.kind)
    return {metric: entry | differences[metric] for metric, entry in measure(rows, task.kind).items()}


def summary(record: dict[str, Any]) -> str:
    """One line: selector, what was left out, and each task's main metric."""
    sparsity, metrics = record["sparsity"], record["metrics"]
    firsts = [(task, *next(iter(entries.items()))) for task, entries in metrics.items()]
    values = ", ".join(
        f"{task} {metric} {entry['value']:.4f} ± {entry['stderr']:.4f}" for task, metric, entry in firsts
    )
    requested = sparsity["requested"]
    return f"{sparsity['selector']} mlp={requested['mlp']:g} heads={requested['heads']:g}: {values}"

"""`dejavu evaluate`: score tasks with a sparsified model and say what really ran sparse."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from dejavu.analysis.heatmaps import layer_heat_map
from dejavu.corpora.documents import Document, corpus_hash
from dejavu.errors import DataError
from dejavu.evaluation.metrics import measure, metric_names, paired
from dejavu.evaluation.scoring import Scorer, Scoring
from dejavu.evaluation.sparsified import make_scoring
from dejavu.evaluation.tasks import note, run_task, scored_documents
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.bundle import Bundle, load_bundle
from dejavu.schema import Config, Task
from dejavu.sparsity.accounting import cost_account
from dejavu.sparsity.budget import requested_ratios
from dejavu.tracking.files import by_rename
from dejavu.tracking.run import Run, versions


def run(run: Run, loaded: LoadedModel | None = None) -> None:
    """Score every task, pair it with the dense model's samples, and keep the samples beside the result."""
    keep_freed_memory()
    config = run.config
    loaded = loaded or load_model(config)
    if loaded.places is not None:
        run.say(loaded.places)
    if loaded.tokenizer is None:
        raise DataError(f"{loaded.name} has random weights: its quality is meaningless, so evaluate refuses it")
    bundle = None if run.inputs["bundle"] is None else load_bundle(Path(str(config.predictors)))
    scored = {name: scored_documents(task, config) for name, task in config.tasks.run.items()}
    for name, texts in scored.items():
        refuse_training_text(name, texts, config, bundle)
    # First, since the engine takes the model's weights. Only the simulated dense model is its own reference.
    own = config.sparsity.selector == "dense" and config.backend == "simulate"
    dense = None if own else dense_reference(loaded, config, None)
    scorer = make_scoring(loaded, config, bundle)
    samples = score_tasks(scorer, config)
    refuse_nothing_sparse(scorer, config)
    measured = scorer.measured()
    if "ms_per_token" in measured:  # differs from run to run, so it is no part of what was measured of the sparsity
        run.record["timing"] = {"ms_per_token": measured.pop("ms_per_token")}
    if bundle is not None and config.sparsity.selector == "predictor" and scorer.sparse:
        measured["cost"] = cost_account(measured, bundle, loaded.anatomy)
        warn_of_cost(measured["cost"], run)
    dense = dense_reference(loaded, config, samples) if dense is None else dense
    by_rename(run.folder / "samples.parquet", lambda path: samples.to_parquet(path, index=False))
    mlp, heads = requested_ratios(config.sparsity)
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "sparsity": {
            "selector": config.sparsity.selector,
            "requested": {"mlp": mlp, "heads": heads},
            "measured": measured,
            # What `prompt` chooses from runs whole, whatever the config says.
            "positions": "decode" if config.sparsity.selector == "prompt" else config.sparsity.positions,
        },
        "predictor": scorer.reads if bundle is None else {key: bundle.config[key] for key in ("rank", "tap")},
        "corpora": {name: corpus_hash(texts) for name, texts in scored.items()},
        "metrics": {
            name: metrics_of(samples, dense, name, task, note(task, config, len(scored[name])))
            for name, task in config.tasks.run.items()
        },
    }
    run.wandb.table("samples", samples.groupby("task", sort=False).head(config.evaluation.samples))
    if scorer.sparse:
        run.wandb.image("layers", layer_heat_map(measured, run.folder / "layers.png"))
    run.say(summary(run.record))


def score_tasks(scorer: Scoring, config: Config) -> pd.DataFrame:
    """Samples of all tasks, in the order of the config."""
    with scorer.attached():
        parts = [run_task(name, task, config, scorer) for name, task in config.tasks.run.items()]
    return pd.concat(parts, ignore_index=True)


def refuse_nothing_sparse(scorer: Scoring, config: Config) -> None:
    """Raise DataError when a sparse evaluation was asked for and no scored token ran sparse."""
    if scorer.sparse and scorer.sparse_token_share == 0:
        raise DataError(
            f"sparsity.positions={config.sparsity.positions} leaves no scored token sparse, so the result would be the "
            "dense model's: choose another value"
        )


def warn_of_cost(cost: dict[str, float], run: Run) -> None:
    """Say when choosing reads more than it saves."""
    if cost["net_skipped"] <= 0:
        run.say(
            f"warning: these predictors read {cost['predictors']:.1%} of the body's weights to leave out "
            f"{cost['gross_skipped']:.1%}: lower predictor.rank, or leave more out"
        )


def dense_reference(loaded: LoadedModel, config: Config, samples: pd.DataFrame | None) -> pd.DataFrame:
    """The dense model's samples on the same tasks, kept under `runs/references` so that they are scored once."""
    tasks = {name: asdict(task) for name, task in config.tasks.run.items()}
    stock_bos = config.evaluation.stock_bos
    key = [loaded.fingerprint, config.dtype, config.tasks.limit, config.data_root, stock_bos, tasks, versions()]
    folder = Path(config.runs) / "references"
    path = folder / f"{loaded.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.parquet"
    if samples is None and path.exists():
        return pd.read_parquet(path)
    dense = score_tasks(Scorer(loaded, batch_size=config.batch_size), config) if samples is None else samples
    by_rename(path, lambda partial: dense.to_parquet(partial, index=False))
    return dense


def refuse_training_text(name: str, texts: list[Document], config: Config, bundle: Bundle | None) -> None:
    """Raise DataError when the bundle's predictors were trained on a document that the task scores."""
    seen = set() if bundle is None else set(bundle.config["document_hashes"]) & {document.hash for document in texts}
    if seen:
        raise DataError(
            f"task {name} scores {len(seen)} documents that the predictors at {config.predictors} were trained on "
            f"(first: {min(seen)}): collect from the train split and train again"
        )


def metrics_of(
    samples: pd.DataFrame, dense: pd.DataFrame, name: str, task: Task, remark: str | None
) -> dict[str, dict[str, Any]]:
    """Value, standard error and n of each metric, the paired difference to dense, and a note where there is one."""
    rows, base = samples[samples["task"] == name], dense[dense["task"] == name]
    names = metric_names(task.kind, task.metrics)
    differences = paired(rows, base, names)
    extra = {} if remark is None else {"note": remark}
    return {metric: entry | differences[metric] | extra for metric, entry in measure(rows, names).items()}


def summary(record: dict[str, Any]) -> str:
    """One line: selector, what was left out, and each task's main metric."""
    sparsity, metrics = record["sparsity"], record["metrics"]
    firsts = [(task, *next(iter(entries.items()))) for task, entries in metrics.items()]
    values = ", ".join(
        f"{task} {metric} {entry['value']:.4f} ± {entry['stderr']:.4f}" for task, metric, entry in firsts
    )
    requested = sparsity["requested"]
    return f"{sparsity['selector']} mlp={requested['mlp']:g} heads={requested['heads']:g}: {values}"

"""Finished evaluations on disk, as `dejavu evaluate` leaves them, with made-up but consistent numbers."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from dejavu.evaluation import metrics

TASKS = {
    "pydocs": "rolling",
    "pydocs_token": "token_perplexity",
    "continuation_choice": "continuation",
    "continuation_choice_blind": "continuation",
}
EXCESS = {"dense": 0.0, "oracle": 0.3, "predictor": 0.5, "static": 4.0, "random": 2.5}  # nats per token, at ratio 1
RATIOS = (0.25, 0.5, 0.65, 0.75, 0.9)


def task_samples(task: str, kind: str, excess: float, count: int) -> pd.DataFrame:
    """Samples whose documents are the same for every excess, hardness included."""
    rng = np.random.default_rng(len(task))
    tokens, hardness, luck = rng.integers(50, 500, count), rng.normal(4.0, 0.5, count), rng.random(count)
    nats = tokens * (hardness + excess * rng.normal(1.0, 0.2, count))
    chance = 0.3 if "blind" in task else 0.25 + 0.45 * np.exp(-excess)
    return pd.DataFrame(
        {
            "task": task,
            "document": [f"{task}:{number}" for number in range(count)],
            "loglikelihood": -nats,
            "tokens": tokens,
            "bytes": tokens * 4,
            "words": tokens // 2,
            "correct": (luck < chance).astype(float) if kind == "continuation" else np.nan,
        }
    )


def write_run(
    root: Path, selector: str, ratio: float = 0.0, name: str | None = None, count: int = 80, **changes
) -> Path:
    """A finished evaluation as `dejavu evaluate` leaves it; `changes` overwrite fields of its result."""
    folder = root / (name or f"{selector}-{ratio:g}")
    folder.mkdir(parents=True)
    rank = changes.pop("config_rank", None)
    frames = [task_samples(task, kind, EXCESS[selector] * ratio**2, count) for task, kind in TASKS.items()]
    pd.concat(frames).to_parquet(folder / "samples.parquet")
    config = {
        "dtype": "float32", "seed": 0, "backend": "simulate", "corpus": {"name": "pydocs"},
        "sparsity": {"selector": selector, "positions": "all", "budget": "uniform", "rule": "topk"},
        "predictor": {"tap": "overlap", "rank": rank},
        "tasks": {"limit": None, "run": {task: {"kind": kind, "limit": None} for task, kind in TASKS.items()}},
    }  # fmt: skip
    OmegaConf.save(config, folder / "config.yaml")
    density = 1 - ratio
    result = {
        "stage": "evaluate", "status": "ok", "error": None, "config_hash": "0", "inputs": {}, "seed": 0,
        "model": {"name": "opt-tiny", "parameters": 5_900_000, "fingerprint": "f"},
        "sparsity": {
            "selector": selector, "requested": {"mlp": ratio or 0.75, "heads": ratio or 0.75},
            "measured": {
                "mlp_density": density, "head_density": density, "body_density": density,
                "sparse_token_share": float(ratio > 0),
            } | ({
                f"{kind}_{key}_per_layer": [density, 1.0, None]
                for kind in ("mlp", "head") for key in ("density", "recall_of_mass", "recall")
            } if ratio else {}),
        },
        "metrics": {f["task"].iloc[0]: metrics.measure(f, metrics.OF_KIND[TASKS[f["task"].iloc[0]]]) for f in frames},
        "timing": {}, "versions": {},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result | changes))
    return folder

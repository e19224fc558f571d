"""`dejavu train`: predictors of neurons and heads, learnt from a cache, kept as a bundle."""

from pathlib import Path

from dejavu.activations.cache import ActivationCache
from dejavu.analysis.heatmaps import predictor_heat_map
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.train import train_bundle
from dejavu.tracking.lightning import lightning_loggers
from dejavu.tracking.run import Run

SHOWN = "0.25"  # density of the heat map


def run(run: Run) -> None:
    """Train on the cache's own documents only, then write the bundle to `run.folder/bundle`."""
    keep_freed_memory()
    config = run.config
    assert config.cache is not None
    cache = ActivationCache(Path(config.cache))
    run.say(f"training predictors of {cache.manifest['model']['name']} on {cache.tokens:,} tokens of {config.cache}")
    bundle, training = train_bundle(cache, config, run.folder, lightning_loggers(run))
    for kind, recall in training["recall_of_mass"].items():
        run.say(f"{kind}: mean recall of mass {recall:.4f} over densities 0.1, 0.25, 0.35 and 0.5")
    run.wandb.image("layers", predictor_heat_map(training["layers"], SHOWN, run.folder / "layers.png"))
    count = training["validation_tokens"]
    recalls = {kind: {"value": value, "stderr": None, "n": count} for kind, value in training["recall_of_mass"].items()}
    run.record |= {
        "model": cache.manifest["model"],
        "bundle": {"id": bundle.id, "rank": bundle.config["rank"], "tap": bundle.config["tap"]},
        "metrics": {"predictors": {f"recall_of_mass_{kind}": entry for kind, entry in recalls.items()}},
        "timing": {"seconds": training["seconds"], "epochs": training["epochs"], "tokens": cache.tokens},
    }

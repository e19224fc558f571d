"""From an activation cache to trained predictors, and to the bundle that holds them."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from dejavu.activations.cache import ActivationCache
from dejavu.activations.collect import check_layers
from dejavu.errors import ConfigError, DejavuError
from dejavu.models.anatomy import KINDS
from dejavu.predictors.bundle import Bundle, describe, discard, save_bundle
from dejavu.predictors.data import CacheData
from dejavu.predictors.metrics import SelectionRecall
from dejavu.predictors.module import PredictorModule, mean_recalls, name_of
from dejavu.predictors.network import Predictor, ranks, seeded_predictor, share_trunk
from dejavu.predictors.statistics import Key, UnitStatistics, collect_statistics
from dejavu.schema import Config
from dejavu.tracking.lightning import quiet_lightning
from dejavu.tracking.run import interactive


@dataclass(frozen=True)
class Trained:
    """What training gives: predictors of the layers asked for, statistics of all layers, and figures.

    metrics   recall_of_mass {mlp, heads}: means over layers and densities; static_recall_of_mass: the same without
              looking at the token; layers: {"mlp.3": {recall_of_mass, recall, static_recall_of_mass: by density,
              active}}, all on the held-out documents; epochs, steps, tokens (trained on), validation_tokens, seconds
    """

    module: PredictorModule
    predictors: dict[Key, Predictor]
    statistics: dict[Key, UnitStatistics]
    metrics: dict[str, Any]


def train_bundle(
    cache: ActivationCache,
    config: Config,
    folder: Path,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
) -> tuple[Bundle, dict[str, Any]]:
    """Train, and save to `folder/bundle`; returns the bundle and `Trained.metrics`.

    The folder is a run's own: a bundle that the same run left there before (killed, or forced to rerun) is replaced.
    """
    layers = chosen_layers(config.predictor.layers, cache)
    describe(cache, config, layers, {})  # what would be refused at the end is refused at the start
    trained = train_predictors(cache, config, folder, loggers, callbacks)
    lasting = {key: value for key, value in trained.metrics.items() if key != "seconds"}  # the id is of what was learnt
    discard(folder / "bundle")
    description = describe(cache, config, layers, lasting)
    return save_bundle(folder / "bundle", description, trained.predictors, trained.statistics), trained.metrics


def train_predictors(
    cache: ActivationCache,
    config: Config,
    folder: Path,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train predictors of both kinds in the chosen layers, keep the epoch with the best held-out recall of mass.

    The sizes are the cache's own. `folder` holds checkpoints until training is over and nothing of them afterwards.
    Raises ConfigError for layers that do not exist, DataError for a single document and for a loss that is not finite.
    """
    started = time.perf_counter()
    layers = chosen_layers(config.predictor.layers, cache)
    data = CacheData(cache, layers, config.predictor.tap, config.trainer, config.seed)
    statistics = collect_statistics(cache, data.train_rows, cache.recorded)
    steps = len(data.sampler) * config.trainer.epochs
    steps = min(steps, config.trainer.max_steps) if config.trainer.max_steps > 0 else steps
    module = PredictorModule(new_predictors(cache, config, layers), statistics, config.predictor, config.trainer, steps)
    taken = _fit(module, data, config, folder, steps, loggers, callbacks)
    metrics = held_out_metrics(module, data) | {
        "epochs": math.ceil(taken / len(data.sampler)),
        "steps": taken,
        "tokens": len(data.train_rows),
        "validation_tokens": len(data.held_out_rows),
        "seconds": round(time.perf_counter() - started, 3),
    }
    predictors = {key: module.predictor(key).eval() for key in module.keys}
    return Trained(module, predictors, statistics, metrics)


def chosen_layers(layers: list[int] | None, cache: ActivationCache) -> list[int]:
    """The layers to train, ascending: all that the cache holds unless some are named.

    Raises ConfigError for one that does not exist, is named twice or was not recorded.
    """
    chosen = check_layers(layers, cache.layers, "predictor.layers")
    absent = [layer for layer in chosen or () if layer not in cache.recorded]
    if absent:
        raise ConfigError(
            f"predictor.layers={layers} names {absent[0]}, which the cache does not hold: it has {cache.recorded}"
        )
    return list(cache.recorded) if chosen is None else chosen


def new_predictors(cache: ActivationCache, config: Config, layers: Sequence[int]) -> dict[Key, Predictor]:
    """Untrained predictors for a cache's model."""
    settings, units = config.predictor, {"mlp": cache.neurons, "heads": cache.heads}
    first, others = ranks(cache.width, settings)
    shape = (settings.norm, settings.activation, settings.bias)
    found = {
        (kind, layer): seeded_predictor(
            config.seed, layer, cache.width, units[kind], others if layer else first, *shape
        )
        for kind in KINDS
        for layer in layers
    }
    if settings.trunk:
        share_trunk(found)
    return found


def held_out_metrics(module: PredictorModule, data: CacheData) -> dict[str, Any]:
    """Figures of the held-out documents: the predictors' and, beside them, those of the static order."""
    static = {key: SelectionRecall() for key in module.keys}
    module.reset_metrics()
    for batch in data.val_dataloader():
        module.observe(batch)
        for key, (_, c_NU) in batch.items():
            static[key].update(module.statistics[key].mean_U.expand(len(c_NU), -1), c_NU)
    learnt = module.figures()
    fixed = {name_of(key): metric.figures() for key, metric in static.items()}
    layers = {
        name: {
            **learnt[name],
            "static_recall_of_mass": fixed[name]["recall_of_mass"],
            "active": module.statistics[key].active,
        }
        for key, name in ((key, name_of(key)) for key in module.keys)
    }
    return {"recall_of_mass": _by_kind(learnt), "static_recall_of_mass": _by_kind(fixed), "layers": layers}


def _by_kind(figures: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    means = mean_recalls(figures)
    return {kind: means[f"recall_of_mass/{kind}"] for kind in KINDS}


def _fit(
    module: PredictorModule,
    data: CacheData,
    config: Config,
    folder: Path,
    steps: int,
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback],
) -> int:
    """Run Lightning's loop and put the best weights into the module, on the processor; the steps that were taken.

    A run that was killed goes on from the end of its last epoch: batches depend on seed and epoch alone, so it ends
    where it would have ended.
    """
    from dejavu.models.load import pick_device  # imports transformers, which nothing else here needs

    checkpoints = folder / "checkpoints"
    best = ModelCheckpoint(
        checkpoints, filename="best", monitor="recall_of_mass", mode="max", save_weights_only=True,
        enable_version_counter=False,
    )  # fmt: skip
    last = ModelCheckpoint(checkpoints, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
    stop = EarlyStopping("recall_of_mass", mode="max", patience=config.trainer.patience)
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="gpu" if pick_device(config.device).type == "cuda" else "cpu",
            devices=config.trainer.devices,
            strategy="auto" if config.trainer.devices == 1 else DDPStrategy(start_method="spawn"),
            plugins=[LightningEnvironment()],  # in a Slurm job Lightning would requeue it, and so would the launcher
            use_distributed_sampler=False,
            max_epochs=config.trainer.epochs,
            max_steps=config.trainer.max_steps if config.trainer.max_steps > 0 else -1,
            logger=(list(loggers) or False) if config.trainer.devices == 1 else False,  # a W&B run cannot travel
            # max_steps may end a run before its first validation, which these two could then not read.
            callbacks=[*([best, stop, last] if steps >= len(data.sampler) else []), *callbacks],
            num_sanity_val_steps=0,
            log_every_n_steps=max(1, min(50, steps, len(data.sampler))),
            enable_progress_bar=interactive(),
            enable_model_summary=False,
            default_root_dir=folder,
        )
        ended = checkpoints / "last.ckpt"
        try:
            trainer.fit(module, data, ckpt_path=str(ended) if ended.exists() else None, weights_only=True)
        except DejavuError:
            shutil.rmtree(checkpoints, ignore_errors=True)  # it would fail there again
            raise
        steps_done = int(module.steps)
        if best.best_model_path:
            module.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
        shutil.rmtree(checkpoints, ignore_errors=True)
    module.to("cpu")
    return steps_done

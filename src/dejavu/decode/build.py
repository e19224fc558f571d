"""From a loaded model and a config to an engine with the selector, budget and storage asked for."""

import numba

from dejavu.decode.choosing import Chooser, Fixed, Predicted, RandomSets
from dejavu.decode.engine import Engine
from dejavu.decode.weights import Weights, pack_predictor, repack
from dejavu.errors import ConfigError, DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.load import LoadedModel
from dejavu.predictors.bundle import Bundle
from dejavu.schema import Config, check_kernel
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.calibration import choose_budget


def make_engine(loaded: LoadedModel, config: Config, bundle: Bundle | None, free: bool = True) -> Engine:
    """The engine of a config; the model's own matrices are freed unless `free` is off.

    Raises ConfigError for a selector, rule or device that the kernels do not have, DataError for a bundle of another
    model or none where one is needed.
    """
    refuse_unknown(loaded, config)
    budget = choose_budget(config.sparsity, loaded.anatomy, bundle).budget
    fingerprint, _ = loaded.fingerprint, loaded.parameters  # both are kept: of what is freed they cannot be had
    if bundle is not None:
        bundle.check_fits(fingerprint, loaded.anatomy)
    elif config.sparsity.selector in ("predictor", "static"):
        raise DataError(f"sparsity.selector={config.sparsity.selector} needs predictors=DIR")
    weights = repack(loaded.model, config.decode.storage, free)
    threads = config.decode.threads or numba.get_num_threads()
    chooser = make_chooser(weights, config, bundle, budget)
    tap = config.predictor.tap if bundle is None else str(bundle.config["tap"])
    decode = config.decode
    return Engine(
        weights, chooser, tap=tap, kv=decode.kv, window=decode.window, threads=threads, overlap=decode.overlap,
        crossover=decode.crossover,
    )  # fmt: skip


def refuse_unknown(loaded: LoadedModel, config: Config) -> None:
    """Raise ConfigError for what backend=kernel cannot do."""
    check_kernel(config.sparsity)
    if loaded.device.type != "cpu":
        raise ConfigError(f"backend=kernel decodes on cpu, not on {loaded.device.type}: use device=cpu")
    model = loaded.model
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise ConfigError(
            f"backend=kernel takes logits from the input embedding and {loaded.name} has another for its output: use "
            "backend=simulate"
        )


def make_chooser(weights: Weights, config: Config, bundle: Bundle | None, budget: Budget) -> Predicted | Chooser | None:
    """Who chooses; None where everything is computed, also by a budget that leaves nothing out."""
    name = config.sparsity.selector
    if name == "dense" or all(kept == weights.units(kind) for kind in KINDS for kept in budget.of(kind)):
        return None
    if name == "random" or bundle is None:
        return RandomSets(weights, budget, config.seed)
    if name == "static":
        return Fixed(bundle, weights, budget)
    for kind in KINDS:
        for layer, kept in enumerate(budget.of(kind)):
            if kept < weights.units(kind):
                weights.predictors[kind, layer] = pack_predictor(bundle.predictor(kind, layer), weights.storage)
    return Predicted(budget)

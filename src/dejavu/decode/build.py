"""From a loaded model and a config to an engine with the selector, budget and storage asked for."""

from collections.abc import Iterable

from dejavu.checks import check_kernel, check_kernel_device
from dejavu.decode.choosing import Chooser, Fixed, Predicted, RandomSets
from dejavu.decode.engine import Engine
from dejavu.decode.weights import Weights, pack_predictor, repack
from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.load import LoadedModel
from dejavu.predictors.bundle import Bundle
from dejavu.schema import Config
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.calibration import Group, choose_budget


def make_engine(loaded: LoadedModel, config: Config, bundle: Bundle | None, free: bool = True) -> Engine:
    """The engine of a config; the model's own matrices are freed unless `free` is off.

    Raises ConfigError for a selector, rule or device that the kernels do not have, DataError for a bundle of another
    model or none where one is needed.
    """
    check_kernel(config)
    check_kernel_device(loaded.device.type)
    budget = choose_budget(config.sparsity, loaded.anatomy, bundle).budget
    fingerprint, _ = loaded.fingerprint, loaded.parameters  # both are kept: of what is freed they cannot be had
    if bundle is not None:
        bundle.check_fits(fingerprint, loaded.anatomy)
    elif config.sparsity.selector in ("predictor", "static"):
        raise DataError(f"sparsity.selector={config.sparsity.selector} needs predictors=DIR")
    weights = repack(loaded.model, config.decode.storage, free)
    chooser = make_chooser(weights, config, bundle, budget)
    tap = config.predictor.tap if bundle is None else str(bundle.config["tap"])
    decode = config.decode
    return Engine(
        weights, chooser, tap=tap, kv=decode.kv, window=decode.window, threads=decode.threads, overlap=decode.overlap,
        crossover=decode.crossover,
    )  # fmt: skip


def make_chooser(weights: Weights, config: Config, bundle: Bundle | None, budget: Budget) -> Predicted | Chooser | None:
    """Who chooses; None where everything is computed, also by a budget that leaves nothing out."""
    name, head_unit = config.sparsity.selector, config.sparsity.head_unit
    if name == "dense" or budget.is_whole(weights):
        return None
    if name == "random" or bundle is None:
        return RandomSets(weights, budget, config.seed, head_unit)
    if name == "static":
        return Fixed(bundle, weights, budget, head_unit)
    thinned = [
        (kind, layer) for kind in KINDS for layer, kept in enumerate(budget.of(kind)) if kept < weights.units(kind)
    ]
    pack_predictors(weights, bundle, thinned, head_unit)
    return Predicted(budget)


def pack_predictors(weights: Weights, bundle: Bundle, groups: Iterable[Group], head_unit: str) -> None:
    """Give the engine the bundle's predictors of these groups (a kind in a layer), in its own storage."""
    for kind, layer in groups:
        together = weights.together(kind, head_unit)
        weights.predictors[kind, layer] = pack_predictor(bundle.predictor(kind, layer), weights.storage, together)

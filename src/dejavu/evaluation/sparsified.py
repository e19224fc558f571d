"""From a config to a scorer: the model with the selector, budget and positions asked for."""

from dejavu.errors import ConfigError, DataError
from dejavu.evaluation.scoring import Scorer
from dejavu.models.load import LoadedModel
from dejavu.predictors.bundle import Bundle
from dejavu.schema import Config
from dejavu.sparsity.budget import make_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Oracle, Predicted, Random, Selector, Static


def make_scorer(loaded: LoadedModel, config: Config, bundle: Bundle | None) -> Scorer:
    """A scorer over the loaded model; its `sparsifier` still has to be attached. Dense has none."""
    sparsity = config.sparsity
    if sparsity.selector == "dense":
        return Scorer(loaded, batch_size=config.batch_size)
    if sparsity.rule == "nonzero" and not loaded.anatomy.relu:
        raise ConfigError(f"sparsity.rule=nonzero needs a ReLU model: neurons of {loaded.name} are never exactly zero")
    sparsifier = Sparsifier(
        loaded.anatomy,
        make_selector(loaded, config, bundle),
        make_budget(sparsity, loaded.anatomy),
        rule=sparsity.rule,
        tap=config.predictor.tap if bundle is None else bundle.config["tap"],
    )
    return Scorer(loaded, sparsifier, sparsity.positions, sparsity.fraction, config.batch_size)


def make_selector(loaded: LoadedModel, config: Config, bundle: Bundle | None) -> Selector:
    """The selector named in the config. Raises DataError when it needs a bundle that does not fit the model."""
    name = config.sparsity.selector
    if name == "oracle":
        return Oracle()
    if name == "random":
        return Random(config.seed, {kind: loaded.anatomy.units(kind) for kind in ("mlp", "heads")})
    if bundle is None:
        raise DataError(f"sparsity.selector={name} needs predictors=DIR")
    bundle.check_fits(loaded.fingerprint, loaded.anatomy)
    return Static(bundle) if name == "static" else Predicted(bundle, loaded.device)

"""From a config to a scorer: the model with the selector, budget and positions asked for."""

from pathlib import Path

from dejavu.corpora.blocks import encode_documents, pack
from dejavu.corpora.sources import documents
from dejavu.decode.build import make_engine
from dejavu.errors import ConfigError, DataError
from dejavu.evaluation.decoded import EngineScorer
from dejavu.evaluation.probe import thresholds
from dejavu.evaluation.scoring import Scorer, Scoring
from dejavu.models.contribution import Contributions
from dejavu.models.load import LoadedModel
from dejavu.predictors.bundle import Bundle
from dejavu.predictors.network import default_rank
from dejavu.schema import NEURONS_ONLY, Config
from dejavu.sparsity.calibration import choose_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Oracle, Predicted, Prompt, Random, Selector, Static
from dejavu.sparsity.training_free import Gate, LowRank, SignBits


def make_scoring(loaded: LoadedModel, config: Config, bundle: Bundle | None) -> Scoring:
    """What scores a config's tasks: the engine that decodes for backend=kernel, else the masked model, calibrated."""
    if config.backend == "kernel":
        engine = make_engine(loaded, config, bundle)
        return EngineScorer(loaded, engine, config.batch_size)
    scorer = make_scorer(loaded, config, bundle)
    calibrate_thresholds(scorer, config)
    return scorer


def make_scorer(loaded: LoadedModel, config: Config, bundle: Bundle | None) -> Scorer:
    """A scorer over the loaded model; its `sparsifier` still has to be attached. Dense has none."""
    sparsity = config.sparsity
    if sparsity.selector == "dense":
        return Scorer(loaded, batch_size=config.batch_size)
    if sparsity.rule == "nonzero" and not loaded.anatomy.relu:
        raise ConfigError(f"sparsity.rule=nonzero needs a ReLU model: neurons of {loaded.name} are never exactly zero")
    point = choose_budget(sparsity, loaded.anatomy, bundle)
    sparsifier = Sparsifier(
        loaded.anatomy,
        make_selector(loaded, config, bundle),
        point.budget,
        rule=sparsity.rule,
        tap=config.predictor.tap if bundle is None else bundle.config["tap"],
        head_unit=sparsity.head_unit,
        recall_tokens=config.evaluation.recall_tokens,
    )
    sparsifier.thresholds |= {
        (kind, layer): cut for kind, cuts in point.thresholds.items() for layer, cut in enumerate(cuts)
    }
    return Scorer(loaded, sparsifier, sparsity.positions, sparsity.fraction, config.batch_size)


def make_selector(loaded: LoadedModel, config: Config, bundle: Bundle | None) -> Selector:
    """The selector named in the config. Raises DataError when it needs a bundle that does not fit the model."""
    name, parts = config.sparsity.selector, loaded.anatomy
    if name == "oracle":
        return Oracle()
    if name == "prompt":
        return Prompt()
    if name == "random":
        return Random(config.seed, {kind: parts.units(kind) for kind in ("mlp", "heads")})
    if name in NEURONS_ONLY:
        norms = Contributions(parts)
        if name == "svd":
            return LowRank(parts, norms, config.predictor.rank or default_rank(parts.width))
        return Gate(parts, norms) if name == "gate" else SignBits(parts, norms)
    if bundle is None:
        raise DataError(f"sparsity.selector={name} needs predictors=DIR")
    bundle.check_fits(loaded.fingerprint, parts)
    return Static(bundle) if name == "static" else Predicted(bundle, loaded.device)


def calibrate_thresholds(scorer: Scorer, config: Config) -> None:
    """Set every layer's threshold in one forward pass over text of the train split of `config.corpus`.

    Those of a calibrated bundle stay.
    Raises DataError when that text is shorter than one block.
    """
    sparsifier, loaded = scorer.sparsifier, scorer.loaded
    if sparsifier is None or sparsifier.rule != "threshold" or sparsifier.thresholds:
        return
    root = None if config.data_root is None else Path(config.data_root)
    texts = [document.text for document in documents(config.corpus.name, "train", root, config.corpus)]
    length = min(config.corpus.block, loaded.anatomy.context)
    blocks_NT, _ = pack(encode_documents(texts, loaded.tokenizer, loaded.anatomy.separator), length)
    blocks_NT = blocks_NT[: max(1, config.evaluation.calibration_tokens // length)]
    if not len(blocks_NT):
        raise DataError(f"corpus {config.corpus.name} is shorter than one block of {length} tokens: lower corpus.block")
    thresholds(sparsifier, loaded, blocks_NT)

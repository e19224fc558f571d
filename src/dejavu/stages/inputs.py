"""Which cache and bundle a stage reads, and whether its text can be had: settled before anything heavy is imported."""

import logging
from pathlib import Path

from dejavu.activations.manifest import cache_id, read_manifest
from dejavu.checks import check_kernel
from dejavu.corpora.available import check_available, check_benchmark
from dejavu.errors import ConfigError, DataError
from dejavu.models.packaged import packaged_file
from dejavu.predictors.manifest import bundle_id, read_bundle_config
from dejavu.schema import Config
from dejavu.tracking.artifacts import FILES, KEYS

log = logging.getLogger("dejavu")

STAGES = {  # name -> (what it does, inputs it reads)
    "pretrain": ("train opt-tiny, the model in the package, from text that needs no download", ()),
    "collect": ("record taps and contributions of a dense model on a corpus", ()),
    "train": ("train predictors of heads and neurons from a cache", ("cache",)),
    "calibrate": ("find how much each layer can leave out, and keep it in a new bundle", ("bundle",)),
    "merge": ("make one bundle of several that were trained layer by layer", ()),
    "evaluate": ("score tasks with a sparsified model", ("bundle",)),
    "generate": ("decode a prompt with the engine that reads only the chosen rows", ("bundle",)),
    "benchmark": ("time tokens, dense and sparse, beside other engines and the memory's floor", ("bundle",)),
    "doctor": ("say what this machine has and where a config's model and data would come from", ()),
    "lineage": ("say from which bundle and cache a run, bundle or cache (run_dir=DIR) came", ()),
    "dashboard": (
        "print the W&B dashboard of a config's tasks; `dejavu dashboard publish` saves it in the project",
        (),
    ),
    "report": ("make one HTML page of finished runs, which opens without a network", ()),
    "pipeline": ("collect, train and evaluate a grid of ratios and selectors, then table and picture", ()),
}
QUESTIONS = ("doctor", "lineage", "dashboard", "report")  # answered at once: they leave no folder and are never skipped


def check_data(stage: str, config: Config) -> None:
    """Raise DataError at once when the stage's text is neither in `data_root` nor to be had from the hub.

    Raises ConfigError for a stage that could not do anything with this config.
    """
    check_backend(stage, config)
    root = None if config.data_root is None else Path(config.data_root)
    if stage in ("collect", "calibrate", "pipeline", "pretrain"):
        check_available(config.corpus.name, "train", root, config.corpus.hub)
    if stage in ("evaluate", "pipeline"):
        if not config.tasks.run:
            raise ConfigError(
                "tasks has nothing to score: choose tasks=embedded or a list such as tasks=[pydocs_token]"
            )
        for task in config.tasks.run.values():
            if task.kind == "lm_eval":
                check_benchmark(task.corpus, root)
            else:
                check_available(task.corpus, "test", root, task.hub)
    if stage == "evaluate" and config.sparsity.rule == "threshold" and config.sparsity.selector != "dense":
        check_available(config.corpus.name, "train", root, config.corpus.hub)
    model = config.model
    if (
        stage in ("collect", "calibrate", "evaluate", "generate", "pipeline")
        and model.path is None
        and model.package
        and model.gguf
    ):
        packaged_file(model.package, model.gguf)


def check_backend(stage: str, config: Config) -> None:
    """Raise ConfigError for a stage that the config's back end cannot serve."""
    sparsity, kernel = config.sparsity, config.backend == "kernel"
    if stage == "collect" and config.collect.on_policy and sparsity.selector != "predictor":
        raise ConfigError(
            f"collect.on_policy=true records what predictors leave: use sparsity.selector=predictor, not "
            f"{sparsity.selector}"
        )
    if config.model.device_map is not None and (kernel or stage == "generate"):
        raise ConfigError(
            f"model.device_map={config.model.device_map} works with backend=simulate: the engine that decodes repacks "
            "all weights in memory, so leave it out or use backend=simulate"
        )
    if stage == "calibrate" and sparsity.selector not in ("predictor", "oracle", "static"):
        raise ConfigError(
            f"dejavu calibrate finds budgets for sparsity.selector=predictor, oracle or static, not {sparsity.selector}"
        )
    if stage == "calibrate" and sparsity.head_unit != "head":
        raise ConfigError("dejavu calibrate counts single heads: use sparsity.head_unit=head")
    if stage == "generate":
        check_kernel(config)
    if stage == "benchmark" and not kernel:
        raise ConfigError(
            f"dejavu benchmark measures backend=kernel: backend={config.backend} masks a dense model and has no speed"
        )
    if stage == "evaluate" and kernel and sparsity.selector != "dense" and sparsity.positions != "decode":
        raise ConfigError(f"backend=kernel decodes, so it needs sparsity.positions=decode, not {sparsity.positions}")


def resolve_inputs(stage: str, config: Config) -> dict[str, str | None]:
    """Fill `config.cache` and `config.predictors` where unset and return their ids.

    Raises DataError when none fits or the folder named is not one.
    """
    ids: dict[str, str | None] = {"cache": None, "bundle": None}
    needed = STAGES[stage][1]
    if "cache" in needed:
        config.cache = str(_found(config, config.cache, "cache"))
        ids["cache"] = cache_id(Path(config.cache))
    random = config.model.random_init and stage == "benchmark"  # whose predictors are random too
    chosen = config.sparsity.selector in ("predictor", "static") and not random
    chosen = chosen or config.sparsity.budget == "calibrated" or stage == "calibrate"
    if ("bundle" in needed and chosen) or (stage == "collect" and config.collect.on_policy):
        config.predictors = str(_found(config, config.predictors, "bundle"))
        ids["bundle"] = bundle_id(Path(config.predictors))
    return ids


_MAKERS = {"cache": "dejavu collect", "bundle": "dejavu train"}


def _found(config: Config, named: str | None, what: str) -> Path:
    """The folder that was named, or the newest that fits; that choice is told, since it changes as runs are added."""
    if named is not None:
        return given(named, what)
    newest = _newest(config, what)
    log.info("%s: taking the newest for %s, %s", KEYS[what], config.model.name, newest)
    return newest


def given(path: str, what: str) -> Path:
    """The cache or bundle folder meant by a path: itself, or a run's folder that holds one."""
    for folder in (Path(path), Path(path) / what):
        if (folder / FILES[what]).is_file():
            return folder
    raise DataError(
        f"{KEYS[what]}={path} holds no complete {what} ({FILES[what]} is missing): `{_MAKERS[what]}` makes one"
    )


def _newest(config: Config, what: str) -> Path:
    """The newest cache or bundle below the runs folder that was made with this model."""
    read = read_manifest if what == "cache" else read_bundle_config
    found = sorted(Path(config.runs).glob(f"**/{what}/{FILES[what]}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        if read(path.parent)["model"]["name"] == config.model.name:
            return path.parent
    raise DataError(
        f"no {what} for {config.model.name} in {config.runs}: run `{_MAKERS[what]}` first "
        f"or name one with {KEYS[what]}=DIR"
    )

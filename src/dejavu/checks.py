"""Whether the values of a config are in range, and go together: the first that does not raises ConfigError.

Each message names the key, its value and what is allowed. Nothing heavy is imported here.
"""

import re
from collections.abc import Mapping
from typing import Any

from dejavu.errors import ConfigError
from dejavu.schema import (
    BACKENDS,
    BENCHMARKS,
    BUDGETS,
    CONTENDERS,
    CORPORA,
    DEVICES,
    DTYPES,
    ENCODINGS,
    HEAD_UNITS,
    KERNEL_DEVICES,
    KERNEL_SELECTORS,
    LABELS,
    LAUNCHERS,
    METHODS,
    NOTEBOOKS,
    PARTS,
    PLACINGS,
    POSITIONS,
    RULES,
    SELECTORS,
    STORAGES,
    STRATEGIES,
    TAPS,
    TASK_KINDS,
    TRACKING_MODES,
    WEIGHTINGS,
    Calibrate,
    Config,
    Launcher,
    Model,
    Sparsity,
    Trainer,
)

SKIPPED = "the fraction that is NOT computed"


def check(config: Config) -> None:
    """Raise ConfigError for the first value out of range."""
    check_words(config)
    check_placing(config.model)
    check_sparsity(config.sparsity)
    check_calibrate(config.calibrate)
    check_trainer(config.trainer)
    check_launcher(config.launcher)
    check_shares(config)
    check_tasks(config)
    check_positive(config)
    if config.backend == "kernel":
        check_kernel(config)


def check_words(config: Config) -> None:
    """Raise ConfigError for the first value that is none of the words allowed."""
    sparsity, predictor, decode = config.sparsity, config.predictor, config.decode
    one_of("device", config.device, DEVICES)
    one_of("dtype", config.dtype, DTYPES)
    one_of("backend", config.backend, BACKENDS)
    one_of("decode.storage", decode.storage, STORAGES)
    one_of("decode.kv", decode.kv, ("lazy", "all"))
    one_of("sparsity.selector", sparsity.selector, SELECTORS)
    one_of("sparsity.rule", sparsity.rule, RULES)
    one_of("sparsity.positions", sparsity.positions, POSITIONS)
    one_of("sparsity.budget", sparsity.budget, BUDGETS)
    one_of("sparsity.part", sparsity.part, PARTS)
    one_of("sparsity.head_unit", sparsity.head_unit, HEAD_UNITS)
    one_of("predictor.tap", predictor.tap, TAPS)
    one_of("predictor.activation", predictor.activation, ("relu", "none"))
    one_of("predictor.label", predictor.label, LABELS)
    one_of("predictor.weighting", predictor.weighting, WEIGHTINGS)
    one_of("collect.encoding", config.collect.encoding, ENCODINGS)
    one_of("corpus.name", config.corpus.name, CORPORA)
    one_of("report.notebook", config.report.notebook, NOTEBOOKS)
    one_of("tracking.mode", config.tracking.mode, TRACKING_MODES)
    for storage in config.benchmark.storages:
        one_of("benchmark.storages", storage, STORAGES)
    for budget in config.benchmark.budgets or []:
        one_of("benchmark.budgets", budget, BUDGETS)
        check_units_counted(budget, config.sparsity.head_unit)
    for contender in config.benchmark.contenders:
        one_of("benchmark.contenders", contender, CONTENDERS)
    for selector in config.pipeline.selectors:
        one_of("pipeline.selectors", selector, SELECTORS)


def check_shares(config: Config) -> None:
    """Raise ConfigError for the first share, probability or temperature out of range."""
    predictor, generate = config.predictor, config.generate
    within("predictor.label_density", predictor.label_density, 1e-9, 1, "the share of units that count as the best")
    for key, ratios in {"benchmark": config.benchmark.ratios, "pipeline": config.pipeline.ratios}.items():
        for ratio in ratios:
            within(f"{key}.ratios", ratio, 0, 1, SKIPPED)
    if config.model.active_share is not None:
        within("model.active_share", config.model.active_share, 0, 1, "the share of neurons active for a token")
    within("collect.top", config.collect.top, 1e-9, 1, "the share of units whose contributions are stored")
    crossover = "the share of a layer's units above which it runs whole"
    within("decode.crossover", config.decode.crossover, 0, 1, crossover)
    if generate.top_p is not None:
        within("generate.top_p", generate.top_p, 1e-9, 1, "the probability that the tokens left share")
    within("generate.temperature", generate.temperature, 0, 100, "0 for greedy, else what logits are divided by")


def check_positive(config: Config) -> None:
    """Raise ConfigError for the first count or size that is not above 0."""
    above_zero(
        {
            "corpus.tokens": config.corpus.tokens, "corpus.block": config.corpus.block,
            "batch_size": config.batch_size, "predictor.rank": config.predictor.rank,
            "predictor.first_rank": config.predictor.first_rank,
            "evaluation.calibration_tokens": config.evaluation.calibration_tokens,
            "decode.window": config.decode.window, "decode.threads": config.decode.threads,
            "generate.new_tokens": config.generate.new_tokens, "generate.top_k": config.generate.top_k,
            "benchmark.new_tokens": config.benchmark.new_tokens, "benchmark.repeats": config.benchmark.repeats,
            "benchmark.memory_gb": config.benchmark.memory_gb,
            "benchmark.prompts": min(config.benchmark.prompts, default=0),
        }
    )  # fmt: skip


def check_tasks(config: Config) -> None:
    """Raise ConfigError for the first value of a task that is out of range."""
    above_zero({"tasks.limit": config.tasks.limit})
    for name, task in config.tasks.run.items():
        one_of(f"tasks.run.{name}.kind", task.kind, TASK_KINDS)
        one_of(f"tasks.run.{name}.corpus", task.corpus, BENCHMARKS if task.kind == "lm_eval" else CORPORA)
        above_zero({f"tasks.run.{name}.{key}": getattr(task, key) for key in ("limit", "context_tokens", "choices")})


def check_sparsity(sparsity: Sparsity) -> None:
    """Raise ConfigError for the first ratio out of range, and for choices that do not go together."""
    ratios: dict[str, list[Any]] = {"mlp": [sparsity.mlp], "heads": [sparsity.heads], "ratio": [sparsity.ratio]}
    ratios |= {"mlp_layers": sparsity.mlp_layers or [], "heads_layers": sparsity.heads_layers or []}
    for key, values in ratios.items():
        for value in values:
            if value is not None:
                within(f"sparsity.{key}", value, 0, 1, SKIPPED)
    check_schedule("sparsity.mlp_schedule", sparsity.mlp_schedule)
    check_schedule("sparsity.heads_schedule", sparsity.heads_schedule)
    within("sparsity.fraction", sparsity.fraction, 0, 1, "the share of positions, from the end, that run sparse")
    check_units_counted(sparsity.budget, sparsity.head_unit)
    if sparsity.rule == "nonzero" and sparsity.selector not in ("oracle", "dense"):
        raise ConfigError(f"sparsity.rule=nonzero needs sparsity.selector=oracle, got {sparsity.selector!r}")
    if sparsity.rule == "threshold" and sparsity.selector in ("random", "static", "prompt"):
        raise ConfigError(
            f"sparsity.rule=threshold needs a selector whose scores differ from token to token: "
            f"{sparsity.selector} gives the same number to all, use sparsity.rule=topk"
        )


def check_units_counted(budget: str, head_unit: str) -> None:
    """Raise ConfigError for a kind of budget that does not count what is chosen."""
    if budget == "calibrated" and head_unit == "group":
        raise ConfigError("a calibrated budget counts single heads, so it needs sparsity.head_unit=head, not group")


def check_schedule(key: str, steps: list[Any] | None) -> None:
    """Raise ConfigError unless a schedule begins at depth 0, rises, and names ratios."""
    if steps is None:
        return
    try:
        pairs = [(float(depth), float(ratio)) for depth, ratio in steps]
    except (TypeError, ValueError):
        pairs = []
    depths = [depth for depth, _ in pairs]
    if depths[:1] != [0]:
        raise ConfigError(f"{key}={steps} is not of the form [[0,RATIO],[DEPTH,RATIO],...]")
    if depths != sorted(set(depths)) or depths[-1] >= 1:
        raise ConfigError(f"{key}={steps} names depths that do not rise from 0 to below 1")
    for _, ratio in pairs:
        within(key, ratio, 0, 1, "the fraction that is NOT computed from a depth on")


def check_placing(model: Model) -> None:
    """Raise ConfigError for a device_map that transformers does not know and for sizes without a unit."""
    limits = {"model.gpu_memory": model.gpu_memory, "model.cpu_memory": model.cpu_memory}
    if model.device_map is None:
        for key, value in (limits | {"model.offload": model.offload}).items():
            if value is not None:
                raise ConfigError(f"{key}={value} says where layers go, which needs model.device_map=auto")
        return
    one_of("model.device_map", model.device_map, PLACINGS)
    if model.random_init:
        raise ConfigError("model.random_init=true makes its weights in one place: leave model.device_map out")
    for key, size in limits.items():
        if size is not None and not re.fullmatch(r"\d+(\.\d+)?[KMG]i?B", size):
            raise ConfigError(f"{key}={size} is no size: write a number and its unit, such as 70GiB or 500MB")


def check_trainer(trainer: Trainer) -> None:
    """Raise ConfigError for the first value of training that is out of range."""
    one_of("trainer.strategy", trainer.strategy, STRATEGIES)
    if (trainer.strategy == "auto") != (trainer.devices == 1):
        raise ConfigError(
            f"trainer.devices={trainer.devices} and trainer.strategy={trainer.strategy}: several processes need "
            "trainer.strategy=ddp_spawn, one needs auto"
        )
    within("trainer.held_out", trainer.held_out, 1e-9, 0.5, "the share of the cache's documents used for validation")
    keys = ("epochs", "batch_tokens", "learning_rate", "devices", "checkpoint_steps", "patience")
    above_zero({f"trainer.{key}": getattr(trainer, key) for key in keys})


def check_launcher(launcher: Launcher) -> None:
    """Raise ConfigError for the first value of the launcher that is out of range."""
    one_of("launcher.name", launcher.name, LAUNCHERS)
    if launcher.jobs < 1 and launcher.jobs != -1:
        raise ConfigError(f"launcher.jobs={launcher.jobs} is out of range: 1 or more, or -1 for one a core")
    above_zero({f"launcher.{key}": getattr(launcher, key) for key in ("threads", "timeout_min", "array_parallelism")})


def check_calibrate(calibrate: Calibrate) -> None:
    """Raise ConfigError for the first value of the stage calibrate that is out of range."""
    one_of("calibrate.method", calibrate.method, METHODS)
    for target in calibrate.targets:
        within("calibrate.targets", target, 1e-9, 1, "a share of the body's bytes that is NOT read")
    for level in calibrate.levels:
        within("calibrate.levels", level, 1e-9, 1, "the share of a group's units that is computed")
    if calibrate.target_recall is not None:
        within("calibrate.target_recall", calibrate.target_recall, 0, 1, "the recall of mass of every group")
    if calibrate.max_perplexity_increase is not None:
        within("calibrate.max_perplexity_increase", calibrate.max_perplexity_increase, 0, 10, "0.01 is one per cent")
    if not calibrate.targets:
        raise ConfigError("calibrate.targets is empty: name shares of the body's bytes, such as [0.5,0.75]")
    above_zero({"calibrate.tokens": calibrate.tokens})


def check_kernel(config: Config) -> None:
    """Raise ConfigError for a selector, a rule or a device that the engine that decodes does not have."""
    sparsity = config.sparsity
    if config.device != "auto":
        check_kernel_device(config.device)
    if sparsity.selector not in KERNEL_SELECTORS:
        raise ConfigError(
            f"backend=kernel has no selector {sparsity.selector}, which needs every unit computed: choose one of "
            f"{', '.join(KERNEL_SELECTORS)}, or backend=simulate"
        )
    if sparsity.rule != "topk":
        raise ConfigError(f"backend=kernel knows sparsity.rule=topk so far, not {sparsity.rule}: use backend=simulate")


def check_kernel_device(device: str) -> None:
    """Raise ConfigError for a device that no kernels exist for."""
    if device not in KERNEL_DEVICES:
        raise ConfigError(
            f"backend=kernel has no kernels for {device}, only for {', '.join(KERNEL_DEVICES)}: use "
            f"device={KERNEL_DEVICES[0]}, or backend=simulate"
        )


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}={value} is not known: choose one of {', '.join(allowed)}")


def within(key: str, value: float, low: float, high: float, meaning: str) -> None:
    """Raise ConfigError unless low <= value <= high (NaN is outside)."""
    if not low <= value <= high:
        raise ConfigError(f"{key}={value} is out of range: it is {meaning}, from {low:g} to {high:g}")


def above_zero(values: Mapping[str, float | None]) -> None:
    """Raise ConfigError for the first value that is neither unset nor above 0."""
    for key, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{key}={value} is out of range: it must be above 0")

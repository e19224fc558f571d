"""Typed schema of every config. Values and their meaning stand in conf/*.yaml, checks of ranges stand here.

`from_config` turns a composed Hydra config into these dataclasses; a wrong key or type is refused by OmegaConf while
composing, a value out of range by `check`. This module imports neither torch nor any other heavy package.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dejavu.errors import ConfigError

SELECTORS = ("dense", "random", "static", "prompt", "svd", "sign", "gate", "predictor", "oracle")
NEURONS_ONLY = ("svd", "sign", "gate")  # training-free estimates from the MLP's own weights: they know no heads
RULES = ("topk", "threshold", "nonzero")
POSITIONS = ("all", "decode", "last_fraction", "last")
TAPS = ("overlap", "direct", "previous")
STRATEGIES = ("auto", "ddp_spawn")
PARTS = ("both", "mlp", "heads")
HEAD_UNITS = ("head", "group")
METHODS = ("loss", "recall", "uniform")
BUDGETS = ("uniform", "calibrated")
LABELS = ("contribution", "amount", "top", "nonzero")
WEIGHTINGS = ("none", "contribution")
DEVICES = ("auto", "cpu", "cuda")
PLACINGS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = ("float32", "bfloat16", "float16")
ENCODINGS = ("auto", "sparse", "top", "dense")
TASK_KINDS = ("rolling", "token_perplexity", "continuation", "lm_eval")
BENCHMARKS = ("winogrande", "openbookqa", "wikitext", "c4", "piqa", "copa", "rte", "cb", "lambada_openai")
CORPORA = ("pydocs", "wikitext", "c4", "openbookqa", "mixture", "opt-tiny-text")
BACKENDS = ("simulate", "kernel")
KERNEL_DEVICES = ("cpu",)
KERNEL_SELECTORS = ("dense", "predictor", "static", "random")
STORAGES = ("float32", "bfloat16", "int8")
CONTENDERS = ("hf-eager", "hf-compile", "ctranslate2", "dejavu")
NOTEBOOKS = ("sparsity_vs_accuracy", "why_it_works", "latency", "predictors")
TRACKING_MODES = ("offline", "online", "off")
LAUNCHERS = ("local", "joblib", "submitit_local", "submitit_slurm")


@dataclass
class Model:
    name: str = "opt-tiny"
    hub: str | None = None
    path: str | None = None
    package: str | None = None
    gguf: str | None = None
    separator: str | None = None
    device_map: str | None = None
    gpu_memory: str | None = None
    cpu_memory: str | None = None
    offload: str | None = None
    random_init: bool = False
    active_share: float | None = None
    architecture: dict[str, Any] = field(default_factory=dict)


@dataclass
class Corpus:
    name: str = "pydocs"
    tokens: int = 200_000
    block: int = 256
    hub: str | None = None
    hub_config: str | None = None


@dataclass
class Collect:
    encoding: str = "auto"
    top: float = 0.5
    layers: list[int] | None = None
    on_policy: bool = False


@dataclass
class Sparsity:
    selector: str = "predictor"
    rule: str = "topk"
    positions: str = "all"
    fraction: float = 0.5
    budget: str = "uniform"
    mlp: float = 0.75
    heads: float = 0.75
    mlp_layers: list[float] | None = None
    heads_layers: list[float] | None = None
    mlp_schedule: list[Any] | None = None  # [depth, ratio] pairs; OmegaConf's nested lists would refuse a whole number
    heads_schedule: list[Any] | None = None
    dense_layers: list[float] = field(default_factory=list)
    part: str = "both"
    head_unit: str = "head"
    ratio: float | None = None
    point: str | None = None


@dataclass
class Predictor:
    tap: str = "overlap"
    rank: int | None = None
    first_rank: int | None = None
    norm: bool = True
    activation: str = "relu"
    bias: bool = True
    trunk: bool = False
    label: str = "contribution"
    label_density: float = 0.25
    weighting: str = "none"
    layers: list[int] | None = None


@dataclass
class Trainer:
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    warmup_steps: int = 100
    batch_tokens: int = 1024
    epochs: int = 4
    patience: int = 2
    held_out: float = 0.05
    max_steps: int = -1
    strategy: str = "auto"
    devices: int = 1
    checkpoint_steps: int = 200


@dataclass
class Pretrain:
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    ffn: int = 1024
    positions: int = 512
    vocabulary: int = 4096
    tokens: int = 14_000_000
    packages: list[str] = field(default_factory=list)


@dataclass
class Calibrate:
    method: str = "loss"
    targets: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.65, 0.75, 0.9])
    levels: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75])
    tokens: int = 16_384
    target_recall: float | None = None
    max_perplexity_increase: float | None = None


@dataclass
class Task:
    kind: str = "rolling"
    corpus: str = "pydocs"
    hub: str | None = None
    hub_config: str | None = None
    limit: int | None = None
    metrics: list[str] = field(default_factory=list)
    context_tokens: int = 48
    continuation_tokens: int = 16
    choices: int = 4
    with_context: bool = True


@dataclass
class Tasks:
    limit: int | None = None
    run: dict[str, Task] = field(default_factory=dict)


@dataclass
class Evaluation:
    stock_bos: bool = False
    calibration_tokens: int = 4096
    recall_tokens: int = 2048
    samples: int = 100


@dataclass
class Decode:
    storage: str = "bfloat16"
    kv: str = "lazy"
    window: int = 16
    threads: int | None = None
    overlap: bool = True
    crossover: float = 0.9


@dataclass
class Generate:
    prompt: str = "The standard library"
    new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    ignore_end: bool = False


@dataclass
class Benchmark:
    contenders: list[str] = field(default_factory=lambda: list(CONTENDERS))
    storages: list[str] = field(default_factory=lambda: list(STORAGES))
    ratios: list[float] = field(default_factory=lambda: [0.5, 0.75, 0.9])
    prompts: list[int] = field(default_factory=lambda: [128, 512, 1024])
    new_tokens: int = 8
    repeats: int = 5
    memory_gb: float | None = None


@dataclass
class Tracking:
    mode: str = "offline"
    entity: str | None = None
    project: str = "dejavu"
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class Launcher:
    name: str = "local"
    jobs: int = 2
    threads: int | None = None
    partition: str | None = None
    timeout_min: int = 240
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    gpus_per_node: int | None = None
    array_parallelism: int = 16
    setup: list[str] = field(default_factory=list)
    additional_parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Pipeline:
    ratios: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.65, 0.75, 0.9])
    selectors: list[str] = field(default_factory=lambda: ["oracle", "predictor", "static", "random"])


@dataclass
class Report:
    notebook: str = "sparsity_vs_accuracy"


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    corpus: Corpus = field(default_factory=Corpus)
    collect: Collect = field(default_factory=Collect)
    sparsity: Sparsity = field(default_factory=Sparsity)
    predictor: Predictor = field(default_factory=Predictor)
    trainer: Trainer = field(default_factory=Trainer)
    calibrate: Calibrate = field(default_factory=Calibrate)
    pretrain: Pretrain = field(default_factory=Pretrain)
    tasks: Tasks = field(default_factory=Tasks)
    evaluation: Evaluation = field(default_factory=Evaluation)
    decode: Decode = field(default_factory=Decode)
    generate: Generate = field(default_factory=Generate)
    benchmark: Benchmark = field(default_factory=Benchmark)
    tracking: Tracking = field(default_factory=Tracking)
    launcher: Launcher = field(default_factory=Launcher)
    pipeline: Pipeline = field(default_factory=Pipeline)
    report: Report = field(default_factory=Report)
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    batch_size: int = 16
    backend: str = "simulate"
    data_root: str | None = None
    cache: str | None = None
    predictors: str | None = None
    merge: list[str] = field(default_factory=list)
    runs: str = "runs"
    run_dir: str | None = None
    force: bool = False
    fetch: bool = False
    publish: bool = False
    devices: str | None = None


def from_config(config: DictConfig) -> Config:
    """The typed, checked form of a composed config. Raises ConfigError with the key, its value and what is allowed."""
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), config))
    assert isinstance(typed, Config)
    resolve_point(typed.sparsity)
    forget_what_dense_ignores(typed.sparsity)
    check(typed)
    return typed


def resolve_point(sparsity: Sparsity) -> None:
    """Fill selector, ratio, rule and part from `point`, which is then unset: both ways of saying it are one config.

    Raises ConfigError for a point of another form.
    """
    if sparsity.point is None:
        return
    selector, *fields = sparsity.point.split("@")
    try:
        sparsity.selector, sparsity.ratio = selector, float(fields[0])
    except (IndexError, ValueError):
        raise ConfigError(
            f"sparsity.point={sparsity.point} is not of the form SELECTOR@RATIO, with @RULE or @PART after it if wanted"
        ) from None
    for word in fields[1:]:
        one_of("sparsity.point's rule or part", word, (*RULES, *PARTS))
        if word in RULES:
            sparsity.rule = word
        else:
            sparsity.part = word
    sparsity.point = None


def forget_what_dense_ignores(sparsity: Sparsity) -> None:
    """Nothing is skipped by the dense model, so whatever ratios are said beside it, it is one config and one run."""
    if sparsity.selector == "dense":
        plain = Sparsity(selector="dense", ratio=0.0)
        for key in ("mlp", "heads", "dense_layers", "part", "ratio", "budget", "rule", "head_unit"):
            setattr(sparsity, key, getattr(plain, key))
        for key in ("mlp_layers", "heads_layers", "mlp_schedule", "heads_schedule"):
            setattr(sparsity, key, None)


def check(config: Config) -> None:
    """Raise ConfigError for the first value out of range."""
    sparsity, predictor, trainer, corpus = config.sparsity, config.predictor, config.trainer, config.corpus
    one_of("device", config.device, DEVICES)
    one_of("dtype", config.dtype, DTYPES)
    one_of("backend", config.backend, BACKENDS)
    check_placing(config.model)
    one_of("decode.storage", config.decode.storage, STORAGES)
    one_of("decode.kv", config.decode.kv, ("lazy", "all"))
    one_of("sparsity.selector", sparsity.selector, SELECTORS)
    one_of("sparsity.rule", sparsity.rule, RULES)
    one_of("sparsity.positions", sparsity.positions, POSITIONS)
    one_of("sparsity.budget", sparsity.budget, BUDGETS)
    check_calibrate(config.calibrate)
    one_of("sparsity.part", sparsity.part, PARTS)
    one_of("sparsity.head_unit", sparsity.head_unit, HEAD_UNITS)
    if sparsity.head_unit == "group" and sparsity.budget == "calibrated":
        raise ConfigError(
            "sparsity.budget=calibrated counts single heads, so it needs sparsity.head_unit=head, not group"
        )
    one_of("predictor.tap", predictor.tap, TAPS)
    one_of("trainer.strategy", trainer.strategy, STRATEGIES)
    if (trainer.strategy == "auto") != (trainer.devices == 1):
        raise ConfigError(
            f"trainer.devices={trainer.devices} and trainer.strategy={trainer.strategy}: several processes need "
            "trainer.strategy=ddp_spawn, one needs auto"
        )
    one_of("predictor.activation", predictor.activation, ("relu", "none"))
    one_of("predictor.label", predictor.label, LABELS)
    one_of("predictor.weighting", predictor.weighting, WEIGHTINGS)
    within("predictor.label_density", predictor.label_density, 1e-9, 1, "the share of units that count as the best")
    one_of("collect.encoding", config.collect.encoding, ENCODINGS)
    one_of("corpus.name", corpus.name, CORPORA)
    one_of("report.notebook", config.report.notebook, NOTEBOOKS)
    one_of("tracking.mode", config.tracking.mode, TRACKING_MODES)
    one_of("launcher.name", config.launcher.name, LAUNCHERS)
    if config.launcher.jobs < 1 and config.launcher.jobs != -1:
        raise ConfigError(f"launcher.jobs={config.launcher.jobs} is out of range: 1 or more, or -1 for one a core")
    ratios: dict[str, list[Any]] = {"mlp": [sparsity.mlp], "heads": [sparsity.heads], "ratio": [sparsity.ratio]}
    ratios |= {"mlp_layers": sparsity.mlp_layers or [], "heads_layers": sparsity.heads_layers or []}
    for key, values in ratios.items():
        for value in values:
            if value is not None:
                within(f"sparsity.{key}", value, 0, 1, "the fraction that is NOT computed")
    check_schedule("sparsity.mlp_schedule", sparsity.mlp_schedule)
    check_schedule("sparsity.heads_schedule", sparsity.heads_schedule)
    within("sparsity.fraction", sparsity.fraction, 0, 1, "the share of positions, from the end, that run sparse")
    for ratio in config.benchmark.ratios:
        within("benchmark.ratios", ratio, 0, 1, "the fraction that is NOT computed")
    for storage in config.benchmark.storages:
        one_of("benchmark.storages", storage, STORAGES)
    for contender in config.benchmark.contenders:
        one_of("benchmark.contenders", contender, CONTENDERS)
    for ratio in config.pipeline.ratios:
        within("pipeline.ratios", ratio, 0, 1, "the fraction that is NOT computed")
    for selector in config.pipeline.selectors:
        one_of("pipeline.selectors", selector, SELECTORS)
    if sparsity.rule == "nonzero" and sparsity.selector not in ("oracle", "dense"):
        raise ConfigError(f"sparsity.rule=nonzero needs sparsity.selector=oracle, got {sparsity.selector!r}")
    if sparsity.rule == "threshold" and sparsity.selector in ("random", "static", "prompt"):
        raise ConfigError(
            f"sparsity.rule=threshold needs a selector whose scores differ from token to token: "
            f"{sparsity.selector} gives the same number to all, use sparsity.rule=topk"
        )
    if config.model.active_share is not None:
        within("model.active_share", config.model.active_share, 0, 1, "the share of neurons active for a token")
    within("collect.top", config.collect.top, 1e-9, 1, "the share of units whose contributions are stored")
    within("trainer.held_out", trainer.held_out, 1e-9, 0.5, "the share of the cache's documents used for validation")
    positive = {
        "corpus.tokens": corpus.tokens, "corpus.block": corpus.block, "batch_size": config.batch_size,
        "predictor.rank": predictor.rank, "predictor.first_rank": predictor.first_rank,
        "tasks.limit": config.tasks.limit, "trainer.epochs": trainer.epochs,
        "trainer.batch_tokens": trainer.batch_tokens, "trainer.learning_rate": trainer.learning_rate,
        "trainer.devices": trainer.devices,
        "trainer.checkpoint_steps": trainer.checkpoint_steps, "trainer.patience": trainer.patience,
        "evaluation.calibration_tokens": config.evaluation.calibration_tokens,
        "launcher.threads": config.launcher.threads, "launcher.timeout_min": config.launcher.timeout_min,
        "launcher.array_parallelism": config.launcher.array_parallelism,
        "decode.window": config.decode.window, "decode.threads": config.decode.threads,
        "generate.new_tokens": config.generate.new_tokens, "generate.top_k": config.generate.top_k,
        "benchmark.new_tokens": config.benchmark.new_tokens, "benchmark.repeats": config.benchmark.repeats,
        "benchmark.memory_gb": config.benchmark.memory_gb,
        "benchmark.prompts": min(config.benchmark.prompts, default=0),
    }  # fmt: skip
    within("decode.crossover", config.decode.crossover, 0, 1, "the share of a layer's units above which it runs whole")
    if config.generate.top_p is not None:
        within("generate.top_p", config.generate.top_p, 1e-9, 1, "the probability that the tokens left share")
    within("generate.temperature", config.generate.temperature, 0, 100, "0 for greedy, else what logits are divided by")
    if config.backend == "kernel":
        check_kernel(config)
    for name, task in config.tasks.run.items():
        one_of(f"tasks.run.{name}.kind", task.kind, TASK_KINDS)
        one_of(f"tasks.run.{name}.corpus", task.corpus, BENCHMARKS if task.kind == "lm_eval" else CORPORA)
        positive |= {f"tasks.run.{name}.{key}": getattr(task, key) for key in ("limit", "context_tokens", "choices")}
    for key, value in positive.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{key}={value} is out of range: it must be above 0")


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
    if calibrate.tokens <= 0:
        raise ConfigError(f"calibrate.tokens={calibrate.tokens} is out of range: it must be above 0")


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

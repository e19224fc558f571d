"""Typed schema of every config: its keys, their types, and the words a value may be.

Values and their meaning stand in conf/*.yaml, what ranges they have in checks.py. A wrong key or type is refused by
OmegaConf while composing. Nothing heavy is imported here.
"""

from dataclasses import dataclass, field
from typing import Any

SELECTORS = ("dense", "random", "static", "prompt", "svd", "sign", "gate", "predictor", "oracle")
NEURONS_ONLY = ("svd", "sign", "gate")  # training-free estimates from the MLP's own weights: they know no heads
RULES = ("topk", "threshold", "nonzero")
POSITIONS = ("all", "decode", "last_fraction", "last")
TAPS = ("overlap", "direct", "previous", "mixed")
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
    learning_rate: float = 0.016
    weight_decay: float = 0.0
    warmup_steps: int = 100
    batch_tokens: int = 1024
    epochs: int = 8
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
    budgets: list[str] | None = None
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

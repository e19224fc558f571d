"""What `dejavu doctor` says of a model's size: files, memory of each stage, the floor of a token on given devices."""

from collections.abc import Iterator

import torch
from rich import box
from rich.console import RenderableType
from rich.table import Table

from dejavu.activations.layout import resolve_encoding
from dejavu.benchmark import devices, paper, plan
from dejavu.benchmark.devices import Device
from dejavu.benchmark.floor import BYTES
from dejavu.models.families import anatomy
from dejavu.models.load import pick_device, without_weights
from dejavu.models.placement import USABLE, Memory, described, limits, planned
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import make_budget, requested_ratios


def said(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point: "131 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plan_of(config: Config, online: bool) -> Iterator[RenderableType]:
    """Tables and lines. Raises ConfigError for a model of unknown size, a budget that does not fit it, and devices that
    are not in the table."""
    model, stored, source = without_weights(config, online)
    sized = plan.Sized(model, anatomy(model), stored)
    device = torch.device("cuda") if config.devices else pick_device(config.device)
    machine = devices.parse(config.devices) if config.devices else devices.found(device)
    yield files(sized, config, source)
    yield stages(sized, config, machine)
    if config.model.device_map is not None:
        memory = memory_of(machine, config) if config.devices else limits(config.model, device)
        places = planned(model, config.model.device_map, memory)
        yield f"model.device_map={config.model.device_map}: {described(places)}"
    yield floors(sized, config, machine, device)
    if config.model.name == paper.MODEL:
        yield from paper_setting(sized)


def files(sized: plan.Sized, config: Config, source: str) -> Table:
    """Bytes on disk."""
    parts, encoding = sized.anatomy, resolve_encoding(config.collect.encoding, sized.anatomy)
    share = config.model.active_share
    active = f"{share:.1%} of the neurons active" if share else f"if {plan.ACTIVE_SHARE:.0%} of the neurons are active"
    table = Table("plan: on disk", "bytes", "", box=box.SIMPLE_HEAD, pad_edge=False)
    dtype = str(sized.stored).removeprefix("torch.")
    table.add_row("weights", said(sized.file_bytes), f"{sized.parameters:,} parameters in {dtype}; sizes: {source}")
    table.add_row(
        "activation cache",
        said(plan.cache_bytes(parts, config)),
        f"{config.corpus.tokens:,} tokens (corpus.tokens), {encoding}"
        + (f", {active}" if encoding == "sparse" else ""),
    )
    settings = plan.bundle_settings(parts, config)
    table.add_row(
        "predictor bundle",
        said(plan.bundle_bytes(parts, config)),
        f"rank {settings['rank']}, in the first layer {settings['first_rank']}; float32",
    )
    return table


def stages(sized: plan.Sized, config: Config, machine: Device) -> Table:
    """Memory of each stage, whether the devices have it, and where their arithmetic is known hours."""
    table = Table("plan: memory", "about", f"on {machine}", "hours, about", box=box.SIMPLE_HEAD, pad_edge=False)
    hours = plan.hours(sized, config, machine)
    for stage, needed in plan.memory(sized, config).items():
        took = f"{hours[stage]:.2g}" + " a million tokens" * (stage == "evaluate") if stage in hours else ""
        table.add_row(f"{stage} ({detail(stage, config)})", said(needed), fit(stage, needed, machine), took)
    return table


def detail(stage: str, config: Config) -> str:
    """The settings that a stage's memory depends on most."""
    if stage == "train":
        return f"trainer.batch_tokens={config.trainer.batch_tokens}"
    if stage == "generate":
        return f"dtype={config.dtype}, decode.storage={config.decode.storage}, cpu"
    return f"dtype={config.dtype}, batch_size={config.batch_size}"


def fit(stage: str, needed: int, machine: Device) -> str:
    """Where so many bytes would be."""
    if stage == "generate" and machine.tflops is not None:
        return "decodes on a CPU"
    if needed <= USABLE * machine.memory_gb * 1e9:
        return "fits" if machine.count == 1 else "fits one"
    if stage in ("collect", "evaluate"):
        enough = needed <= USABLE * machine.all_memory_gb * 1e9
        return "fits all together" * enough + "more than there is" * (not enough) + ": model.device_map=auto"
    return "more than one has: predictor.layers, some at a time" if stage == "train" else "more than one has"


def memory_of(machine: Device, config: Config) -> Memory:
    """Memory of devices that are not here, for placing layers; what they do not hold goes to disk."""
    room = config.model.gpu_memory or int(USABLE * machine.memory_gb * 1e9)
    return {**dict.fromkeys(range(machine.count), room), "cpu": config.model.cpu_memory or 0}


def floors(sized: plan.Sized, config: Config, machine: Device, device: torch.device) -> Table:
    """Milliseconds a token, dense and with the config's sparsity."""
    width = BYTES[config.decode.storage] if device.type == "cpu" else 2
    dense = make_budget(Sparsity(selector="dense"), sized.anatomy)
    mlp, heads = requested_ratios(config.sparsity)
    table = Table(
        f"plan: floor of a token, {8 * width} bit, {plan.POSITIONS} positions", "reads", "of it predictors",
        f"ms at {machine.all_bandwidth_gb_s:,.0f} GB/s",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    rows = {"dense": dense, f"mlp={mlp:g} heads={heads:g}": make_budget(config.sparsity, sized.anatomy)}
    for name, budget in rows.items():
        terms = plan.token_terms(sized, config, budget, width)
        floor = terms.floor_ms(machine.all_bandwidth_gb_s)
        table.add_row(name, said(terms.total), said(terms.predictors), f"{floor:.3g}")
    return table


def paper_setting(sized: plan.Sized) -> Iterator[RenderableType]:
    """The paper's latencies beside what their bytes take."""
    table = Table(
        f"the paper on {paper.DEVICES}, fp16", "prompt", "reads", "floor, ms",
        f"read at {paper.IO_MODEL_GB_S:,.0f} GB/s, ms", "published, ms", "rest, ms", "of a half block, us",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    rows = paper.compared(sized)
    for row in rows:
        table.add_row(
            row.name, str(row.prompt), said(row.terms.total), f"{row.floor_ms:.1f}", f"{row.reading_ms:.1f}",
            f"{row.published_ms:.1f}", f"{row.rest_ms:.1f}", f"{row.rest_us_per_half:.0f}",
        )  # fmt: skip
    yield table
    yield (
        "12,000 GB/s is the paper's own model of its IO (324 GB in 27 ms). The rest is not reading: "
        f"{rows[0].half_blocks} all-reduces a token between the devices, launches of kernels and what waits for them: "
        "docs/reproduce.md"
    )

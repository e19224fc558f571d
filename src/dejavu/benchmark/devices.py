"""Devices that a plan can be made for: their memory, how fast they read it and how fast they multiply."""

import difflib
import os
import re
import time
from dataclasses import dataclass

import torch

from dejavu.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One device; of several that work together `count`."""

    name: str
    memory_gb: float  # 10^9 bytes, of one
    bandwidth_gb_s: float  # 10^9 bytes a second, of one
    tflops: float | None  # 10^12 dense 16-bit operations a second, of one; None: not known
    count: int = 1

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.count}x{self.name}"

    @property
    def all_memory_gb(self) -> float:
        return self.count * self.memory_gb

    @property
    def all_bandwidth_gb_s(self) -> float:
        return self.count * self.bandwidth_gb_s


# Peak values of NVIDIA's data sheets (SXM modules where there are several): memory, its bandwidth, dense FP16 tensor.
KNOWN = {
    device.name: device
    for device in (
        Device("V100-32G", 32, 900, 125),
        Device("A100-40G", 40, 1555, 312),
        Device("A100-80G", 80, 2039, 312),  # as a PCIe card 1,935 GB/s
        Device("H100-80G", 80, 3350, 989),  # as a PCIe card 2,000 GB/s
        Device("H200-141G", 141, 4800, 989),
        Device("L40S-48G", 48, 864, 362),
        Device("A6000-48G", 48, 768, 155),
        Device("RTX3090-24G", 24, 936, 71),  # with sums in float32
        Device("RTX4090-24G", 24, 1008, 165),  # with sums in float32
    )
}


def parse(text: str) -> Device:
    """ "8xA100-80G" -> eight of them. Raises ConfigError for a device that the table does not have."""
    match = re.fullmatch(r"(?:(\d+)x)?(\S+)", text)
    name = match[2] if match else text
    if match is None or name not in KNOWN or match[1] == "0":
        near = difflib.get_close_matches(name, KNOWN, 1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near and near[0] != name else ""
        raise ConfigError(f"devices={text} is not known: {hint}write 8xA100-80G or one of {', '.join(KNOWN)}")
    known = KNOWN[name]
    return Device(known.name, known.memory_gb, known.bandwidth_gb_s, known.tflops, int(match[1] or 1))


def found(device: torch.device) -> Device:
    """This machine's own, its bandwidth measured."""
    speed = measured_gb_s(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.name, properties.total_memory / 1e9, speed, None, torch.cuda.device_count())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Device(f"this machine ({torch.get_num_threads()} threads)", memory, speed, None)


def measured_gb_s(device: torch.device, megabytes: int = 512, tries: int = 5) -> float:
    """10^9 bytes a second at which a matrix times a vector reads the matrix, the best of some tries.

    A quick figure: `dejavu benchmark` measures with the engine's own kernel, between its contenders' turns.
    """
    matrix = torch.ones(megabytes * (1 << 20) // (4 * 8192), 8192, device=device)
    vector = torch.ones(8192, device=device)
    best = 0.0
    for _ in range(tries):
        started = time.perf_counter()
        float((matrix @ vector)[0])  # asking for a number waits for the device
        best = max(best, matrix.nbytes / (time.perf_counter() - started) / 1e9)
    return best

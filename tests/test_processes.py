"""Two processes that train together learn what one learns."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import Callback
from test_predictors import FakeCache, config

from dejavu.checks import check
from dejavu.errors import ConfigError
from dejavu.predictors.data import CacheData, own_part
from dejavu.predictors.train import train_predictors

STEPS = 20


class Watching(Callback):
    """Keeps the gradients of the first step and the weights after some, written by the first process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 0 and trainer.is_global_zero:
            torch.save({name: p.grad for name, p in module.named_parameters()}, self.folder / "gradients.pt")

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        losses = self.folder / f"losses-{trainer.global_rank}.txt"
        with losses.open("a") as file:
            file.write(f"{float(trainer.callback_metrics['loss'])} {batch.tokens}\n")


def trained(folder: Path, devices: int):
    folder.mkdir()
    wanted = config(epochs=1, max_steps=STEPS)
    wanted.trainer.devices, wanted.trainer.strategy = devices, "auto" if devices == 1 else "ddp_spawn"
    return train_predictors(FakeCache(), wanted, folder, callbacks=[Watching(folder)])


def losses(folder: Path, devices: int) -> np.ndarray:
    """Mean loss of each step over the whole batch."""
    parts = np.stack([np.loadtxt(folder / f"losses-{rank}.txt") for rank in range(devices)])
    return (parts[..., 0] * parts[..., 1]).sum(0) / parts[..., 1].sum(0)


def test_two_processes_learn_what_one_learns(tmp_path):
    one, two = trained(tmp_path / "one", 1), trained(tmp_path / "two", 2)
    first, second = (torch.load(tmp_path / name / "gradients.pt") for name in ("one", "two"))
    for name, gradient in first.items():
        scale = gradient.abs().max()
        assert float((second[name] - gradient).abs().max() / scale) < 1e-6, name
    np.testing.assert_allclose(losses(tmp_path / "two", 2), losses(tmp_path / "one", 1), atol=1e-4)
    assert two.metrics["steps"] == one.metrics["steps"] == STEPS
    for kind, value in one.metrics["recall_of_mass"].items():
        assert two.metrics["recall_of_mass"][kind] == pytest.approx(value, abs=0.002)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "gradients.pt",
        "losses-0.txt",
        "losses-1.txt",
    ]


def test_parts_of_a_batch_make_up_the_whole(monkeypatch):
    data = CacheData(FakeCache(), [0], "overlap", config().trainer, seed=0)
    whole = list(data.sampler)
    monkeypatch.setattr("dejavu.predictors.data.dist.is_initialized", lambda: True)
    monkeypatch.setattr("dejavu.predictors.data.dist.get_world_size", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr("dejavu.predictors.data.dist.get_rank", lambda rank=rank: rank)
        parts.append(list(data.sampler))
    assert all(np.array_equal(np.r_[a, b], every) for a, b, every in zip(*parts, whole, strict=True))
    assert len(own_part(np.arange(5))) == 2


def test_a_strategy_needs_its_processes():
    for strategy, devices in (("auto", 2), ("ddp_spawn", 1)):
        wanted = config()
        wanted.trainer.strategy, wanted.trainer.devices = strategy, devices
        with pytest.raises(ConfigError, match=r"several processes need trainer\.strategy=ddp_spawn"):
            check(wanted)


def test_a_multirun_with_processes_is_refused(tmp_path):
    command = [
        sys.executable, "-c", "from dejavu.cli import main; main()", "train", "-m", "seed=0,1",
        "trainer.strategy=ddp_spawn", "trainer.devices=2", "cache=none", f"run_dir={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 1 and "run it without -m" in done.stderr

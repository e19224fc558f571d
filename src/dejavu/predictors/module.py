"""Training of all predictors in one run, as a LightningModule; by one process or by several that share every batch.

Shape suffixes: N tokens, D width, U units.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.predictors import labels
from dejavu.predictors.data import Batch
from dejavu.predictors.metrics import SelectionRecall, mean_figure
from dejavu.predictors.network import Predictor
from dejavu.predictors.statistics import Key, UnitStatistics
from dejavu.schema import Predictor as PredictorSettings
from dejavu.schema import Trainer


def name_of(key: Key) -> str:
    """("mlp", 3) -> "mlp.3", in logs, tensors and metrics."""
    return f"{key[0]}.{key[1]}"


class PredictorModule(pl.LightningModule):
    """Independent predictors that share batches, AdamW, linear warm-up and a cosine down to 0 over the run.

    Validation logs `recall_of_mass/mlp.3` (mean over densities), its mean over layers `recall_of_mass/mlp`, and the
    mean over everything, `recall_of_mass`, which is what a run is judged by.
    """

    def __init__(
        self,
        predictors: Mapping[Key, Predictor],
        statistics: Mapping[Key, UnitStatistics],
        learnt: PredictorSettings,
        settings: Trainer,
        total_steps: int,
    ) -> None:
        super().__init__()
        # Each predictor goes backward and lets go of its graph before the next one starts.
        self.automatic_optimization = False
        self.keys = list(predictors)
        self.statistics = dict(statistics)
        self.learnt = {kind: labels.for_kind(learnt, kind) for kind in KINDS}
        self.settings, self.total_steps = settings, total_steps
        self.predictors = _nested(predictors)
        self.metrics = _nested({key: SelectionRecall() for key in self.keys})
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # comes back from a process that trained
        with torch.no_grad():
            for key, predictor in predictors.items():
                if predictor.up.bias is not None:
                    predictor.up.bias.copy_(labels.initial_bias(self.statistics[key], self.learnt[key[0]]))

    def predictor(self, key: Key) -> Predictor:
        return _member(self.predictors, key)

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        share = share_of_batch(batch.tokens)
        with unsynchronised(self.trainer):
            losses = torch.stack([self._backward(key, *pair, share) for key, pair in batch.items()])
        self._check_finite(losses)
        add_up(self.parameters())
        optimizer.step()
        scheduler.step()
        self.steps += 1
        self.log("loss", losses.mean(), prog_bar=True, batch_size=batch.tokens)

    def validation_step(self, batch: Batch, index: int) -> None:
        self.observe(batch)

    def on_validation_epoch_start(self) -> None:
        self.reset_metrics()

    def on_validation_epoch_end(self) -> None:
        for name, value in self.means().items():
            self.log(name, value, prog_bar=name == "recall_of_mass")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay, fused=True
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def schedule(self, step: int) -> float:
        """Share of the peak learning rate at a step. Warm-up takes at most a tenth of the run, however short it is."""
        warmup = min(self.settings.warmup_steps, self.total_steps // 10)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, self.total_steps - warmup))))

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        """Count a batch in the metrics."""
        for key, (tap_ND, c_NU) in batch.items():
            scores_NU = self.predictor(key)(tap_ND.to(self.device))
            _member(self.metrics, key).update(scores_NU, c_NU.to(self.device))

    def reset_metrics(self) -> None:
        for key in self.keys:
            _member(self.metrics, key).reset()

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """Per layer: {"mlp.3": {"recall_of_mass": {"0.1": ..., ...}, "recall": {...}}, ...}."""
        return {name_of(key): _member(self.metrics, key).figures() for key in self.keys}

    def means(self) -> dict[str, float]:
        """Mean recall of mass over densities, by logged name: of each layer, each kind, and everything."""
        return mean_recalls(self.figures())

    def _backward(self, key: Key, tap_ND: Tensor, contributions_NU: Tensor, share: float) -> Tensor:
        scores_NU = self.predictor(key)(tap_ND.to(self.device))
        loss = labels.loss(scores_NU, contributions_NU.to(self.device), self.statistics[key], self.learnt[key[0]])
        self.manual_backward(loss * share)
        return loss.detach()

    def _check_finite(self, losses: Tensor) -> None:
        wrong = [name_of(key) for key, fine in zip(self.keys, losses.isfinite().tolist(), strict=True) if not fine]
        if wrong:
            raise DataError(
                f"the training loss of {', '.join(wrong)} is not finite at step {self.global_step}: lower "
                "trainer.learning_rate, or check the activation cache with `verify`"
            )


def share_of_batch(tokens: int) -> float:
    """This process's share of the tokens of a step, 1 where it is the only one."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1.0
    total = torch.tensor(float(tokens))
    dist.all_reduce(total)
    return tokens / float(total)


def unsynchronised(trainer: pl.Trainer) -> AbstractContextManager[Any]:
    """Backward passes within leave gradients to each process; they are added up once a step."""
    strategy = trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext()


def add_up(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of all processes, each of which counted its own share of the batch."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, gradients)


def mean_recalls(figures: Mapping[str, Mapping[str, dict[str, float]]]) -> dict[str, float]:
    """The means that are logged, from the figures of each layer."""
    layers = {name: mean_figure(entry["recall_of_mass"]) for name, entry in figures.items()}
    found = {f"recall_of_mass/{name}": value for name, value in layers.items()}
    kinds = {kind: [value for name, value in layers.items() if name.startswith(f"{kind}.")] for kind in KINDS}
    found |= {f"recall_of_mass/{kind}": sum(values) / len(values) for kind, values in kinds.items()}
    return found | {"recall_of_mass": sum(layers.values()) / len(layers)}


def _nested(modules: Mapping[Key, nn.Module]) -> nn.ModuleDict:
    """By kind, then layer: names of modules hold no dots, but names of their tensors then read `mlp.3.down.weight`."""
    return nn.ModuleDict(
        {kind: nn.ModuleDict({str(layer): m for (k, layer), m in modules.items() if k == kind}) for kind in KINDS}
    )


def _member(modules: nn.ModuleDict, key: Key):  # type: ignore[no-untyped-def]  # of the type that was put in
    return modules[key[0]][str(key[1])]  # type: ignore[index]

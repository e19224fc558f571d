"""The Lightning training loop of opt-tiny: checkpoints, resume, a log of losses."""

from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from transformers import OPTForCausalLM

from dejavu.errors import DataError
from dejavu.pretraining.data import PretrainingData
from dejavu.pretraining.module import CausalLM, new_opt
from dejavu.schema import Config
from dejavu.tracking.lightning import quiet_lightning
from dejavu.tracking.run import interactive


def fit(
    config: Config,
    train: list[np.ndarray],
    held_out: list[np.ndarray],
    vocabulary: int,
    folder: Path,
    loggers: list[Logger],
) -> OPTForCausalLM:
    """Train from encoded documents, going on from the folder's last checkpoint if there is one.

    Checkpoints are Lightning's own and are read with weights_only: they are scratch, not a format of this project.
    Raises DataError when the held-out text has no whole block.
    """
    shape, settings = config.pretrain, config.trainer
    batch = settings.batch_tokens // shape.positions
    steps = settings.max_steps if settings.max_steps > 0 else shape.tokens // settings.batch_tokens
    last = folder / "checkpoints" / "last.ckpt"
    start = int(torch.load(last, weights_only=True, mmap=True)["global_step"]) if last.exists() else 0
    data = PretrainingData(train, held_out, shape.positions, batch, config.seed, start)
    if len(data.held_out_blocks) == 0:
        raise DataError(f"the held-out text is shorter than one block of {shape.positions} tokens: use more text")
    model = new_opt(vocabulary, shape.hidden, shape.layers, shape.heads, shape.ffn, shape.positions, config.seed)
    module = CausalLM(model, settings.learning_rate, settings.weight_decay, settings.warmup_steps, steps)
    every = max(1, min(settings.checkpoint_steps, steps))
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="auto" if config.device == "auto" else config.device,
            devices=1,
            plugins=[LightningEnvironment()],
            max_steps=steps,
            gradient_clip_val=1.0,
            logger=loggers,
            callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=every)],
            val_check_interval=2 * every,
            check_val_every_n_epoch=None,
            limit_val_batches=8,
            num_sanity_val_steps=0,
            enable_progress_bar=interactive(),
            enable_model_summary=False,
            log_every_n_steps=10,
        )
        trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    return module.model.eval()

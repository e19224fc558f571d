"""Causal language modelling on OPT's own architecture, as a LightningModule."""

import math

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import OPTConfig, OPTForCausalLM

from dejavu.pretraining.muon import Muon

# Of the learning rate, for attention. At the full rate 1.6 million tokens gave a loss of 5.41 on held-out documentation
# and half of the heads were worth 0.34 nats; at a fifth 0.7 million gave 5.44, and half of the heads 0.003.
ATTENTION_RATE = 0.2


def new_opt(
    vocabulary: int, hidden: int, layers: int, heads: int, ffn: int, positions: int, seed: int
) -> OPTForCausalLM:
    """A freshly initialised pre-norm OPT with OPT's special ids and no dropout (the text is read about twice)."""
    config = OPTConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=ffn,
        max_position_embeddings=positions,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
    )
    torch.manual_seed(seed)
    return OPTForCausalLM._from_config(config, attn_implementation="sdpa")


def next_token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats of token t+1 given the tokens up to t."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


class CausalLM(pl.LightningModule):
    """Muon for fc1 and fc2, AdamW for attention, with linear warm-up and a cosine down to a fiftieth.

    Biases, norms and embeddings are not decayed.
    """

    def __init__(
        self, model: OPTForCausalLM, learning_rate: float, weight_decay: float, warmup_steps: int, max_steps: int
    ) -> None:
        super().__init__()
        self.model = model
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.max_steps = warmup_steps, max_steps

    def training_step(self, tokens_BT: Tensor) -> Tensor:
        loss = next_token_loss(self.model(input_ids=tokens_BT, use_cache=False).logits, tokens_BT)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the training loss is {loss.item()} at step {self.global_step}: lower the learning rate"
            )
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        (tokens_BT,) = batch
        loss = next_token_loss(self.model(input_ids=tokens_BT, use_cache=False).logits, tokens_BT)
        self.log("held_out_loss", loss, prog_bar=True, batch_size=len(tokens_BT))

    def schedule(self, step: int) -> float:
        """Share of the peak learning rate at a step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return 0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, progress)))

    def configure_optimizers(self) -> dict:
        named = [(name, p, p.ndim == 2 and "embed" not in name) for name, p in self.model.named_parameters()]
        neurons = [p for name, p, matrix in named if matrix and ".fc" in name]
        attention = [p for name, p, matrix in named if matrix and ".fc" not in name]
        free = [p for _, p, matrix in named if not matrix]
        optimizer = Muon(neurons, attention, free, self.learning_rate, self.weight_decay, ATTENTION_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

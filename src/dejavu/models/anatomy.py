"""Where the heads and neurons of a causal LM are.

All that records, masks or decodes works on the four points of a `Block` and never asks which family it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """One transformer block. In the order of a forward pass:

    layer             its first argument is r_l, the residual handed to the block, (..., width)
    attention_output  W_o; its input holds the outputs of all heads side by side, (..., heads * head_dim)
    mlp_norm          m_l, the tensor the MLP half adds back, is its input (pre-norm) or its output (post-norm)
    mlp_output        W2 (fc2, down_proj); its input holds a_j, the values that multiply its columns, (..., neurons)

    mlp_input (fc1, gate_proj) is what the activation is applied to, mlp_up what a gated MLP multiplies it with.
    """

    layer: nn.Module
    attention_output: nn.Linear
    mlp_norm: nn.Module
    mlp_output: nn.Linear
    mlp_input: nn.Linear
    mlp_up: nn.Linear | None
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model that can be left out, and the sizes that everything else is computed from."""

    family: str
    blocks: tuple[Block, ...]
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: int
    gated: bool  # the MLP multiplies an activated gate with a second projection
    relu: bool  # neurons are exactly 0 when inactive
    post_norm: bool
    context: int  # longest sequence in tokens
    separator: int  # the token that stands once before every document
    home: torch.device | None = None  # of layers on several devices: where what is seen of them is gathered

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def mlp_reads(self, layer: int, middle_ND: Tensor) -> Tensor:
        """What the MLP's first projection reads, from m_l: normalised in pre-norm models, m_l itself in post-norm."""
        if self.post_norm:
            return middle_ND
        normalised_ND: Tensor = self.blocks[layer].mlp_norm(middle_ND)
        return normalised_ND.to(self.home)

    def unit_weights(self, kind: str) -> float:
        """Weights of one unit: a neuron's rows and columns; a head's part of q and o and its share of k and v."""
        if kind == "mlp":
            return (3 if self.gated else 2) * self.width
        return 2 * self.width * self.head_dim * (1 + self.kv_heads / self.heads)

    def units(self, kind: str) -> int:
        """How many units of a kind ("mlp" or "heads") one layer has."""
        return self.neurons if kind == "mlp" else self.heads


KINDS = ("mlp", "heads")

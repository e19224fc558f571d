"""Where the heads and neurons of a causal LM are, and of which kind its parts are.

All that records, masks or decodes works on these facts and never asks which family a model is of.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dejavu.models.shape import Units


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
class Rotary:
    """Rotary positions: values k and k + head_dim / 2 of a query or key turn by position times frequency k."""

    frequencies: Tensor  # (head_dim / 2,)
    scale: float = 1.0  # cosines and sines are multiplied with it
    fixed: bool = True  # whatever the length of the text


@dataclass(frozen=True)
class Attention:
    """What the engine that decodes reads of a block besides its four points."""

    norm: nn.Module  # what normalises r_l
    queries: nn.Linear
    keys: nn.Linear
    values: nn.Linear


@dataclass(frozen=True)
class Decoding:
    """What the engine that decodes reads of a model besides its blocks' four points."""

    attention: tuple[Attention, ...]  # of each block
    activation: str  # its name: relu, silu, ...
    rms_norm: bool  # norms divide by the root of the mean square; else LayerNorm with a bias
    embedding: nn.Embedding
    learned_positions: Tensor | None  # (context, width), added to the embedding
    rotary: Rotary | None
    final_norm: nn.Module | None


def plain_frequencies(base: float, head_dim: int) -> Tensor:
    """Frequencies of rotary positions that nobody scaled, (head_dim / 2,)."""
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


@dataclass(frozen=True)
class Anatomy(Units):
    """The parts of a model that can be left out, and the sizes that everything else is computed from."""

    family: str
    blocks: tuple[Block, ...]
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: int
    gated: bool
    relu: bool  # neurons are exactly 0 when inactive
    post_norm: bool
    context: int  # longest sequence in tokens
    separator: int  # the token that stands once before every document
    home: torch.device | None = None  # of layers on several devices: where what is seen of them is gathered
    decoding: Decoding | None = None  # None: the engine does not decode this family

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def mlp_reads(self, layer: int, middle_ND: Tensor) -> Tensor:
        """What the MLP's first projection reads, from m_l: normalised in pre-norm models, m_l itself in post-norm."""
        if self.post_norm:
            return middle_ND
        normalised_ND: Tensor = self.blocks[layer].mlp_norm(middle_ND)
        return normalised_ND.to(self.home)


KINDS = ("mlp", "heads")

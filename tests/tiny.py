"""Tiny random models of every supported shape, in evaluation mode and the same on every call.

Weights have a standard deviation of 0.2, ten times transformers' own, so that attention is far from uniform and a head
or neuron left out changes the output.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

VOCABULARY = 96
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def tiny_opt(seed: int = 0, **overrides: Any) -> OPTForCausalLM:
    """Pre-norm OPT: width 32, 2 layers, 4 heads, 64 neurons, vocabulary 96, context 64."""
    sizes = {**SHARED, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0, **overrides}
    return _built(OPTForCausalLM, OPTConfig(**sizes), seed)


def tiny_opt_post_norm(seed: int = 0, **overrides: Any) -> OPTForCausalLM:
    """opt-350m in small: norms after attention and MLP, none at the end, embeddings of 16 projected to 32."""
    return tiny_opt(seed, **{"do_layer_norm_before": False, "word_embed_proj_dim": 16, **overrides})


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Llama: gated MLP of 64 neurons, 4 query heads that share 2 key/value heads, otherwise as `tiny_opt`."""
    sizes = {**SHARED, "intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.2, **overrides}
    return _built(LlamaForCausalLM, LlamaConfig(**sizes), seed)


FAMILIES = {"opt": tiny_opt, "llama": tiny_llama}  # what the engine decodes


def _built(family: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family(config)
        _shake(model)
    return model.eval().requires_grad_(False)


def _shake(model: torch.nn.Module) -> None:
    """Biases and norms away from 0 and 1, where a forgotten one would not show."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.data.normal_(centre, 0.1)

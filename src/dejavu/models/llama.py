"""Llama: gated MLP (silu(gate) * up -> down), grouped key/value heads, rotary positions, RMSNorm, always pre-norm."""

from typing import Any

from dejavu.models.anatomy import Anatomy, Block


def anatomy(model: Any) -> Anatomy:
    """Anatomy of a loaded LlamaForCausalLM. Each query head is a unit of its own; a_j = silu(gate_j) * up_j."""
    config = model.config
    blocks = tuple(
        Block(
            layer=layer,
            attention_output=layer.self_attn.o_proj,
            mlp_norm=layer.post_attention_layernorm,
            mlp_output=layer.mlp.down_proj,
            mlp_input=layer.mlp.gate_proj,
            mlp_up=layer.mlp.up_proj,
            activation=layer.mlp.act_fn,
        )
        for layer in model.model.layers
    )
    end = config.eos_token_id
    return Anatomy(
        family="llama",
        blocks=blocks,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=model.model.layers[0].self_attn.head_dim,
        neurons=config.intermediate_size,
        gated=True,
        relu=config.hidden_act == "relu",
        post_norm=False,
        context=config.max_position_embeddings,
        separator=config.bos_token_id
        if config.bos_token_id is not None
        else (end[0] if isinstance(end, list) else end),
    )

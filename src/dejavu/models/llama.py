"""Llama: gated MLP (silu(gate) * up -> down), grouped key/value heads, rotary positions, RMSNorm, always pre-norm."""

from collections.abc import Mapping
from typing import Any

from dejavu.models.anatomy import Anatomy, Attention, Block, Decoding, Rotary
from dejavu.models.shape import Shape

MODEL = "LlamaForCausalLM"
LENGTH_DEPENDENT = ("dynamic", "longrope")  # kinds of rotary positions whose frequencies change with the text


def anatomy(model: Any) -> Anatomy:
    """Anatomy of a loaded LlamaForCausalLM. Each query head is a unit of its own; a_j = silu(gate_j) * up_j."""
    config, decoder = model.config, model.model
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
        for layer in decoder.layers
    )
    end = config.eos_token_id
    return Anatomy(
        family="llama",
        blocks=blocks,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=decoder.layers[0].self_attn.head_dim,
        neurons=config.intermediate_size,
        gated=True,
        relu=config.hidden_act == "relu",
        post_norm=False,
        context=config.max_position_embeddings,
        separator=config.bos_token_id
        if config.bos_token_id is not None
        else (end[0] if isinstance(end, list) else end),
        decoding=decoding(decoder, config.hidden_act),
    )


def decoding(decoder: Any, activation: str) -> Decoding:
    """What the engine reads of a LlamaModel besides."""
    turning = decoder.rotary_emb
    return Decoding(
        attention=tuple(
            Attention(
                norm=layer.input_layernorm,
                queries=layer.self_attn.q_proj,
                keys=layer.self_attn.k_proj,
                values=layer.self_attn.v_proj,
            )
            for layer in decoder.layers
        ),
        activation=activation,
        rms_norm=True,
        embedding=decoder.embed_tokens,
        learned_positions=None,
        rotary=Rotary(turning.inv_freq, turning.attention_scaling, turning.rope_type not in LENGTH_DEPENDENT),
        final_norm=decoder.norm,
    )


def shape(architecture: Mapping[str, Any]) -> Shape:
    """Sizes in a Llama's config; scaled rotary positions turn as fast as plain ones."""
    width, heads = architecture["hidden_size"], architecture["num_attention_heads"]
    turning = architecture.get("rope_parameters") or architecture
    return Shape(
        layers=architecture["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=architecture.get("num_key_value_heads") or heads,
        head_dim=architecture.get("head_dim") or width // heads,
        neurons=architecture["intermediate_size"],
        vocabulary=architecture.get("vocab_size", 32_000),
        context=architecture.get("max_position_embeddings", 2048),
        gated=True,
        rms_norm=True,
        rotary_base=float(turning.get("rope_theta", 10_000.0)),
        tied=architecture.get("tie_word_embeddings", False),
    )

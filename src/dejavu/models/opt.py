"""OPT: fc1 -> ReLU -> fc2, learned positions; pre-norm, but opt-350m is post-norm with narrower embeddings."""

from collections.abc import Mapping
from typing import Any

from dejavu.errors import ConfigError
from dejavu.models.anatomy import Anatomy, Attention, Block, Decoding
from dejavu.models.shape import Shape

MODEL = "OPTForCausalLM"


def anatomy(model: Any) -> Anatomy:
    """Anatomy of a loaded OPTForCausalLM."""
    config, decoder = model.config, model.model.decoder
    if config.activation_function != "relu":
        raise ConfigError(f"OPT with activation {config.activation_function!r} is not supported: OPT's own is relu")
    blocks = tuple(
        Block(
            layer=layer,
            attention_output=layer.self_attn.out_proj,
            # Post-norm: the MLP reads and adds back what the norm after attention gives out.
            mlp_norm=layer.final_layer_norm if config.do_layer_norm_before else layer.self_attn_layer_norm,
            mlp_output=layer.fc2,
            mlp_input=layer.fc1,
            mlp_up=None,
            activation=layer.activation_fn,
        )
        for layer in decoder.layers
    )
    return Anatomy(
        family="opt",
        blocks=blocks,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        neurons=config.ffn_dim,
        gated=False,
        relu=True,
        post_norm=not config.do_layer_norm_before,
        context=config.max_position_embeddings,
        separator=config.eos_token_id,
        decoding=decoding(decoder),
    )


def decoding(decoder: Any) -> Decoding:
    """What the engine reads of an OPTDecoder besides."""
    return Decoding(
        attention=tuple(
            Attention(
                norm=layer.self_attn_layer_norm,
                queries=layer.self_attn.q_proj,
                keys=layer.self_attn.k_proj,
                values=layer.self_attn.v_proj,
            )
            for layer in decoder.layers
        ),
        activation="relu",
        rms_norm=False,
        embedding=decoder.embed_tokens,
        learned_positions=decoder.embed_positions.weight.detach()[decoder.embed_positions.offset :],
        rotary=None,
        final_norm=decoder.final_layer_norm,
    )


def shape(architecture: Mapping[str, Any]) -> Shape:
    """Sizes in an OPT's config."""
    width, heads = architecture["hidden_size"], architecture["num_attention_heads"]
    return Shape(
        layers=architecture["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        neurons=architecture["ffn_dim"],
        vocabulary=architecture.get("vocab_size", 50_272),
        context=architecture.get("max_position_embeddings", 2048),
        gated=False,
        rms_norm=False,
        rotary_base=None,
        tied=architecture.get("tie_word_embeddings", True),
    )

"""OPT: fc1 -> ReLU -> fc2, learned positions; pre-norm, but opt-350m is post-norm with narrower embeddings."""

from typing import Any

from dejavu.errors import ConfigError
from dejavu.models.anatomy import Anatomy, Block


def anatomy(model: Any) -> Anatomy:
    """Anatomy of a loaded OPTForCausalLM."""
    config = model.config
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
        for layer in model.model.decoder.layers
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
    )

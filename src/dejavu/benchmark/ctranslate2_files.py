"""A model in CTranslate2's own form: converted from a folder, or written directly with random weights."""

from pathlib import Path
from typing import Any

import numpy as np

from dejavu.models.shape import Shape

BLOCK_ROWS = 512  # rows drawn; a random matrix repeats them


def convert(source: str, folder: Path, storage: str) -> None:
    """Convert a transformers folder with CTranslate2's converter, tokens named by their number."""
    import ctranslate2
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(source)
    words = Tokenizer(WordLevel({f"t{n}": n for n in range(model.config.vocab_size)}, unk_token="t3"))
    copy = folder.with_name(f"{folder.name}-source")
    model.save_pretrained(copy)
    tokens = {"bos_token": "t2", "eos_token": "t2", "unk_token": "t3", "pad_token": "t1"}
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(copy)
    ctranslate2.converters.TransformersConverter(str(copy)).convert(str(folder), quantization=storage)


def write_random(shape: Shape, folder: Path, storage: str, seed: int) -> None:
    """A shape with random weights, in the storage at once: no copy in float32 has to exist."""
    random = np.random.default_rng(seed)
    spec = empty_spec(shape)

    def matrix(part: Any, rows: int, columns: int) -> None:
        drawn = random.standard_normal((min(rows, BLOCK_ROWS), columns), dtype=np.float32) * 0.02
        if storage == "int8":  # CTranslate2 keeps 127 / the row's largest magnitude
            scale = 127 / np.abs(drawn).max(1)
            drawn = np.rint(drawn * scale[:, None]).astype(np.int8)
            part.weight_scale = np.tile(scale, -(-rows // len(scale)))[:rows].astype(np.float32)
        part.weight = np.tile(drawn, (-(-rows // len(drawn)), 1))[:rows]

    def linear(part: Any, rows: int, columns: int) -> None:
        matrix(part, rows, columns)
        part.bias = np.zeros(rows, np.float32)

    def norm(part: Any) -> None:
        part.gamma = np.ones(shape.width, np.float32)
        if not shape.rms_norm:
            part.beta = np.zeros(shape.width, np.float32)

    decoder, width = spec.decoder, shape.width
    decoder.scale_embeddings = False
    matrix(decoder.embeddings, shape.vocabulary, width)
    if shape.rotary_base is None:
        decoder.position_encodings.encodings = np.zeros((shape.context, width), np.float32)
    matrix(decoder.projection, shape.vocabulary, width)
    norm(decoder.layer_norm)
    for layer in decoder.layer:
        attention, mlp = layer.self_attention, layer.ffn
        norm(attention.layer_norm)
        linear(attention.linear[0], (shape.heads + 2 * shape.kv_heads) * shape.head_dim, width)
        linear(attention.linear[1], width, shape.heads * shape.head_dim)
        norm(mlp.layer_norm)
        linear(mlp.linear_0, shape.neurons, width)
        if shape.gated:
            linear(mlp.linear_0_noact, shape.neurons, width)
        linear(mlp.linear_1, width, shape.neurons)
    spec.register_vocabulary([f"t{number}" for number in range(shape.vocabulary)])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = "t3", "t2", "t2"
    spec.validate()
    folder.mkdir()
    spec.save(str(folder))


def empty_spec(shape: Shape) -> Any:
    """CTranslate2's description of a model of this shape, without weights."""
    from ctranslate2.specs import common_spec, transformer_spec

    activations = common_spec.Activation
    if shape.rotary_base is None:
        rotary: dict[str, Any] = {}
    else:
        rotary = {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": shape.rotary_base}  # 0: all of a head
    return transformer_spec.TransformerDecoderModelSpec.from_config(
        shape.layers,
        shape.heads,
        pre_norm=True,
        activation=activations.SWISH if shape.gated else activations.RELU,
        ffn_glu=shape.gated,
        rms_norm=shape.rms_norm,
        num_heads_kv=None if shape.kv_heads == shape.heads else shape.kv_heads,
        head_dim=None if shape.heads * shape.head_dim == shape.width else shape.head_dim,
        **rotary,
    )

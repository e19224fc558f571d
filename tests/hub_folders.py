"""Model folders as the hub has them, with small random weights: one .bin, sharded safetensors, fp16, tied heads."""

import json
import shutil
from pathlib import Path

import torch
from tiny import tiny_opt, tiny_opt_post_norm
from transformers import AutoTokenizer

from dejavu.models import EMBEDDED

REVISION = "27dcfa74d334bc871f3234de431e71c6eeba5dd6"
# The depth and the norms of the two, their width kept small.
SHAPES = {
    "opt-125m": (tiny_opt, {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 48, "ffn_dim": 192}),
    "opt-350m": (tiny_opt_post_norm, {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 64}),
}


def build(name: str, vocabulary: int):
    """The model of a hub's folder, float16 as published."""
    function, sizes = SHAPES[name]
    sizes = {"word_embed_proj_dim": 48 if name == "opt-125m" else 32, **sizes}
    return function(vocab_size=vocabulary, max_position_embeddings=128, **sizes).half()


def write_model(folder: Path, model, form: str) -> None:
    """Weights in one of the forms that are around: "bin", "bin with head", "sharded" (safetensors and their index)."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "sharded":
        model.save_pretrained(folder, max_shard_size="100KB")
        assert (folder / "model.safetensors.index.json").exists()
        return
    model.config.save_pretrained(folder)
    weights = {key: value.clone() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    if form == "bin with head":
        weights["lm_head.weight"] = model.lm_head.weight.detach().clone()
    torch.save(weights, folder / "pytorch_model.bin")


def write_embedded_tokenizer(folder: Path) -> None:
    AutoTokenizer.from_pretrained(EMBEDDED / "opt-tiny").save_pretrained(folder)


def write_opt_tokenizer(folder: Path, data_root: Path) -> None:
    """OPT's own tokenizer in the hub's form: vocabulary, merges and a config of GPT-2's class that adds `</s>`."""
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(data_root / "tokenizer" / "opt" / file, folder / file)
    config = {
        "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, "bos_token": "</s>",
        "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def as_hub_cache(home: Path, repository: str) -> Path:
    """An empty snapshot folder of a repository in the hub client's cache below HF_HOME."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(REVISION)
    return snapshot

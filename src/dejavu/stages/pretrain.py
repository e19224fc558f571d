"""`dejavu pretrain`: train opt-tiny on text that needs no download, and measure what its model card says."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from dejavu.corpora.blocks import encode_documents
from dejavu.corpora.documents import Document, corpus_hash
from dejavu.corpora.pydocs import python_version
from dejavu.corpora.sources import documents
from dejavu.corpora.wikitext import detokenise
from dejavu.errors import DataError
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel, pretrained_model
from dejavu.models.memory import keep_freed_memory
from dejavu.pretraining import ngram
from dejavu.pretraining.card import active_shares, held_out_bits, model_card
from dejavu.pretraining.fit import fit
from dejavu.pretraining.tokenizer import train_tokenizer
from dejavu.schema import Config, Corpus
from dejavu.tracking.files import write_text
from dejavu.tracking.lightning import lightning_loggers
from dejavu.tracking.run import Run


def run(run: Run) -> None:
    """Tokenizer, training, fp16 weights and the card in `run.folder/model`, ready to be loaded with model.path."""
    keep_freed_memory()
    config = run.config
    root = None if config.data_root is None else Path(config.data_root)
    train = documents(config.corpus.name, "train", root, config.corpus, config.pretrain.packages)
    held_out = {
        "WikiText-2 test": detokenised(documents("wikitext", "test", root, Corpus(name="wikitext"))),
        f"pydocs test (Python {python_version()})": documents("pydocs", "test", root, Corpus()),
    }
    watched = [
        *detokenised(documents("wikitext", "validation", root, Corpus(name="wikitext")))[:8],
        *documents("pydocs", "test", root, Corpus())[:60],
    ]
    tokenizer = trained_tokenizer(
        run.folder / "tokenizer", train, config.pretrain.vocabulary, config.pretrain.positions
    )
    encoded = encode_documents([document.text for document in train], tokenizer, tokenizer.eos_token_id)
    tokens = sum(map(len, encoded))
    run.say(f"{len(train):,} documents, {tokens:,} tokens; training on {config.pretrain.tokens:,} tokens")
    watched_ids = encode_documents([document.text for document in watched], tokenizer, tokenizer.eos_token_id)
    model = fit(config, encoded, watched_ids, len(tokenizer), run.folder, lightning_loggers(run))

    folder = run.folder / "model"
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = pretrained_model(str(folder), torch.float32).eval()  # what users load is what is measured
    loaded = LoadedModel(config.model.name, model, tokenizer, anatomy(model))
    baseline = ngram.fit(encoded, len(tokenizer))
    scores = [held_out_bits(name, texts, loaded, baseline) for name, texts in held_out.items()]
    active = active_shares(list(held_out.values())[-1][:100], loaded)
    training = {
        "parameters": f"{loaded.parameters:,}",
        "fingerprint": loaded.fingerprint,
        "training text": f"{len(train):,} documents, {tokens:,} tokens, hash {corpus_hash(train)} (docs/data.md)",
        "tokens seen": f"{config.pretrain.tokens:,}",
        "optimizer": "Muon for fc1 and fc2, AdamW for the rest",
        "seed": config.seed,
    }
    write_text(
        folder / "README.md", model_card(asdict(config.pretrain) | asdict(config.trainer), training, scores, active)
    )
    for score in scores:
        run.say(f"{score.corpus}: {score.model:.4f} bits per byte, 5-gram {score.ngram:.4f}")
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "metrics": {
            score.corpus: {
                "bits_per_byte": {"value": score.model, "stderr": None, "n": score.documents},
                "ngram_bits_per_byte": {"value": score.ngram, "stderr": None, "n": score.documents},
            }
            for score in scores
        },
        "active_neurons_per_layer": active,
    }


def card_settings(config: Config) -> dict[str, Any]:
    """The settings that shaped the weights."""
    names = ("learning_rate", "weight_decay", "warmup_steps", "batch_tokens")
    shape = asdict(config.pretrain)
    del shape["tokens"]
    shape["packages"] = ", ".join(shape["packages"])
    return shape | {name: getattr(config.trainer, name) for name in names}


def trained_tokenizer(folder: Path, train: list[Document], vocabulary: int, positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer kept in `folder`, trained first if it is not there (a resumed run must not get another one)."""
    if not (folder / "tokenizer.json").exists():
        train_tokenizer((document.text for document in train), vocabulary, positions).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if len(tokenizer) != vocabulary:
        raise DataError(
            f"the text gives a vocabulary of {len(tokenizer)} tokens, fewer than {vocabulary}: use more text"
        )
    return tokenizer


def detokenised(articles: list[Document]) -> list[Document]:
    """WikiText articles in ordinary spacing, as the model is trained on them."""
    return [Document(detokenise(document.text), document.origin) for document in articles]

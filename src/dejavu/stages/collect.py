"""`dejavu collect`: run the dense model over a corpus and keep what predictors learn from."""

import hashlib
from pathlib import Path

import numpy as np
from rich.progress import Progress

from dejavu.activations.collect import cache_head, collect
from dejavu.activations.space import check_free_space, estimate_bytes
from dejavu.activations.writer import CacheWriter
from dejavu.corpora.blocks import encode_documents, pack
from dejavu.corpora.documents import Document, corpus_hash
from dejavu.corpora.sources import documents
from dejavu.errors import DataError
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.schema import Config
from dejavu.tracking.run import Run, interactive


def run(run: Run) -> None:
    """Blocks of the corpus's train split, the dense forward pass over them, the cache in `run.folder/cache`."""
    keep_freed_memory()
    config = run.config
    loaded = load_model(config)
    texts, tokens_NT, documents_NT = corpus_blocks(config, loaded)
    head = cache_head(loaded, tokens_NT, documents_NT, config.batch_size, config.collect) | {
        "tokenizer": hashlib.sha256(loaded.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16],
        "corpus": {"name": config.corpus.name, "hash": corpus_hash(texts)},
        "document_hashes": [document.hash for document in texts],
    }
    check_free_space(run.folder, estimate_bytes(loaded.anatomy, tokens_NT.size, head["encoding"], config.collect.top))
    run.say(
        f"collecting {tokens_NT.size:,} tokens of {len(texts):,} documents of {config.corpus.name} with {loaded.name}"
    )
    with CacheWriter(run.folder / "cache", head) as writer, Progress(disable=not interactive(), transient=True) as bars:
        bar = bars.add_task("collecting", total=None)

        def show(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)

        timing = collect(loaded, tokens_NT, documents_NT, writer, config.batch_size, config.collect, show)
        writer.finish()
    if timing["speed_ratio"] is not None:
        run.say(
            f"{timing['tokens_per_second']:,.0f} tokens/s, {timing['speed_ratio']:.2f} of a plain forward pass, "
            f"{timing['bytes_per_token']:,.0f} bytes/token"
        )
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "corpus": {**head["corpus"], "documents": len(texts), "tokens": int(tokens_NT.size)},
        "timing": timing,
    }


def corpus_blocks(config: Config, loaded: LoadedModel) -> tuple[list[Document], np.ndarray, np.ndarray]:
    """(documents used, token blocks, document numbers), at most `corpus.tokens` tokens in whole blocks.

    Raises DataError for a corpus shorter than one block and for a model without a tokenizer.
    """
    if loaded.tokenizer is None:
        raise DataError(
            f"{loaded.name} has random weights and no tokenizer, so it cannot read text: use a trained model"
        )
    root = None if config.data_root is None else Path(config.data_root)
    texts = documents(config.corpus.name, "train", root, config.corpus, config.pretrain.packages)
    length = min(config.corpus.block, loaded.anatomy.context)
    encoded = encode_documents([document.text for document in texts], loaded.tokenizer, loaded.anatomy.separator)
    tokens_NT, documents_NT = pack(encoded, length)
    blocks = min(len(tokens_NT), config.corpus.tokens // length)
    if blocks == 0:
        raise DataError(
            f"corpus {config.corpus.name} gives {tokens_NT.size} tokens in whole blocks and "
            f"corpus.tokens={config.corpus.tokens} are asked for, less than one block of {length}: "
            "lower corpus.block or raise corpus.tokens"
        )
    tokens_NT, documents_NT = tokens_NT[:blocks], documents_NT[:blocks]
    return texts[: int(documents_NT.max()) + 1], tokens_NT, documents_NT

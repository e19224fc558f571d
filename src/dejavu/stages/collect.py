"""`dejavu collect`: run a model over a corpus and keep what predictors learn from.

Predictors learn from the dense stream and are served the one that they themselves thin out. `collect.on_policy=true`
records that one: the taps they will read, and what each unit would contribute there.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from dejavu.activations.collect import Masked, cache_head, collect, whole
from dejavu.activations.manifest import cache_id
from dejavu.activations.space import ACTIVE_SHARE, check_free_space, estimate_bytes
from dejavu.activations.writer import CacheWriter
from dejavu.analysis.activity import write_activity
from dejavu.corpora.blocks import encode_documents, pack
from dejavu.corpora.documents import Document, corpus_hash
from dejavu.corpora.sources import documents
from dejavu.errors import DataError
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.memory import keep_freed_memory
from dejavu.predictors.bundle import load_bundle
from dejavu.schema import Config
from dejavu.sparsity.calibration import choose_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Predicted, Tokens
from dejavu.tracking.run import Run, interactive


def run(run: Run) -> None:
    """Blocks of the corpus's train split, the forward pass over them, the cache and what it says of activity."""
    keep_freed_memory()
    config = run.config
    loaded = load_model(config)
    if loaded.places is not None:
        run.say(loaded.places)
    texts, tokens_NT, documents_NT = corpus_blocks(config, loaded, config.corpus.tokens)
    head = cache_head(loaded, tokens_NT, documents_NT, config.batch_size, config.collect) | {
        "tokenizer": hashlib.sha256(loaded.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16],
        "corpus": {"name": config.corpus.name, "hash": corpus_hash(texts)},
        "document_hashes": [document.hash for document in texts],
    }
    masked: Masked = whole
    if config.collect.on_policy:
        masked, head["stream"] = on_policy(loaded, config)
    how = config.collect
    share = config.model.active_share or ACTIVE_SHARE
    needed = estimate_bytes(loaded.anatomy, tokens_NT.size, head["encoding"], how.top, share, head["recorded"])
    check_free_space(run.folder, needed)
    run.say(
        f"collecting {tokens_NT.size:,} tokens of {len(texts):,} documents of {config.corpus.name} with {loaded.name}"
        + (f", thinned out by bundle {head['stream']['bundle']}" if config.collect.on_policy else "")
    )
    with CacheWriter(run.folder / "cache", head) as writer, Progress(disable=not interactive(), transient=True) as bars:
        bar = bars.add_task("collecting", total=None)

        def show(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)

        timing = collect(loaded, tokens_NT, documents_NT, writer, config.batch_size, config.collect, show, masked)
        writer.finish()
    write_activity(run.folder)
    if timing["speed_ratio"] is not None:
        run.say(
            f"{timing['tokens_per_second']:,.0f} tokens/s, {timing['speed_ratio']:.2f} of a plain forward pass, "
            f"{timing['bytes_per_token']:,.0f} bytes/token"
        )
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "corpus": {**head["corpus"], "documents": len(texts), "tokens": int(tokens_NT.size)},
        "cache": {"id": cache_id(run.folder / "cache")},
        "timing": timing,
    }


def on_policy(loaded: LoadedModel, config: Config) -> tuple[Masked, dict[str, Any]]:
    """What leaves units out while recording, and how the cache names that stream.

    Raises DataError for a bundle of another model.
    """
    bundle = load_bundle(Path(str(config.predictors)))
    bundle.check_fits(loaded.fingerprint, loaded.anatomy)
    budget = choose_budget(config.sparsity, loaded.anatomy, bundle).budget
    sparsifier = Sparsifier(
        loaded.anatomy,
        Predicted(bundle, loaded.device),
        budget,
        tap=bundle.config["tap"],
        head_unit=config.sparsity.head_unit,
    )

    @contextmanager
    def masked(kept_N: Tensor) -> Iterator[None]:
        with sparsifier.attached():
            place_N = torch.arange(len(kept_N), device=kept_N.device)
            sparsifier.begin(Tokens(kept_N, place_N, place_N))
            yield

    stream = {"bundle": bundle.id, "mlp": budget.mlp, "heads": budget.heads}
    return masked, {**stream, "document_hashes": bundle.config["document_hashes"]}


def corpus_blocks(config: Config, loaded: LoadedModel, tokens: int) -> tuple[list[Document], np.ndarray, np.ndarray]:
    """(documents used, token blocks, document numbers), at most so many tokens in whole blocks.

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
    blocks = min(len(tokens_NT), tokens // length)
    if blocks == 0:
        raise DataError(
            f"corpus {config.corpus.name} gives {tokens_NT.size} tokens in whole blocks and {tokens} are asked for, "
            f"less than one block of {length}: lower corpus.block or ask for more tokens"
        )
    tokens_NT, documents_NT = tokens_NT[:blocks], documents_NT[:blocks]
    return texts[: int(documents_NT.max()) + 1], tokens_NT, documents_NT

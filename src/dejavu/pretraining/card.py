"""opt-tiny's model card, made from measurements: nothing in it is written by hand but the words between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from dejavu.corpora.blocks import encode_documents
from dejavu.corpora.documents import Document, corpus_hash
from dejavu.evaluation.adapter import DejaVuLM
from dejavu.evaluation.scoring import Request, Scorer
from dejavu.models.load import LoadedModel
from dejavu.models.observe import Observer, observed
from dejavu.pretraining.ngram import NgramModel


@dataclass(frozen=True)
class HeldOut:
    """Bits per byte of one held-out corpus, under the model and under the 5-gram with the same vocabulary and text."""

    corpus: str
    hash: str
    documents: int
    bytes: int
    model: float
    ngram: float


def held_out_bits(name: str, documents: Sequence[Document], loaded: LoadedModel, ngram: NgramModel) -> HeldOut:
    """Score documents under both models over the same tokens and bytes."""
    encoded = encode_documents([document.text for document in documents], loaded.tokenizer, loaded.anatomy.separator)
    nats = -sum(rolling_loglikelihoods([document.text for document in documents], loaded))
    ngram_nats = -sum(float(ngram.log_probabilities(ids).sum()) for ids in encoded)
    size = sum(len(document.text.encode()) for document in documents)
    scale = size * np.log(2)
    return HeldOut(name, corpus_hash(documents), len(documents), size, float(nats / scale), float(ngram_nats / scale))


def rolling_loglikelihoods(texts: Sequence[str], loaded: LoadedModel) -> list[float]:
    """Nats of each text in windows of the context length, as the evaluation scores it."""
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    return DejaVuLM(Scorer(loaded)).loglikelihood_rolling(requests, disable_tqdm=True)


class ActiveNeurons(Observer):
    """Counts neurons above zero per layer."""

    def __init__(self, layers: int) -> None:
        self.active, self.seen = [0] * layers, [0] * layers

    def neurons(self, layer: int, activations_NF: torch.Tensor) -> None:
        self.active[layer] += int((activations_NF > 0).sum())
        self.seen[layer] += activations_NF.numel()


def active_shares(documents: Sequence[Document], loaded: LoadedModel) -> list[float]:
    """Share of neurons above zero in each layer, over unpadded windows of the documents."""
    observer = ActiveNeurons(loaded.anatomy.layers)
    scorer = Scorer(loaded, batch_size=1)
    context = loaded.anatomy.context
    with observed(loaded.anatomy, observer):
        for ids in encode_documents(
            [document.text for document in documents], loaded.tokenizer, loaded.anatomy.separator
        ):
            for start in range(0, len(ids) - 1, context):
                piece = ids[start : start + context + 1].tolist()
                scorer.batch_size = 10**6  # one request a call, so nothing is padded
                scorer.score([Request(piece[:1], piece[1:])] if len(piece) > 1 else [])
    return [active / max(1, seen) for active, seen in zip(observer.active, observer.seen, strict=True)]


def model_card(
    settings: Mapping[str, Any], training: Mapping[str, Any], held_out: Sequence[HeldOut], active: Sequence[float]
) -> str:
    """The card as Markdown, with the metadata block that the hub reads."""
    rows = pd.DataFrame(
        [[e.corpus, e.documents, f"{e.bytes:,}", f"{e.model:.4f}", f"{e.ngram:.4f}", e.hash] for e in held_out]
    )
    table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows.itertuples(index=False))
    shares = ", ".join(f"{share:.1%}" for share in active)
    facts = "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in {**training, **settings}.items())
    return f"""---
license: cc-by-sa-4.0
language: en
library_name: transformers
---

# opt-tiny

OPT's architecture at small size, really trained, so that contextual sparsity can be studied where no weights can be
downloaded. It is no assistant and knows little. `dejavu pretrain data_root=DIR` makes it; docs/data.md names the text.

## Training

{facts}

## Held-out text

Bits per byte; the 5-gram (modified Kneser-Ney) has the same vocabulary and the same training text.

| corpus | documents | bytes | opt-tiny | 5-gram | corpus hash |
|---|---|---|---|---|---|
{table}

pydocs repeats itself, which suits a 5-gram; WikiText is the fairer comparison.

## Active neurons

Share of neurons above zero per layer, first to last, on held-out pydocs: {shares}.
"""

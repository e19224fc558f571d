"""Who is measured. Each reads a prompt, then decodes a few tokens at a time and says how long each took.

A contender lives in a process of its own (`worker`). With random weights the text is noise: the most likely token is
taken and `</s>` does not end it. Weights are copied out of memory-mapped files, which read at half the speed.
"""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from dejavu.errors import ConfigError

PATIENCE = 600  # seconds that a token may take


class Contender(Protocol):
    """`start` gives the milliseconds to the first token, `decode` those of each further one."""

    def start(self, prompt: list[int], room: int) -> float: ...
    def decode(self, tokens: int) -> list[float]: ...


class HuggingFace:
    """transformers' model with its key-value cache; `compiled`: with a static cache through torch.compile."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self.model, self.compiled = model, compiled
        self.forward: Callable[..., Any] = torch.compile(model.forward) if compiled else model.forward

    def start(self, prompt: list[int], room: int) -> float:
        config, length = self.model.config, len(prompt)
        self.cache: Any = DynamicCache(config=config)
        if self.compiled:
            self.cache = StaticCache(config=config, max_cache_len=length + room)
        self.room, self.length, self.token = length + room, 0, 0
        return self._step(prompt)

    def decode(self, tokens: int) -> list[float]:
        return [self._step([self.token]) for _ in range(tokens)]

    @torch.inference_mode()
    def _step(self, ids: list[int]) -> float:
        """Milliseconds of one forward pass over new tokens."""
        started = time.perf_counter()
        # Learned positions are derived from a mask; a static cache wants one over its whole length.
        positions = torch.arange(self.length, self.length + len(ids))[None]
        mask = torch.zeros(1, self.room if self.compiled else self.length + len(ids), dtype=torch.long)
        self.length += len(ids)
        mask[:, : self.length] = 1
        logits = self.forward(
            input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=positions, past_key_values=self.cache,
            use_cache=True, logits_to_keep=1,
        ).logits  # fmt: skip
        self.token = int(logits[0, -1].argmax())
        return (time.perf_counter() - started) * 1e3


class CTranslate2:
    """CTranslate2's generator. It decodes in a thread of its own, which waits between our requests in its callback."""

    def __init__(self, folder: Path, compute_type: str, threads: int) -> None:
        import ctranslate2

        self.generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=compute_type, intra_threads=threads, inter_threads=1
        )
        self.thread: threading.Thread | None = None

    def start(self, prompt: list[int], room: int) -> float:
        self._finish()
        self.moments: queue.Queue[float] = queue.Queue()
        self.wanted = threading.Semaphore(0)
        self.over = False

        def told(_: Any) -> bool:
            self.moments.put(time.perf_counter())
            self.wanted.acquire()
            return self.over

        def generate() -> None:
            self.generator.generate_batch(
                [[f"t{token}" for token in prompt]], max_length=room, min_length=room, include_prompt_in_result=False,
                callback=told,
            )  # fmt: skip

        self.thread = threading.Thread(target=generate, daemon=True)
        started = time.perf_counter()
        self.thread.start()
        return (self.moments.get(timeout=PATIENCE) - started) * 1e3

    def decode(self, tokens: int) -> list[float]:
        """Each token is asked for when the one before is there, as by the others."""
        times = []
        for _ in range(tokens):
            started = time.perf_counter()
            self.wanted.release()
            times.append((self.moments.get(timeout=PATIENCE) - started) * 1e3)
        return times

    def _finish(self) -> None:
        """End the text before: a generator that waits in its callback can neither start anew nor be deleted."""
        if self.thread is not None:
            self.over = True
            self.wanted.release()
            self.thread.join()


class DejaVu:
    """The engine of this project, dense or sparse. `adopt` takes another's prompt, which both would read alike."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def start(self, prompt: list[int], room: int) -> float:
        started = time.perf_counter()
        self.logits = self.engine.prefill(np.array([prompt]), capacity=len(prompt) + room)
        self.first_ms = (time.perf_counter() - started) * 1e3
        return self.first_ms

    def adopt(self, other: "DejaVu") -> float:
        self.engine.continue_from(other.engine)
        self.logits, self.first_ms = other.logits, other.first_ms
        return self.first_ms

    def prepare(self) -> None:
        """What a contender with random weights does before a token."""

    def decode(self, tokens: int) -> list[float]:
        times = []
        for _ in range(tokens):
            self.prepare()
            started = time.perf_counter()
            self.logits = self.engine.step(self.logits.numpy().argmax(-1))
            times.append((time.perf_counter() - started) * 1e3)
        return times


def hugging_face_model(spec: dict[str, Any]) -> Any:
    """The model of a spec, from its folder or with random weights, in the storage's dtype and the attention wanted."""
    dtype = getattr(torch, spec["storage"])
    if spec["source"] is not None:
        model = AutoModelForCausalLM.from_pretrained(spec["source"], dtype=dtype, attn_implementation=spec["attention"])
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model.eval()
    sizes = dict(spec["architecture"])
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=spec["attention"])
    model.to_empty(device="cpu").tie_weights()
    fill(model, spec["seed"])
    return model.eval()


def fill(model: Any, seed: int) -> None:
    """Random weights from one repeated block of values: drawing 7e9 of them would take minutes."""
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * 0.02
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            for first in range(0, len(flat), len(block)):
                part = flat[first : first + len(block)]
                part.copy_(block[: len(part)])
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1)


def refuse_vocabulary(size: int) -> None:
    """Raise ConfigError for a vocabulary that CTranslate2 pads and then cannot run."""
    if size % 8:
        raise ConfigError(f"CTranslate2 needs a vocabulary that is a multiple of 8, not {size}")

"""`sparsify(model)`: a loaded model whose own `generate` decodes with the engine; `restore(model)` undoes it.

Only the forward pass of a generation is replaced: sampling, processors, criteria, streamers and padding stay
transformers' own. A forward pass without a cache is the dense model's, as before.
Shapes: B sequences, T new tokens of each, V vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu.checks import check
from dejavu.decode.build import make_engine
from dejavu.decode.engine import Engine
from dejavu.errors import ConfigError, DataError
from dejavu.models.families import MODELS, anatomy, supported
from dejavu.models.load import LoadedModel
from dejavu.predictors.bundle import Bundle, load_bundle
from dejavu.predictors.manifest import CONFIG
from dejavu.schema import Config, Decode, Sparsity

STANDING = "_dejavu"  # the attribute of a sparsified model that says so
KEPT_AS_IT_COMES = "the engine keeps its keys and values as they come, so nothing can be reordered or taken back"


def sparsify(
    model: Any,
    predictors: str | Path | None = None,
    mlp: float = 0.75,
    heads: float = 0.75,
    backend: str = "kernel",
    storage: str = "bfloat16",
    kv: str = "lazy",
    window: int = 16,
    overlap: bool = True,
    threads: int | None = None,
    head_unit: str = "head",
) -> Engine:
    """Let `model.generate` decode without the fractions `mlp` of the neurons and `heads` of the heads; the engine.

    model: a loaded causal LM of a family in `dejavu.models`, on the CPU. The engine keeps a copy of its weights in
    `storage`, taken now. predictors: what `dejavu train` wrote; none is needed where nothing is left out. head_unit:
    "group" keeps or leaves out heads that share keys and values together.
    Raises ConfigError for what the engine does not do, DataError for predictors that are not this model's.
    """
    if hasattr(model, STANDING):
        raise ConfigError("this model is sparsified already: call dejavu.restore(model) first")
    if not supported(model):
        raise ConfigError(f"sparsify takes a loaded {' or '.join(MODELS)}, not {type(model).__name__}")
    if backend != "kernel":
        raise ConfigError(f"sparsify has no backend {backend!r}, only 'kernel': simulate is for dejavu evaluate")
    whole = mlp == heads == 0
    if predictors is None and not whole:
        raise ConfigError(
            f"mlp={mlp:g} and heads={heads:g} need predictors that choose: give the folder that `dejavu train` wrote "
            "as predictors=DIR, or mlp=0 and heads=0"
        )
    # No crossover: what a text says must not depend on how much the others in its batch make a layer read.
    decode = Decode(storage=storage, kv=kv, window=window, threads=threads, overlap=overlap, crossover=1.0)
    config = Config(
        sparsity=Sparsity(
            "dense" if predictors is None else "predictor",
            positions="decode",
            mlp=mlp,
            heads=heads,
            head_unit=head_unit,
        ),
        decode=decode,
        backend=backend,
    )
    check(config)
    loaded = LoadedModel(model.config.name_or_path or "this model", model, None, anatomy(model))
    bundle = None if predictors is None else _bundle(Path(predictors))
    forward = EngineForward(model, make_engine(loaded, config, bundle, free=False))
    setattr(model, STANDING, forward)
    forward.attach()
    return forward.engine


def restore(model: Any) -> None:
    """Give a sparsified model its own forward pass back. Raises ConfigError for a model that is not sparsified."""
    if not hasattr(model, STANDING):
        raise ConfigError("this model is not sparsified, so there is nothing to restore: call dejavu.sparsify first")
    getattr(model, STANDING).detach()
    delattr(model, STANDING)


def _bundle(path: Path) -> Bundle:
    """The bundle meant by a path: itself, or a run's folder that holds one."""
    inner = path / "bundle"
    return load_bundle(inner if (inner / CONFIG).is_file() else path)


class EngineCache(Cache):
    """What transformers' loop hands from token to token in place of keys and values, which the engine keeps."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(layers=[])
        self.engine = engine

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions held, padding included."""
        return int(self.engine.state.length_B[0])

    @property
    def is_croppable(self) -> bool:
        return False

    def reorder_cache(self, *arguments: Any, **named: Any) -> None:
        """Raises ConfigError, as every other change does."""
        raise ConfigError(f"{KEPT_AS_IT_COMES}: use greedy search or sampling with num_beams=1")

    crop = reset = update = batch_repeat_interleave = batch_select_indices = reorder_cache


class EngineForward:
    """The methods that a sparsified model has in place of its own."""

    def __init__(self, model: Any, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.dense_forward, self.validate = model.forward, model._validate_generation_mode
        self.before: dict[str, Any] = {}
        self.cache: EngineCache | None = None  # of the generation that the engine holds

    def attach(self) -> None:
        """Stand on the instance, above the class's methods."""
        methods = {"forward": self.forward, "_validate_generation_mode": self.check_generation}
        self.before = {name: vars(self.model)[name] for name in methods if name in vars(self.model)}
        for name, method in methods.items():
            setattr(self.model, name, method)

    def detach(self) -> None:
        """Leave the instance as it was; what stood there before (accelerate does so, too) stands there again."""
        for name in ("forward", "_validate_generation_mode"):
            delattr(self.model, name)
        for name, method in self.before.items():
            setattr(self.model, name, method)

    def check_generation(self, mode: GenerationMode, settings: Any, *others: Any) -> None:
        """Raise ConfigError for a generation that needs more than one new token of each sequence after another."""
        if (settings.num_beams or 1) > 1:
            raise ConfigError(f"num_beams={settings.num_beams}: {KEPT_AS_IT_COMES}; use num_beams=1")
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ConfigError(f"{mode.value}: {KEPT_AS_IT_COMES}; use greedy search or sampling")
        if settings.use_cache is False:
            raise ConfigError("use_cache=False would run the dense model: leave it on, or call dejavu.restore(model)")
        if settings.guidance_scale not in (None, 1):
            raise ConfigError("guidance_scale decodes two texts in turn and the engine holds one batch: leave it out")
        self.validate(mode, settings, *others)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """Logits of the last position, (B, 1, V): a prompt for an empty cache, one new token for the engine's.

        Other calls are the dense model's. Raises ConfigError for what the engine cannot give, DataError for tokens that
        do not go on where it stands.
        """
        cache = others.pop("past_key_values", cache)  # its older name
        begins = isinstance(cache, Cache) and not isinstance(cache, EngineCache) and int(cache.get_seq_length()) == 0
        if not begins and not isinstance(cache, EngineCache):
            return self.dense_forward(
                input_ids=input_ids, attention_mask=attention_mask, cache=cache, inputs_embeds=inputs_embeds,
                labels=labels, use_cache=use_cache, position_ids=position_ids, logits_to_keep=logits_to_keep, **others,
            )  # fmt: skip
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError("the engine reads tokens, not inputs_embeds: give input_ids")
        refuse_outputs(self.model.config, labels, others)
        if input_ids.shape[1] > 1 and not (isinstance(logits_to_keep, int) and logits_to_keep == 1):
            raise ConfigError("the engine gives the logits of a prompt's last position: pass logits_to_keep=1")
        if not begins:
            self._refuse_other_text(cache, input_ids)
        held = 0 if begins else cache.get_seq_length()
        start_B = starts(attention_mask, len(input_ids), held + input_ids.shape[1])
        refuse_positions(position_ids, start_B, held, input_ids.shape[1])
        if begins:
            self.cache = None  # what it stood for is gone even if the prompt is refused
            logits_BV = self.engine.prefill(input_ids.numpy(), start_B)
            self.cache = EngineCache(self.engine)
        else:
            if not np.array_equal(start_B, self.engine.state.start_B):
                raise DataError("attention_mask pads these sequences otherwise than their prompts: keep it as it was")
            logits_BV = self.engine.step(input_ids[:, 0].numpy())
        if not bool(torch.isfinite(logits_BV).all()):
            raise DataError("the model gave a logit that is not finite: check the weights and predictors")
        return CausalLMOutputWithPast(logits=logits_BV[:, None], cache=self.cache)

    def _refuse_other_text(self, cache: EngineCache, input_ids: Tensor) -> None:
        """Raise DataError unless these are the next tokens of what the engine holds."""
        if cache is not self.cache:
            raise DataError(
                "this cache is of an earlier generation and the engine holds one at a time: give the whole text as a "
                "prompt, without a cache"
            )
        if input_ids.shape != (self.engine.state.batch, 1):
            raise DataError(
                f"input_ids of shape {tuple(input_ids.shape)} do not go on with {self.engine.state.batch} sequences "
                "by one token each: give the whole text as a prompt, without a cache and in one chunk"
            )


def refuse_outputs(settings: Any, labels: Tensor | None, others: dict[str, Any]) -> None:
    """Raise ConfigError when more than logits is asked for, by argument or by the model's config."""
    if labels is not None:
        raise ConfigError("the engine gives no loss: call the model without a cache, which runs it dense")
    for name in ("output_attentions", "output_hidden_states"):
        if others.get(name) or (others.get(name) is None and getattr(settings, name, False)):
            raise ConfigError(f"{name}: the engine gives logits only; leave it out or call dejavu.restore(model)")


def starts(attention_mask: Tensor | None, batch: int, length: int) -> np.ndarray:
    """Where each sequence starts after its padding, (B,). Raises DataError for a mask that is not left padding."""
    if attention_mask is None:
        return np.zeros(batch, np.int64)
    if attention_mask.shape != (batch, length):
        raise DataError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not cover {batch} sequences of {length} "
            "positions: give one value for every token so far, and no cache_implementation"
        )
    mask_BT = attention_mask.numpy() != 0
    start_B: np.ndarray = length - mask_BT.sum(1)
    if (start_B == length).any() or not np.array_equal(mask_BT, np.arange(length) >= start_B[:, None]):
        raise DataError(
            "attention_mask is not padding on the left of some text: set the tokenizer's padding_side='left' and give "
            "no empty prompt"
        )
    return start_B


def refuse_positions(position_ids: Tensor | None, start_B: np.ndarray, held: int, new: int) -> None:
    """Raise DataError for positions that do not count on from each sequence's start; those of padding are free."""
    if position_ids is None:
        return
    counted_BT = np.arange(held, held + new) - start_B[:, None]
    if bool(((position_ids.numpy() != counted_BT) & (counted_BT >= 0)).any()):
        raise DataError("position_ids do not count from each sequence's first token: leave them out")

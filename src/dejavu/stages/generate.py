"""`dejavu generate`: a prompt in, text streamed as it is decoded, speed and densities at the end."""

import sys
import time
from pathlib import Path

from dejavu.decode.build import make_engine
from dejavu.decode.sampling import Sampling, generate
from dejavu.errors import DataError
from dejavu.models.load import load_model
from dejavu.predictors.bundle import load_bundle
from dejavu.tracking.run import Run


def run(run: Run) -> None:
    """Decode one prompt and keep what was said."""
    config = run.config
    settings = config.generate
    loaded = load_model(config)
    if loaded.tokenizer is None:
        raise DataError(
            f"{loaded.name} has random weights and no tokenizer: it has nothing to say, use dejavu benchmark"
        )
    bundle = None if run.inputs["bundle"] is None else load_bundle(Path(str(config.predictors)))
    ids = [loaded.anatomy.separator, *loaded.tokenizer(settings.prompt, add_special_tokens=False)["input_ids"]]
    room = loaded.anatomy.context - len(ids)
    if room < settings.new_tokens:
        raise DataError(
            f"the prompt has {len(ids)} tokens and generate.new_tokens={settings.new_tokens} more are asked for, but "
            f"the context of {loaded.name} is {loaded.anatomy.context}: shorten one of them"
        )
    engine = make_engine(loaded, config, bundle)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, config.seed)
    stop = frozenset() if settings.ignore_end else frozenset({loaded.anatomy.separator})
    made: list[int] = []
    shown, started, first = "", time.perf_counter(), 0.0
    print(settings.prompt, end="", flush=True)
    for tokens_B, _ in generate(engine, [ids], settings.new_tokens, sampling, stop):
        first = first or time.perf_counter() - started
        made.append(int(tokens_B[0]))
        said = [token for token in made if token not in stop]
        text = loaded.tokenizer.decode(said, clean_up_tokenization_spaces=False)  # it would change what is shown
        if not text.endswith("\ufffd"):  # half a character waits for its other bytes
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()
    seconds = time.perf_counter() - started - first
    weights, counters = engine.weights, engine.counters
    positions = max(1, counters.tokens * engine.layers)
    density = {kind: counters.used[kind] / (positions * weights.units(kind)) for kind in ("mlp", "heads")}
    speed = (len(made) - 1) / seconds if len(made) > 1 else 0.0
    run.say(
        f"{len(made)} tokens, {speed:.1f} tokens/s after the first ({first * 1000:.0f} ms), neurons used "
        f"{density['mlp']:.1%}, heads used {density['heads']:.1%}"
    )
    run.record |= {
        "model": {"name": loaded.name, "parameters": loaded.parameters, "fingerprint": loaded.fingerprint},
        "text": shown,
        "sparsity": {
            "selector": config.sparsity.selector,
            "measured": {"mlp_density": density["mlp"], "head_density": density["heads"]},
        },
        "timing": {"first_token_seconds": first, "tokens_per_second": speed, "tokens": len(made)},
    }

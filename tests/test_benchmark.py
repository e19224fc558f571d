"""`dejavu benchmark`: bytes and floors, contenders, workers and their failures, the table; never a speed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import FAMILIES

from dejavu.analysis.latency import read_benchmark
from dejavu.benchmark import peers, report
from dejavu.benchmark.contenders import CTranslate2, DejaVu, HuggingFace, hugging_face_model
from dejavu.benchmark.ctranslate2_files import convert, write_random
from dejavu.benchmark.engines import engines
from dejavu.benchmark.floor import largest_cache, terms
from dejavu.benchmark.measure import Times, fastest, measure, waves, worker
from dejavu.benchmark.variants import DENSE, Variant, variant
from dejavu.decode.random_weights import random_weights
from dejavu.decode.weights import Weights
from dejavu.errors import ConfigError, DataError
from dejavu.models.families import shape_of
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import everything, make_budget

TINY = {
    "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
TINY_GATED = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
TINIES = {"opt": TINY, "llama": TINY_GATED}
SPARSE = Sparsity("predictor", mlp=0.75, heads=0.5)
PROMPT = [5, 9, 33, 7, 60]


@pytest.fixture(params=TINIES)
def architecture(request):
    """The config of a tiny model of each family."""
    return TINIES[request.param]


def spec(family: str = "dejavu", storage: str = "float32", **values: object) -> dict[str, object]:
    """A spec over a tiny shape, OPT's unless another is given."""
    found = peers.base(Config(), None, TINY, 1) | {"family": family, "storage": storage, "variants": [state(DENSE)]}
    return {**found, "ranks": (8, 4), "attention": "eager", "compute_type": storage, "memory_mb": 500.0, **values}


def state(sparsity: Sparsity, architecture: dict[str, object] = TINY) -> Variant:
    """What is timed of a tiny shape."""
    return variant(shape_of(architecture), sparsity)


def stored_bytes(weights: Weights) -> int:
    """Bytes of all rows of a model's body."""
    parts = [
        part.rows
        for block in weights.blocks
        for part in (block.queries, block.keys, block.values, block.output, block.first, block.second)
    ]
    return sum(rows.bytes_per_row * rows.shape[0] for rows in parts)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_terms_are_the_bytes_that_are_stored(storage, architecture):
    weights = random_weights(architecture, storage, ranks=(8, 4))
    shape = shape_of(architecture)
    found = terms(shape, storage, everything(shape), None, 10, 4)
    assert found.body == stored_bytes(weights) and found.predictors == 0
    assert found.embedding == weights.embedding.bytes_per_row * 96
    assert found.cache == 2 * 10 * weights.kv_heads * 8 * 2 * 4  # layers, positions, groups, values, K and V, bytes
    sparse = terms(shape, storage, make_budget(Sparsity("predictor", ratio=0.5), shape), (8, 4), 10, 4)
    assert (sparse.body, sparse.cache) == (found.body / 2, found.cache / 2)
    sparse = terms(shape, storage, make_budget(Sparsity("predictor", ratio=0.75), shape), (8, 4), 0, 4)
    halves = [
        (half.rows, predictor) for predictor in weights.predictors.values() for half in (predictor.down, predictor.up)
    ]
    assert sparse.predictors == sum(rows.bytes_per_row * rows.shape[0] for rows, _ in halves)
    assert sparse.total == sparse.body + sparse.predictors + sparse.embedding + sparse.cache


def test_terms_of_opt_1_3b_are_the_ones_in_the_cost_model():
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
    shape = shape_of({"model_type": "opt", **sizes})
    found = terms(shape, "bfloat16", make_budget(Sparsity("predictor", ratio=0.75), shape), (1024, 256), 0, 4)
    assert [round(part / 1e9, 2) for part in (found.body, found.predictors, found.embedding)] == [0.6, 0.17, 0.21]
    assert found.floor_ms(17) == pytest.approx(58, abs=1)


def test_waves_hold_what_fits_together():
    specs = [{"memory_mb": size} for size in (400, 500, 300, 2000, 100)]
    assert [[each["memory_mb"] for each in wave] for wave in waves(specs, 1000)] == [[400, 500], [300], [2000], [100]]


def test_heads_that_are_kept_or_left_out_in_groups_read_whole_groups():
    """Of 9 heads in 3 groups half are kept: 5 heads that lie in 2 groups at least, or 2 whole groups."""
    shape = shape_of({**TINY_GATED, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3})
    asked = [Sparsity("predictor", mlp=1, heads=0.5, head_unit=unit) for unit in ("head", "group")]
    single, grouped = (terms(shape, "int8", make_budget(one, shape), (4, 4), 7, 4, one.head_unit) for one in asked)
    row = 576 + 4
    assert single.body == 2 * row * 64 * 2 * (5 + 2) and grouped.body == 2 * row * 64 * 2 * (6 + 2)
    assert single.cache == grouped.cache == 2 * 2 * 7 * 64 * 2 * 4
    assert single.predictors - grouped.predictors == 2 * 4 * (9 - 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_decodes_its_own_greedy_tokens(family):
    model = FAMILIES[family]()
    contender = HuggingFace(model, compiled=False)
    contender.start(PROMPT, room=8)
    tokens = [contender.token]
    for _ in range(6):
        assert len(contender.decode(1)) == 1
        tokens.append(contender.token)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=7, do_sample=False, eos_token_id=-1)
    assert tokens == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_random_peers_are_finite_and_of_their_type(storage, architecture):
    model = hugging_face_model(spec("hf-eager", storage, architecture=architecture))
    assert model.dtype == getattr(torch, storage) and model.lm_head.weight is model.get_input_embeddings().weight
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    contender = HuggingFace(model, compiled=False)
    assert contender.start(PROMPT, 4) > 0 and len(contender.decode(3)) == 3


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_ctranslate2_reads_random_weights_and_waits_between_turns(tmp_path, storage, architecture):
    write_random(shape_of(architecture), tmp_path / "model", storage, seed=0)
    contender = CTranslate2(tmp_path / "model", storage, threads=1)
    for _ in range(2):
        assert contender.start(PROMPT, room=12) > 0
        assert len(contender.decode(4)) == len(contender.decode(4)) == 4 and contender.moments.empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_ctranslate2_converts_a_model_and_says_the_same(tmp_path, family):
    slow = {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}} if family == "llama" else {}
    model = FAMILIES[family](vocab_size=96, **slow)
    model.save_pretrained(tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "model", "float32")
    generator = CTranslate2(tmp_path / "model", "float32", threads=1).generator
    scores = generator.forward_batch([[f"t{token}" for token in PROMPT]])
    found = torch.from_numpy(np.array(scores))
    torch.testing.assert_close(found, model(torch.tensor([PROMPT])).logits, atol=1e-3, rtol=1e-3)


def test_a_vocabulary_that_ctranslate2_would_pad_is_refused(tmp_path):
    odd = spec("ctranslate2", architecture={**TINY, "vocab_size": 99})
    with pytest.raises(DataError, match="multiple of 8, not 99"), worker(odd):
        pass


def test_variants_share_a_prompt_and_decode_as_if_each_had_read_it(architecture):
    both = [state(DENSE, architecture), state(SPARSE, architecture)]
    first, second = engines(spec(variants=both, architecture=architecture))
    first.start(PROMPT, 8)
    second.adopt(first)
    alone = engines(spec(variants=[state(SPARSE, architecture)], architecture=architecture))[0]
    alone.start(PROMPT, 8)
    for contender in (second, alone):
        assert isinstance(contender, DejaVu) and len(contender.decode(4)) == 4
    torch.testing.assert_close(second.logits, alone.logits, atol=1e-5, rtol=1e-5)
    used = second.engine.counters.used
    assert used == {"mlp": 4 * 2 * 16, "heads": 4 * 2 * 2}
    assert second.engine.counters.rows["second"] == used["mlp"], "random weights are measured without skipping zeros"


def test_random_sets_are_fresh_for_every_token():
    contender = engines(spec(variants=[state(SPARSE)]))[0]
    contender.start(PROMPT, 24)
    sets = []
    for _ in range(20):
        contender.decode(1)
        sets.append(tuple(contender.engine.halves[1].choice.units_BK[0]))
    assert len(set(sets)) > 15 and all(len(each) == 16 for each in sets)


def test_contenders_take_turns_and_failures_become_rows():
    said = []
    specs = [spec(variants=[state(DENSE), state(SPARSE)]), spec(storage="int8", memory_mb=9e9)]
    results = measure(specs, [8], 2, 3, 4000.0, 0, lambda: 10.0, said.append)
    rows = report.frame(results, "tiny-random", 2, 3)
    assert sorted(rows["contender"]) == ["dejavu-dense", "dejavu-dense", "dejavu-sparse"]
    assert [len(times.each) for times in results if times.failure is None] == [6, 6]
    failed = rows[rows["ms_per_token"].isna()]
    assert len(failed) == 1 and failed["note"].str.contains("GB, 3.9 are there").all()
    assert any("int8" in line for line in said)
    assert (rows["floor_ms"][rows["ms_per_token"].notna()] == "cache-resident").all()


def test_a_setting_that_does_not_fit_in_memory_is_not_tried(monkeypatch):
    tried = []

    def no_worker(spec):
        tried.append(spec["label"])
        raise DataError("no")

    monkeypatch.setattr("dejavu.benchmark.measure.worker", no_worker)
    candidates = [spec(label=label, memory_mb=size) for label, size in (("large", 5000.0), ("small", 400.0))]
    assert fastest(candidates, 1000.0, [].append)["label"] == "large" and tried == ["small"]


def test_a_worker_that_dies_is_told():
    with worker(spec()) as process:
        process.process.kill()
        with pytest.raises(DataError, match="ran out of memory"):
            process.ask(do="decode", variant=0, tokens=1)


def test_a_worker_that_does_not_answer_is_not_waited_for(monkeypatch):
    with worker(spec()) as process:
        monkeypatch.setattr("dejavu.benchmark.measure.LIMIT", 0.2)
        process.process.send_signal(signal.SIGSTOP)
        with pytest.raises(DataError, match="gave no answer"):
            process.ask(do="decode", variant=0, tokens=1)


def test_a_worker_ends_when_the_process_that_asked_was_killed():
    """Also one that is at work and does not look at its input: here the input stays open in this process."""
    read, write = os.pipe()
    start = (
        "import os, subprocess, sys; from dejavu.benchmark.measure import command; "
        "worker = subprocess.Popen(command(), stdin=0); print(worker.pid, flush=True); worker.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], stdin=read, stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.1)
    os.close(write)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_peer_that_is_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch\.compile needs a C\+\+ compiler"):
        peers.refuse_missing("hf-compile")
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dejavu\[peers\]'"):
        peers.refuse_missing("ctranslate2")


def sample_rows() -> pd.DataFrame:
    """Times of a made-up run over OPT-1.3B's shape."""
    architecture = {**TINY, "hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32}

    def timed(family: str, storage: str, sparsity: Sparsity, first: float, each: list[float], memory: float) -> Times:
        state_of = state(sparsity, architecture)
        return Times(spec(family, storage, architecture=architecture), state_of, 128, first, each, [20.0], memory)

    times = [
        timed("hf-eager", "bfloat16", DENSE, 900.0, [240.0] * 4, 3000.0),
        timed("ctranslate2", "int8", DENSE, 800.0, [200.0] * 4, 2000.0),
        timed("dejavu", "int8", SPARSE, 5.0, [40.0, 50.0, 60.0], 2000.0),
        timed("dejavu", "bfloat16", SPARSE, 5.0, [80.0] * 4, 2000.0),
        Times(
            spec("hf-eager", "float32", architecture=architecture), state(DENSE, architecture), 128,
            failure="ran out of memory",
        ),
    ]  # fmt: skip
    return report.frame(times, "opt-1.3b-random", 2, 2)


def test_a_budget_that_is_not_the_same_everywhere_says_so(tmp_path):
    rows = sample_rows()
    rows.loc[(rows["storage"] == "bfloat16") & (rows["selector"] != "dense"), "budget"] = "calibrated"
    told = {line.split(", ")[1]: line for line in report.headlines(rows)}
    assert "75 % skipped" in told["int8"] and "75 % (calibrated) skipped" in told["bfloat16"]
    report.write(rows, tmp_path)
    read = read_benchmark(tmp_path)
    assert read["budget"].value_counts().to_dict() == {"uniform": 4, "calibrated": 1}
    read.drop(columns="budget").to_csv(tmp_path / "benchmark.csv", index=False)
    assert set(read_benchmark(tmp_path)["budget"]) == {"uniform"}, "a table from before there were others"


def test_the_table_has_its_columns_and_compares_like_with_like(tmp_path):
    rows = sample_rows()
    assert list(rows.columns[:22]) == [
        "contender", "model", "storage", "selector", "mlp", "heads", "prompt_tokens", "batch", "ms_per_token",
        "ms_per_token_q1", "ms_per_token_q3", "first_token_ms", "bytes_per_token", "floor_ms", "peak_memory_mb",
        "threads", "kv", "overlap", "rank", "new_tokens", "repeats", "bandwidth_gb_s",
    ]  # fmt: skip
    assert rows["floor_ms"].iloc[0] == pytest.approx(rows["bytes_per_token"].iloc[0] / 20e6)
    lines = report.headlines(rows)
    assert any("int8" in line and "4.00 times as fast as ctranslate2 int8 (200.0 ms)" in line for line in lines)
    assert any("bfloat16" in line and "3.00 times as fast as hf-eager bfloat16" in line for line in lines)
    report.write(rows, tmp_path)
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    page = tmp_path / "page.md"
    page.write_text("# Speed\n<!-- x: begin -->\nold\n<!-- x: end -->\nrest\n")
    report.main([str(tmp_path), str(page), "x"])
    text = page.read_text()
    assert "old" not in text and text.endswith("rest\n") and "| dejavu-sparse | int8 | 75 % | 128 | 50.0" in text
    assert "did not run" in text
    with pytest.raises(DataError, match="once each"):
        report.main([str(tmp_path), str(page), "y"])


def test_the_last_cache_is_found():
    assert 1 << 18 <= largest_cache() <= 1 << 32


def test_the_command_measures_and_writes_its_files(tmp_path):
    command = [
        sys.executable, "-c", "from dejavu.cli import main; main()", "benchmark", "model.random_init=true",
        "benchmark.contenders=[dejavu]", "benchmark.storages=[float32]", "benchmark.ratios=[0.75]",
        "benchmark.prompts=[8]", "benchmark.new_tokens=1", "benchmark.repeats=2", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    measured = record["metrics"]["benchmark"]
    assert set(measured) == {f"ms_per_token/dejavu-{kind}/8" for kind in ("dense/float32/0", "sparse/float32/0.75")}
    assert all(entry["value"] > 0 and entry["n"] == 2 for entry in measured.values())
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")), "tracked as every other stage"
    rows = pd.read_csv(tmp_path / "run" / "benchmark.csv")
    assert rows["ms_per_token"].notna().all() and set(rows["selector"]) == {"dense", "random"}
    refused = subprocess.run([*command, "backend=simulate"], capture_output=True, text=True, cwd=root)
    assert refused.returncode == 1 and "masks a dense model and has no speed" in refused.stderr

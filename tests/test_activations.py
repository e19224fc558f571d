"""The activation cache holds what the model computed, survives being killed, and says clearly what is wrong with it."""

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, tiny_llama, tiny_opt, tiny_opt_post_norm

from dejavu.activations.cache import ActivationCache, CacheWriter, cache_id, check_free_space, estimate_bytes
from dejavu.activations.collect import cache_head, collect
from dejavu.activations.encode import compressed
from dejavu.activations.layout import COMPRESSED, layer_file
from dejavu.activations.manifest import read_manifest
from dejavu.errors import ConfigError, DataError
from dejavu.models.families import anatomy
from dejavu.models.load import LoadedModel
from dejavu.models.taps import TapSource, tap_source
from dejavu.schema import TAPS, Collect

FAMILIES = {"opt": tiny_opt, "post_norm": tiny_opt_post_norm, "llama": tiny_llama}
BATCH = 2
EVERYTHING = slice(None)


def load(build: Callable[[], Any]) -> LoadedModel:
    model = build()
    return LoadedModel("tiny", model, None, anatomy(model))


def text(blocks: int = 5, length: int = 12, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, document numbers) of random blocks; of the last two, `padding` tokens at the end are padding."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (blocks, length), dtype=np.int32)
    numbers = (np.arange(blocks * length, dtype=np.int32) // 9).reshape(blocks, length)
    if padding:
        numbers[-2:, -padding:] = -1
    return ids, numbers


def cached(
    folder: Path,
    loaded: LoadedModel,
    corpus: tuple[np.ndarray, np.ndarray],
    encoding: str = "auto",
    top: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ActivationCache, dict[str, float | None]]:
    how = Collect(encoding, top)
    with CacheWriter(folder, cache_head(loaded, *corpus, BATCH, how)) as writer:
        timing = collect(loaded, *corpus, writer, BATCH, how, progress)
        writer.finish()
    return ActivationCache(folder), timing


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is recorded


@pytest.fixture(scope="module", params=FAMILIES)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """(model, cache with encoding=dense, what hooks of the test's own saw per layer and module)."""
    loaded, corpus = load(FAMILIES[request.param]), text()
    cache, _ = cached(tmp_path_factory.mktemp("cache"), loaded, corpus, "dense")
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}

    def watch(layer: int, name: str, module: torch.nn.Module) -> Any:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            given_back = output[0] if isinstance(output, tuple) else output
            for suffix, tensor in ((".in", given), (".out", given_back)):
                seen.setdefault((layer, name + suffix), []).append(tensor.reshape(-1, tensor.shape[-1]))

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [
        watch(number, name, module)
        for number, block in enumerate(loaded.anatomy.blocks)
        for name, module in [("attention", block.layer.self_attn), ("heads", block.attention_output)]
    ]
    hidden = []
    for start in range(0, len(corpus[0]), BATCH):
        ids = torch.from_numpy(corpus[0][start : start + BATCH]).long()
        hidden.append(loaded.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states)
    for handle in handles:
        handle.remove()
    values = {key: torch.cat(batches) for key, batches in seen.items()}
    for layer in range(cache.layers):
        values[layer, "residual"] = torch.cat([states[layer].flatten(0, 1) for states in hidden])
    yield loaded, cache, values


def middle(loaded: LoadedModel, values: dict, layer: int) -> torch.Tensor:
    """m_l by hand: what attention gave added to r_l, in post-norm with its norm on top."""
    total = values[layer, "residual"] + values[layer, "attention.out"]
    block = loaded.anatomy.blocks[layer].layer
    return block.self_attn_layer_norm(total) if loaded.anatomy.post_norm else total


def test_taps_are_the_residuals(recorded: tuple) -> None:
    loaded, cache, values = recorded
    assert (cache.tokens, cache.layers, cache.width, cache.neurons, cache.heads) == (60, 2, 32, 64, 4)
    for layer in range(cache.layers):
        residual, expected = cache.tap(TapSource("residual", layer), EVERYTHING), values[layer, "residual"]
        np.testing.assert_array_equal(residual, expected.half().numpy())
        expected = middle(loaded, values, layer)
        np.testing.assert_array_equal(cache.tap(TapSource("middle", layer), EVERYTHING), expected.half().numpy())


def test_contributions_are_the_formula(recorded: tuple) -> None:
    loaded, cache, values = recorded
    for layer, block in enumerate(loaded.anatomy.blocks):
        m = middle(loaded, values, layer)
        if loaded.anatomy.gated:
            x, mlp = block.layer.post_attention_layernorm(m), block.layer.mlp
            activations = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
        else:
            x = m if loaded.anatomy.post_norm else block.layer.final_layer_norm(m)
            activations = block.layer.fc1(x).relu()
        columns = block.mlp_output.weight
        expected = torch.stack([(a[:, None] * columns.T).norm(dim=1) for a in activations])
        np.testing.assert_allclose(cache.mlp(layer, EVERYTHING), expected.numpy(), rtol=1e-3, atol=1e-5)
        heads = values[layer, "heads.in"].unflatten(1, (4, 8))
        parts = torch.einsum("dhk,nhk->nhd", block.attention_output.weight.unflatten(1, (4, 8)), heads)
        np.testing.assert_allclose(cache.heads_of(layer, EVERYTHING), parts.norm(dim=2).numpy(), rtol=1e-3, atol=1e-5)
        summed = parts.sum(1) + (block.attention_output.bias if block.attention_output.bias is not None else 0)
        torch.testing.assert_close(summed, values[layer, "attention.out"])


def test_documents_tokens_and_positions(recorded: tuple) -> None:
    _, cache, _ = recorded
    ids, numbers = text()
    np.testing.assert_array_equal(cache.token_ids, ids.ravel())
    np.testing.assert_array_equal(cache.documents, numbers.ravel())
    np.testing.assert_array_equal(cache.positions, np.tile(np.arange(12), 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_encodings_agree(tmp_path: Path, family: str) -> None:
    loaded, corpus = load(FAMILIES[family]), text()
    dense, _ = cached(tmp_path / "dense", loaded, corpus, "dense")
    top, _ = cached(tmp_path / "top", loaded, corpus, "top", 0.25)
    automatic, _ = cached(tmp_path / "auto", loaded, corpus)
    assert automatic.manifest["encoding"] == ("sparse" if loaded.anatomy.relu else "top")
    for layer in range(2):
        everything, largest = dense.mlp(layer, EVERYTHING), top.mlp(layer, EVERYTHING)
        assert (largest > 0).sum(axis=1).max() == 16
        np.testing.assert_array_equal(largest, np.where(largest > 0, everything, 0))
        assert (np.where(largest > 0, np.inf, everything).min(axis=1) >= 0).all()
        left_out = np.where(largest > 0, 0, everything).max(axis=1)
        assert (left_out <= np.where(largest > 0, largest, np.inf).min(axis=1)).all()
        if loaded.anatomy.relu:
            np.testing.assert_array_equal(automatic.mlp(layer, EVERYTHING), everything)
    if not loaded.anatomy.relu:
        with pytest.raises(ConfigError, match=r"collect\.encoding=sparse"):
            cache_head(loaded, *corpus, BATCH, Collect("sparse"))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_in_nothing(tmp_path: Path, family: str) -> None:
    loaded, (ids, numbers) = load(FAMILIES[family]), text(padding=5)
    cache, timing = cached(tmp_path / "padded", loaded, (ids, numbers))
    assert cache.tokens == timing["tokens"] == 50
    kept = numbers >= 0
    np.testing.assert_array_equal(cache.documents, numbers[kept])
    np.testing.assert_array_equal(cache.token_ids, ids[kept])
    np.testing.assert_array_equal(cache.positions, np.tile(np.arange(12), 5)[kept.ravel()])
    short, _ = cached(tmp_path / "short", loaded, (ids[-2:, :7], numbers[-2:, :7]))
    for layer in range(2):
        for point in ("residual", "middle"):
            found = [cache.tap(TapSource(point, layer), rows) for rows in (slice(36, 50), EVERYTHING)]
            np.testing.assert_array_equal(found[0], found[1][36:])
            np.testing.assert_allclose(found[0], short.tap(TapSource(point, layer), EVERYTHING), rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(
            cache.heads_of(layer, slice(36, 50)), short.heads_of(layer, EVERYTHING), rtol=2e-3, atol=2e-3
        )


def test_timing_and_progress(tmp_path: Path) -> None:
    loaded, corpus, calls = load(tiny_opt), text(), []
    _, timing = cached(tmp_path / "cache", loaded, corpus, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert timing["tokens"] == 60
    assert all(value is not None and value > 0 for value in timing.values())
    size = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir() if path.name != "manifest.json")
    assert timing["bytes_per_token"] == size / 60
    cache, timing = cached(tmp_path / "cache", loaded, corpus)  # finished already
    assert (cache.tokens, timing["tokens"], timing["speed_ratio"]) == (60, 0, None)


# Files: what goes in comes out

HEAD = {"layers": 1, "width": 3, "neurons": 6, "heads": 2, "encoding": "sparse", "top": None, "block": 8}


def some_batch(tokens: int, seed: int = 0, c: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Rows for every file of a cache with HEAD; about half of the contributions are 0."""
    random = np.random.default_rng(seed)
    if c is None:
        c = np.maximum(random.standard_normal((tokens, HEAD["neurons"])), 0)
    half = torch.from_numpy(c).float().half()
    rows = dict(zip(COMPRESSED, compressed(half.float(), half, HEAD["neurons"]), strict=True))
    rows |= {kind: random.standard_normal((tokens, HEAD["width"])) for kind in ("residual", "middle")}
    rows["heads"] = random.random((tokens, HEAD["heads"]))
    files = {
        layer_file(kind, 0): values.astype("<f2") if values.dtype == float else values for kind, values in rows.items()
    }
    numbers = np.arange(tokens)
    return files | {"document.u32": numbers.astype("<u4"), "token.u32": numbers.astype("<u4"),
                    "position.u16": numbers.astype("<u2")}  # fmt: skip


def write(folder: Path, batches: list[dict[str, np.ndarray]], head: dict = HEAD) -> None:
    with CacheWriter(folder, head) as writer:
        for batch in batches[writer.batches_done :]:
            for name, values in batch.items():
                writer.append(name, values)
            writer.commit()
        writer.finish()


def kept_by_sorting(c: np.ndarray, kept: int) -> np.ndarray:
    """The reference for encoding=top: everything but the `kept` largest of each row at 0, ties to the lower index."""
    result = np.zeros_like(c)
    for row, values in enumerate(c):
        places = np.argsort(-values, kind="stable")[:kept]
        result[row, places] = values[places]
    return result


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Contributions (1 to 12 tokens, 1 to 9 neurons) with many zeros, ties and rows without any."""
    tokens, neurons = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    value = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0]), st.floats(2.0**-14, 60000, width=16))
    row = st.one_of(st.just([0.0] * neurons), st.lists(value, min_size=neurons, max_size=neurons))
    return np.array(draw(st.lists(row, min_size=tokens, max_size=tokens)), dtype=np.float32)


@settings(max_examples=30, deadline=None)
@given(c=tables(), data=st.data())
def test_rows_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, c: np.ndarray, data: st.DataObject
) -> None:
    tokens, neurons = c.shape
    encoding = data.draw(st.sampled_from(["sparse", "top", "dense"]))
    kept = data.draw(st.integers(1, neurons)) if encoding == "top" else neurons
    cut = data.draw(st.integers(0, tokens))
    folder = tmp_path_factory.mktemp("cache")
    batches = []
    for part in (c[:cut], c[cut:]):
        batch = some_batch(len(part), c=np.zeros((len(part), 6)))
        half = torch.from_numpy(part).half()
        values = compressed(torch.from_numpy(part), half, kept)
        for kind, encoded in zip(COMPRESSED, values, strict=True):
            batch[layer_file(kind, 0)] = encoded
        if encoding == "dense":
            batch = {name: rows for name, rows in batch.items() if not name.startswith("mlp.")}
            batch[layer_file("mlp", 0)] = half.numpy()
        batches.append(batch)
    write(folder, batches, {**HEAD, "neurons": neurons, "encoding": encoding})
    cache = ActivationCache(folder)
    expected = kept_by_sorting(c, kept)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1)))), dtype=np.int64)
    start, stop, step = data.draw(st.slices(tokens).map(lambda rows: rows.indices(tokens)))
    for asked in (rows, slice(start, max(stop, 0), step) if step > 0 else EVERYTHING, EVERYTHING, slice(3, 1)):
        np.testing.assert_array_equal(cache.mlp(0, asked), expected[asked])
        assert cache.mlp(0, asked).dtype == cache.heads_of(0, asked).dtype == np.float32
        for name, values in (
            ("residual", cache.tap(TapSource("residual", 0), asked)),
            ("middle", cache.tap(TapSource("middle", 0), asked)),
            ("heads", cache.heads_of(0, asked)),
        ):
            written = np.concatenate([batch[layer_file(name, 0)] for batch in batches])
            np.testing.assert_array_equal(values, written[asked])
    cache.verify()
    shutil.rmtree(folder)


def test_copies_can_be_written_to_and_workers_reopen(tmp_path: Path) -> None:
    write(tmp_path / "cache", [some_batch(5)])
    cache = ActivationCache(tmp_path / "cache")
    cache.tap(TapSource("residual", 0), slice(0, 2))[:] = 0
    assert cache.tap(TapSource("residual", 0), slice(0, 2)).any()
    sent = pickle.dumps(cache)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent).mlp(0, EVERYTHING), cache.mlp(0, EVERYTHING))


def test_nan_is_not_taken_for_an_inactive_neuron() -> None:
    c = torch.tensor([[0.0, float("nan"), 3.0, 2.0], [1.0, 4.0, 3.0, 2.0]])
    for kept in (4, 2):
        _, index, values = compressed(c, c.half(), kept)
        assert np.isnan(values).sum() == 1
        assert index[np.isnan(values)] == 1


def test_more_neurons_than_16_bits_number(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="65,537 neurons"):
        CacheWriter(tmp_path, {**HEAD, "neurons": 65537})
    everything = torch.ones(1, 65536)
    with pytest.raises(DataError, match="encoding=dense"):
        compressed(everything, everything.half(), 65536)
    count, index, _ = compressed(everything, everything.half(), 65535)
    assert (count[0], index[0], index[-1]) == (65535, 0, 65534)


# Interruptions

CHILD = """
import os, resource, signal, sys
sys.path.insert(0, {tests!r})
import test_activations as t
from pathlib import Path
{body}
"""


def run_child(body: str) -> subprocess.CompletedProcess:
    code = CHILD.format(tests=str(Path(__file__).parent), body=body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_killed_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    child = run_child(f"""
append = t.CacheWriter.append
def deadly(self, name, values):
    if self.batches_done == 2 and name == "middle.01.f16":
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, name, values)
t.CacheWriter.append = deadly
t.cached(Path({str(tmp_path / "killed")!r}), t.load(t.tiny_opt), t.text(9))
""")
    assert child.returncode == -signal.SIGKILL, child.stderr
    progress = json.loads((tmp_path / "killed" / "progress.json").read_text())
    assert progress["batches"] in (1, 2)  # the last commit may still have been under way
    with pytest.raises(DataError, match="unfinished"):
        ActivationCache(tmp_path / "killed")
    loaded, corpus, seen = load(tiny_opt), text(9), []
    cached(tmp_path / "killed", loaded, corpus, progress=lambda done, total: seen.append(done))
    assert seen == list(range(progress["batches"] + 1, 6))
    cached(tmp_path / "whole", loaded, corpus)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_every_moment_is_a_good_one_to_stop(tmp_path: Path) -> None:
    batches = [some_batch(tokens, seed=tokens) for tokens in (3, 1, 4)]
    write(tmp_path / "whole", batches)
    for stop in range(3 * len(batches[0])):
        folder = tmp_path / str(stop)
        steps = [(name, values) for batch in batches for name, values in [*batch.items(), ("commit", None)]]
        with pytest.raises(InterruptedError), CacheWriter(folder, HEAD) as writer:
            for name, values in steps[:stop]:
                writer.commit() if values is None else writer.append(name, values)
            raise InterruptedError
        write(folder, batches)
        assert contents(folder) == contents(tmp_path / "whole")


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    child = run_child(f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    t.write(Path({str(tmp_path / "full")!r}), [t.some_batch(100, seed) for seed in range(12)])
except t.DataError as error:
    print(error)
""")
    assert f"{tmp_path / 'full'}/mlp." in child.stdout, child.stderr
    assert " cannot be written (File too large): make room" in child.stdout
    batches = [some_batch(100, seed) for seed in range(12)]
    with CacheWriter(tmp_path / "full", HEAD) as writer:
        assert 1 <= writer.batches_done <= 6
    write(tmp_path / "full", batches)
    write(tmp_path / "whole", batches)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_a_disk_that_fails_while_committing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    batches = [some_batch(4), some_batch(4, 1)]
    with CacheWriter(tmp_path, HEAD) as writer:
        for name, values in batches[0].items():
            writer.append(name, values)
        monkeypatch.setattr(os, "fsync", fail)
        writer.commit()
        with pytest.raises(DataError, match="No space left on device"):
            writer.finish()
    monkeypatch.undo()
    with CacheWriter(tmp_path, HEAD) as writer:
        assert (writer.batches_done, writer.tokens) == (0, 0)
    write(tmp_path, batches)
    ActivationCache(tmp_path).verify()


# Refusals


def test_another_head_names_the_keys_that_differ(tmp_path: Path) -> None:
    head = {**HEAD, "model": {"name": "a", "fingerprint": "1"}}
    other = {**HEAD, "model": {"name": "a", "fingerprint": "2"}, "seed": 3}
    CacheWriter(tmp_path / "begun", head).close()
    write(tmp_path / "finished", [some_batch(4)], head)
    for folder in ("begun", "finished"):
        with pytest.raises(DataError, match=r"\(model\.fingerprint, seed differ\)"):
            CacheWriter(tmp_path / folder, other)
    with CacheWriter(tmp_path / "finished", head) as writer:
        assert (writer.finished, writer.batches_done, writer.tokens) == (True, 1, 4)
        writer.finish()


def test_two_writers(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, HEAD), pytest.raises(DataError, match="another process"):
        CacheWriter(tmp_path, HEAD)


def test_half_a_batch_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"residual\.00\.f16"), CacheWriter(tmp_path, HEAD) as writer:
        writer.append("document.u32", np.arange(2, dtype="<u4"))
        writer.commit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "cache", [some_batch(5)])
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["residual.00.f16", "mlp.value.00.f16", "position.u16"])
def test_damaged_files(folder: Path, name: str) -> None:
    path, whole = folder / name, (folder / name).read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{name} has .* collect it again"):
        ActivationCache(folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        ActivationCache(folder)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=f"{name} has changed"):
        ActivationCache(folder).verify()


def test_damaged_manifests(folder: Path, tmp_path: Path) -> None:
    manifest, identity = read_manifest(folder), cache_id(folder)
    assert ActivationCache(folder).id == identity
    assert len(identity) == 16
    for change, words in (({"format_version": 2}, "update dejavu"), ({"format_version": "1"}, "format_version '1'")):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(DataError, match=words):
            ActivationCache(folder)
    for content, words in (
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"format_version": 1}', "lacks lay"),
    ):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=words):
            ActivationCache(folder)
    with pytest.raises(DataError, match="holds no activation cache"):
        cache_id(tmp_path / "nothing")


def test_a_file_shorter_than_its_commit(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError), CacheWriter(tmp_path, HEAD) as writer:
        for name, values in some_batch(4).items():
            writer.append(name, values)
        writer.commit()
        raise InterruptedError
    os.truncate(tmp_path / "heads.00.f16", 3)
    with pytest.raises(DataError, match=r"heads\.00\.f16 is shorter"):
        CacheWriter(tmp_path, HEAD)


def test_what_float16_does_not_hold(tmp_path: Path) -> None:
    loaded, corpus = load(tiny_opt), text()
    broken = copy.deepcopy(loaded.model)
    broken.model.decoder.layers[1].self_attn.out_proj.bias.fill_(1e6)
    with pytest.raises(DataError, match=r"a value above 65504, .* in the residual m of layer 1, batch 0"):
        cached(tmp_path / "overflow", LoadedModel("tiny", broken, None, anatomy(broken)), corpus)
    broken.model.decoder.layers[1].self_attn.out_proj.bias.zero_()
    broken.model.decoder.layers[1].fc1.bias.fill_(float("nan"))
    with pytest.raises(DataError, match="NaN in the neuron contributions of layer 1"):
        cached(tmp_path / "nan", LoadedModel("tiny", broken, None, anatomy(broken)), corpus)
    loaded.model.lm_head.weight = torch.nn.Parameter(torch.full((VOCABULARY, 32), float("nan")))
    with pytest.raises(DataError, match="logits of tiny are NaN"):
        cached(tmp_path / "logits", loaded, corpus)


def test_blocks_that_do_not_fit(tmp_path: Path) -> None:
    loaded = load(tiny_opt)
    with pytest.raises(DataError, match=r"lower corpus\.block"):
        cached(tmp_path / "long", loaded, text(length=65))
    with pytest.raises(DataError, match=r"raise corpus\.tokens"):
        cached(tmp_path / "none", loaded, text(blocks=0))
    head = cache_head(loaded, *text(), BATCH, Collect())
    with CacheWriter(tmp_path / "other", head) as writer, pytest.raises(ValueError, match="block, batch_size, input"):
        collect(loaded, *text(length=11), writer, 1, Collect())


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(0, 0, 21_000_000_000))
    check_free_space(tmp_path / "not" / "there", 20_000_000_000)
    with pytest.raises(DataError, match=r"needs about 20\.01 GB and its disk has 21\.00 GB free"):
        check_free_space(tmp_path / "not" / "there", 20_010_000_000)


@pytest.mark.parametrize("encoding", ["sparse", "top", "dense", "auto"])
def test_the_estimate_is_the_size(tmp_path: Path, encoding: str) -> None:
    loaded = load(tiny_opt)
    cache, _ = cached(tmp_path, loaded, text(), encoding, 0.25)
    share = float(np.mean([cache.mlp(layer, EVERYTHING) > 0 for layer in range(2)]))
    size = sum(entry["bytes"] for entry in cache.manifest["files"].values())
    assert estimate_bytes(loaded.anatomy, cache.tokens, encoding, 0.25, share) == pytest.approx(size, rel=0.02)


def test_looking_for_a_cache_imports_nothing_heavy() -> None:
    code = "import sys, dejavu.activations.manifest; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "transformers", "omegaconf"} & set(json.loads(loaded.replace("'", '"')))


# Some layers only


@pytest.mark.parametrize("encoding", ["sparse", "dense"])
def test_some_layers_alone_are_recorded_as_they_are_among_all(encoding, tmp_path):
    loaded, corpus = load(lambda: tiny_opt(num_hidden_layers=5)), text()
    every, _ = cached(tmp_path / "every", loaded, corpus, encoding)
    how = Collect(encoding, layers=[4])
    with CacheWriter(tmp_path / "some", cache_head(loaded, *corpus, BATCH, how)) as writer:
        collect(loaded, *corpus, writer, BATCH, how)
        writer.finish()
    some = ActivationCache(tmp_path / "some")
    assert some.recorded == [4] and every.recorded == [0, 1, 2, 3, 4]
    assert np.array_equal(some.mlp(4, EVERYTHING), every.mlp(4, EVERYTHING))
    assert np.array_equal(some.heads_of(4, EVERYTHING), every.heads_of(4, EVERYTHING))
    for tap in TAPS:
        for kind in ("mlp", "heads"):
            source = tap_source(tap, kind, 4)
            assert np.array_equal(some.tap(source, EVERYTHING), every.tap(source, EVERYTHING)), tap
    some.verify()
    size = sum(path.stat().st_size for path in (tmp_path / "some").iterdir() if path.suffix != ".json")
    if encoding == "dense":
        assert size == estimate_bytes(loaded.anatomy, some.tokens, encoding, 0.5, recorded=[4])
    with pytest.raises(DataError, match=r"collect\.layers=\[4\], collect layer 1 too"):
        some.mlp(1, EVERYTHING)
    with pytest.raises(DataError, match="collect layer 1 too"):
        some.tap(TapSource("residual", 1), EVERYTHING)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 0], []])
def test_layers_that_do_not_exist_are_not_recorded(layers):
    with pytest.raises(ConfigError, match=r"collect\.layers=.*the model has layers 0 to 1"):
        cache_head(load(tiny_opt), *text(), BATCH, Collect(layers=layers))

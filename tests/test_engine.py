"""The engine against the simulated model on the same sets, for every family, and what decoding must leave as it was."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny import FAMILIES, tiny_llama, tiny_opt, tiny_opt_post_norm

from dejavu.decode.choosing import Predicted
from dejavu.decode.engine import Engine
from dejavu.decode.random_weights import random_weights
from dejavu.decode.storage import unpack
from dejavu.decode.weights import Weights, pack_predictor, repack
from dejavu.errors import ConfigError, DataError
from dejavu.models.families import anatomy
from dejavu.models.taps import tap_source
from dejavu.predictors.network import Predictor
from dejavu.schema import STORAGES, TAPS, Sparsity
from dejavu.sparsity.budget import Budget, make_budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Replay, Selector, Tokens

PROMPT, LENGTH, WINDOW = 10, 40, 4
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-4, "int8": 5e-3}


@pytest.fixture(params=FAMILIES)
def family(request):
    """Makes a tiny model of each family, the same on every call."""
    return FAMILIES[request.param]


def input_ids(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(4, 90, (batch, length), generator=torch.Generator().manual_seed(0))


class Sets:
    """Random sets for each (kind, layer, position), the same whenever they are asked for; also none and all."""

    def __init__(self, weights: Weights, batch: int = 2) -> None:
        self.weights, self.batch, self.engine = weights, batch, None

    def mask(self, kind: str, layer: int, position: int) -> np.ndarray:
        random = np.random.default_rng([layer, position, kind == "mlp"])
        share = {0: 0.0, 1: 1.0}.get(position % 7, 0.3)
        return random.random((self.batch, self.weights.units(kind))) < share

    def __call__(self, kind, layer, batch):
        chosen = self.mask(kind, layer, int(self.engine.state.length_B[0]) - 1)
        union = np.flatnonzero(chosen.any(0))
        return union, chosen[:, union]


def decoded(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position from the prompt's last on."""
    if isinstance(engine.chooser, Sets):
        engine.chooser.engine = engine
    logits = [engine.prefill(ids[:, :PROMPT].numpy())]
    logits += [engine.step(ids[:, t].numpy()) for t in range(PROMPT, ids.shape[1])]
    return torch.stack(logits, 1)


def rounded(model, storage: str):
    """The model with its matrices as they are stored: what the engine's numbers are compared with."""
    weights, parts = repack(model, storage, free=False), anatomy(model)
    assert parts.decoding is not None
    parts.decoding.embedding.weight.data = unpack(weights.embedding).clone()
    model.get_output_embeddings().weight.data = unpack(weights.output).clone()
    for layer, attention, block in zip(parts.blocks, parts.decoding.attention, weights.blocks, strict=True):
        for name in ("queries", "keys", "values"):
            getattr(attention, name).weight.data = unpack(getattr(block, name).rows).clone()
        rows_FSD = unpack(block.first.rows).unflatten(0, (weights.neurons, -1))
        for place, linear in enumerate([layer.mlp_input, layer.mlp_up][: rows_FSD.shape[1]]):
            linear.weight.data = rows_FSD[:, place].clone()
        layer.attention_output.weight.data = unpack(block.output.rows).T.clone()
        layer.mlp_output.weight.data = unpack(block.second.rows).T.clone()
    return model


def simulated(model, sets: Sets, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the simulated model under the same sets, the prompt dense."""
    batch, length = ids.shape
    masks = {}
    for kind in ("mlp", "heads"):
        for layer in range(len(anatomy(model).blocks)):
            each = np.stack([sets.mask(kind, layer, position) for position in range(length)], 1)
            masks[kind, layer] = torch.from_numpy(each.reshape(batch * length, -1))
    sparsifier = Sparsifier(anatomy(model), Sized(masks), Budget((1, 1), (1, 1)))
    position_N = torch.arange(length).repeat(batch)
    with torch.no_grad(), sparsifier.attached():
        sparsifier.begin(Tokens(position_N >= PROMPT, position_N, position_N))
        return model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 :]


class Sized(Replay):
    """Replayed sets of any size."""

    def choose(self, choice, k):
        return self.masks_NU[choice.kind, choice.layer]


@pytest.mark.parametrize("kv", ["lazy", "all"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_logits_equal_the_simulated_models_on_replayed_sets(family, batch, storage, kv):
    weights = repack(family(), storage, free=False)
    sets, ids = Sets(weights, batch), input_ids(batch)
    found = decoded(Engine(weights, sets, kv=kv, window=WINDOW), ids)
    expected = simulated(rounded(family(), storage), sets, ids)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[storage], rtol=TOLERANCE[storage])


def test_dense_decoding_is_the_models(family):
    model, ids = family(), input_ids()
    found = decoded(Engine(repack(model, "float32", free=False)), ids)
    torch.testing.assert_close(found, model(input_ids=ids).logits[:, PROMPT - 1 :], atol=1e-4, rtol=1e-4)


def test_an_output_embedding_of_its_own_is_used(family):
    model, ids = family(tie_word_embeddings=False), input_ids()
    found = decoded(Engine(repack(model, "float32", free=False)), ids)
    torch.testing.assert_close(found, model(input_ids=ids).logits[:, PROMPT - 1 :], atol=1e-4, rtol=1e-4)


def test_prompts_of_unequal_length_are_padded_on_the_left(family):
    model, ids = family(), input_ids(3)
    weights = repack(model, "float32", free=False)
    starts = np.array([0, 4, 9])
    padded = Engine(weights, kv="lazy", window=WINDOW)
    together = [padded.prefill(ids[:, :PROMPT].numpy(), starts)]
    together += [padded.step(ids[:, t].numpy()) for t in range(PROMPT, LENGTH)]
    for row, start in enumerate(starts):
        alone = Engine(weights, kv="lazy", window=WINDOW)
        expected = [alone.prefill(ids[row : row + 1, start:PROMPT].numpy())]
        expected += [alone.step(ids[row : row + 1, t].numpy()) for t in range(PROMPT, LENGTH)]
        torch.testing.assert_close(torch.stack(together, 1)[row], torch.stack(expected, 1)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_lazy_keys_are_those_computed_at_once_bit_for_bit(family, threads):
    weights, ids = repack(family(), "float32", free=False), input_ids()
    lazy, every = (Engine(weights, Sets(weights), kv=kv, window=WINDOW, threads=threads) for kv in ("lazy", "all"))
    assert torch.equal(decoded(lazy, ids), decoded(every, ids))
    assert lazy.counters.rows["kv"] < every.counters.rows["kv"]
    if threads == 1:  # two threads may share a group's heads, and then both complete its keys and values
        assert every.counters.rows["kv"] == 2 * 2 * 2 * weights.kv_heads * 8 * (LENGTH - PROMPT)
    assert {k: v for k, v in lazy.counters.rows.items() if k != "kv"} == {
        k: v for k, v in every.counters.rows.items() if k != "kv"
    }


def test_counters_are_the_sizes_of_the_sets(family):
    weights, ids = repack(family(), "float32", free=False), input_ids()
    sets = Sets(weights)
    engine = Engine(weights, sets, window=WINDOW)
    decoded(engine, ids)
    positions = range(PROMPT, LENGTH)
    masks = {
        kind: [sets.mask(kind, layer, position) for layer in (0, 1) for position in positions]
        for kind in ("mlp", "heads")
    }
    assert engine.counters.used == {kind: sum(int(mask.sum()) for mask in each) for kind, each in masks.items()}
    unions = {kind: sum(int(mask.any(0).sum()) for mask in each) for kind, each in masks.items()}
    assert engine.counters.rows["first"] == unions["mlp"] and engine.counters.rows["o"] == unions["heads"] * 8
    assert engine.counters.rows["q"] == engine.counters.used["heads"] * 8
    first, second = (engine.counters.rows[name] for name in ("first", "second"))
    if family is tiny_opt:
        assert 0 < second < first, "neurons at zero need no row of W2"
    else:
        assert second == sum(int((mask.any(0)).sum()) for mask in masks["mlp"]) == first


def test_two_runs_give_the_same_bits(family):
    weights, ids = repack(family(), "int8", free=False), input_ids()
    first, second = (decoded(Engine(weights, Sets(weights), window=WINDOW), ids) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_weights_that_are_never_chosen_may_be_nan(family, storage):
    """Heads 0 and 1, their keys and values, half of the neurons: with kv=lazy and no flush nothing of them is read."""
    weights, ids = repack(family(), storage, free=False), input_ids(1, PROMPT + 6)
    alone = weights.kv_heads // 2 * weights.head_dim  # rows of k and v that no chosen head needs

    def chooser(kind, layer, batch):
        units = np.array([2, 3]) if kind == "heads" else np.arange(0, 64, 2)
        return units, np.ones((1, len(units)), bool)

    def run(poison: bool) -> torch.Tensor:
        engine = Engine(weights, chooser, window=16)
        logits = [engine.prefill(ids[:, :PROMPT].numpy())]
        if poison:
            nan = np.float32(np.nan) if storage == "float32" else np.uint16(0x7FC0)
            for block in weights.blocks:
                for part in (block.queries, block.output):
                    part.rows.data_RC[: 2 * weights.head_dim] = nan
                for part in (block.keys, block.values):
                    part.rows.data_RC[:alone] = nan
                for part in (block.first, block.second):
                    part.rows.data_RC.reshape(64, -1, 32)[1::2] = nan
        return torch.stack(logits + [engine.step(ids[:, t].numpy()) for t in range(PROMPT, PROMPT + 6)])

    clean = run(poison=False)
    poisoned = run(poison=True)
    assert torch.equal(poisoned, clean) and bool(torch.isfinite(clean).all())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tap", TAPS)
def test_the_engine_chooses_what_the_simulated_model_chooses(family, tap, overlap):
    different = differing_choices(family(), tap, overlap, "head")
    assert different <= 2 and tap_source(tap, "mlp", 0).layer == 0


def test_groups_of_heads_are_chosen_together_by_both():
    assert differing_choices(tiny_llama(), "overlap", True, "group") <= 2


def differing_choices(model, tap: str, overlap: bool, head_unit: str) -> int:
    """Choices of engine and simulated model that differ; only in units whose score is within 1e-4 of the cut."""
    ids = input_ids(1)
    torch.manual_seed(0)
    networks = {(k, n): Predictor(32, u, 8).eval() for k, u in (("mlp", 64), ("heads", 4)) for n in (0, 1)}
    weights = repack(model, "float32", free=False)
    weights.predictors = {
        key: pack_predictor(network, "float32", weights.together(key[0], head_unit))
        for key, network in networks.items()
    }
    budget = make_budget(Sparsity(ratio=0.5, head_unit=head_unit), anatomy(model))
    seen = {}

    engine = Engine(weights, Predicted(budget), tap=tap, window=WINDOW, overlap=overlap)
    engine.prefill(ids[:, :PROMPT].numpy())
    for position in range(PROMPT, LENGTH):
        engine.step(ids[:, position].numpy())
        for half in engine.halves:
            assert half.choice is not None
            together = weights.together(half.kind, head_unit)
            units = (half.choice.units_BK[0][:, None] * together + np.arange(together)).flatten().tolist()
            seen[half.kind, half.layer, position] = set(units), half.choice.scores_BU[0].repeat(together)

    class Simulated(Selector):
        name, reads_tap = "predictor", True

        @torch.no_grad()
        def scores(self, choice):
            return networks[choice.kind, choice.layer](choice.tap_ND)

    sparsifier = Sparsifier(anatomy(model), Simulated(), budget, tap=tap, head_unit=head_unit, record=True)
    position_N = torch.arange(LENGTH)
    with torch.no_grad(), sparsifier.attached():
        sparsifier.begin(Tokens(position_N >= PROMPT, position_N, position_N))
        model(input_ids=ids, use_cache=False)
    different = 0
    for (kind, layer, position), (units, scores) in seen.items():
        expected = set(torch.nonzero(sparsifier.masks[kind, layer][position]).flatten().tolist())
        cut = np.sort(scores)[-len(units)]
        assert all(abs(scores[unit] - cut) < 1e-4 for unit in units ^ expected), (kind, layer, position)
        different += units != expected
    assert len(seen) == 4 * (LENGTH - PROMPT)
    assert engine.counters.used == {kind: n * 2 * (LENGTH - PROMPT) for kind, n in (("mlp", 32), ("heads", 2))}
    return different


@pytest.mark.parametrize("kv", ["lazy", "all"])
def test_greedy_tokens_equal_the_simulated_models(family, kv):
    """200 tokens across window flushes, up to the first position whose two best logits are within 1e-3."""
    model = family(max_position_embeddings=256)
    weights = repack(model, "float32", free=False)
    sets = Sets(weights, 1)
    engine = Engine(weights, sets, kv=kv, window=WINDOW)
    sets.engine = engine
    ids = input_ids(1, PROMPT)
    logits = engine.prefill(ids.numpy())
    for _ in range(200):
        token = int(logits[0].argmax())
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
        logits = engine.step(np.array([token]))
    expected = simulated(model, sets, ids)[0]
    checked = 0
    for place, position in enumerate(range(PROMPT, ids.shape[1])):
        best = expected[place].topk(2).values
        if best[0] - best[1] < 1e-3:
            break
        assert int(expected[place].argmax()) == int(ids[0, position])
        checked += 1
    assert checked > 50


def test_models_that_the_kernels_do_not_know_are_refused():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for model, has in (
        (tiny_opt_post_norm(), r"norms after each half \(post-norm\)"),
        (tiny_llama(hidden_act="gelu"), "a gated MLP with gelu"),
        (tiny_llama(rope_parameters=dynamic), "rotary positions that depend on the length of the text"),
    ):
        with pytest.raises(ConfigError, match=f"this one has .*{has}: use backend=simulate"):
            repack(model, "float32")


def test_what_does_not_fit_is_refused():
    engine = Engine(repack(tiny_opt(), "float32"))
    with pytest.raises(DataError, match="longer than the context of 64"):
        engine.prefill(input_ids(1, 65).numpy())
    engine.prefill(input_ids(1, 10).numpy(), capacity=11)
    engine.step(np.array([5]))
    with pytest.raises(DataError, match="the cache holds 11 positions and is full"):
        engine.step(np.array([5]))


def test_repacking_frees_the_models_own_matrices(family):
    model = family()
    repack(model, "bfloat16")
    parts = anatomy(model)
    assert parts.decoding is not None
    for block, attention in zip(parts.blocks, parts.decoding.attention, strict=True):
        matrices = (attention.queries, attention.keys, attention.values, block.attention_output, block.mlp_input,
                    block.mlp_up, block.mlp_output)  # fmt: skip
        assert all(linear.weight.numel() == 0 for linear in matrices if linear is not None)


def test_threads_of_torch_stay_as_they_were():
    before = torch.get_num_threads()
    decoded(Engine(repack(tiny_opt(), "float32")), input_ids(1, 12))
    assert torch.get_num_threads() == before


def test_a_process_that_is_given_one_thread_keeps_to_it():
    """The first kernel of a process sets OpenMP's number of threads to numba's, which torch reads as its own."""
    code = """if True:
        import numpy
        import torch
        from tiny import tiny_opt
        from dejavu.decode.engine import Engine
        from dejavu.decode.weights import repack

        engine = Engine(repack(tiny_opt(), "float32"))
        engine.prefill(numpy.full((1, 12), 5))
        engine.step(numpy.array([5]))
        print(engine.threads, torch.get_num_threads())
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"NUMBA_NUM_THREADS": "2"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "1"]


def test_a_data_loader_with_workers_works_after_the_kernels():
    decoded(Engine(repack(tiny_opt(), "float32")), input_ids(1, 12))
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    assert sum(int(batch.sum()) for batch in loader) == 28


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("head_unit", ["head", "group"])
def test_random_weights_decode(family, storage, head_unit):
    architecture = family(**LARGER[family]).config.to_dict()
    weights = random_weights(architecture, storage, ranks=(8, 8), head_unit=head_unit)
    heads = weights.together("heads", head_unit)
    engine = Engine(weights, Predicted(Budget((150, 150), (heads, heads))))
    logits = engine.prefill(np.full((1, 8), 5))
    for _ in range(4):
        logits = engine.step(logits.argmax(-1).numpy())
    assert bool(torch.isfinite(logits).all()) and engine.counters.used == {"mlp": 4 * 2 * 150, "heads": 4 * 2 * heads}


LARGER = {
    tiny_opt: {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 600},
    tiny_llama: {"hidden_size": 64, "intermediate_size": 600},
}

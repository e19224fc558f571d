"""The engine against the simulated model on the same sets, and what decoding must leave as it was."""

import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_opt, tiny_opt_post_norm

from dejavu.decode.choosing import Predicted
from dejavu.decode.engine import Engine
from dejavu.decode.storage import unpack
from dejavu.decode.weights import Weights, pack_predictor, random_weights, repack
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
    weights = repack(model, storage, free=False)
    decoder = model.model.decoder
    decoder.embed_tokens.weight.data = unpack(weights.embedding).clone()
    for layer, block in zip(decoder.layers, weights.blocks, strict=True):
        attention = layer.self_attn
        for linear, part in ((attention.q_proj, block.queries), (attention.k_proj, block.keys),
                             (attention.v_proj, block.values), (layer.fc1, block.first)):  # fmt: skip
            linear.weight.data = unpack(part.rows).clone()
        attention.out_proj.weight.data = unpack(block.output.rows).T.clone()
        layer.fc2.weight.data = unpack(block.second.rows).T.clone()
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
def test_logits_equal_the_simulated_models_on_replayed_sets(batch, storage, kv):
    weights = repack(tiny_opt(), storage, free=False)
    sets, ids = Sets(weights, batch), input_ids(batch)
    found = decoded(Engine(weights, sets, kv=kv, window=WINDOW), ids)
    expected = simulated(rounded(tiny_opt(), storage), sets, ids)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[storage], rtol=TOLERANCE[storage])


def test_dense_decoding_is_the_models():
    model, ids = tiny_opt(), input_ids()
    found = decoded(Engine(repack(model, "float32", free=False)), ids)
    torch.testing.assert_close(found, model(input_ids=ids).logits[:, PROMPT - 1 :], atol=1e-4, rtol=1e-4)


def test_prompts_of_unequal_length_are_padded_on_the_left():
    model, ids = tiny_opt(), input_ids(3)
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


def test_lazy_keys_are_those_computed_at_once_bit_for_bit():
    weights, ids = repack(tiny_opt(), "float32", free=False), input_ids()
    lazy, every = (Engine(weights, Sets(weights), kv=kv, window=WINDOW) for kv in ("lazy", "all"))
    assert torch.equal(decoded(lazy, ids), decoded(every, ids))
    assert lazy.counters.rows["kv"] < every.counters.rows["kv"] == 2 * 2 * 2 * 4 * 8 * (LENGTH - PROMPT)
    assert {k: v for k, v in lazy.counters.rows.items() if k != "kv"} == {
        k: v for k, v in every.counters.rows.items() if k != "kv"
    }


def test_counters_are_the_sizes_of_the_sets():
    weights, ids = repack(tiny_opt(), "float32", free=False), input_ids()
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
    assert engine.counters.rows["fc1"] == unions["mlp"] and engine.counters.rows["o"] == unions["heads"] * 8
    assert engine.counters.rows["q"] == engine.counters.used["heads"] * 8
    assert 0 < engine.counters.rows["fc2"] < engine.counters.rows["fc1"], "neurons at zero need no row of fc2"


def test_two_runs_give_the_same_bits():
    weights, ids = repack(tiny_opt(), "int8", free=False), input_ids()
    first, second = (decoded(Engine(weights, Sets(weights), window=WINDOW), ids) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_weights_that_are_never_chosen_may_be_nan(storage):
    """q, k, v, o of head 1 and half of the neurons: with kv=lazy and no flush nothing of them is read."""
    weights, ids = repack(tiny_opt(), storage, free=False), input_ids(1, PROMPT + 6)

    def chooser(kind, layer, batch):
        units = np.array([0, 2, 3]) if kind == "heads" else np.arange(0, 64, 2)
        return units, np.ones((1, len(units)), bool)

    def run(poison: bool) -> torch.Tensor:
        engine = Engine(weights, chooser, window=16)
        logits = [engine.prefill(ids[:, :PROMPT].numpy())]
        if poison:
            nan = np.float32(np.nan) if storage == "float32" else np.uint16(0x7FC0)
            for block in weights.blocks:
                for part in (block.queries, block.keys, block.values, block.output):
                    part.rows.data_RC[8:16] = nan
                for part in (block.first, block.second):
                    part.rows.data_RC[1::2] = nan
        return torch.stack(logits + [engine.step(ids[:, t].numpy()) for t in range(PROMPT, PROMPT + 6)])

    clean = run(poison=False)
    poisoned = run(poison=True)
    assert torch.equal(poisoned, clean) and bool(torch.isfinite(clean).all())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tap", TAPS)
def test_the_engine_chooses_what_the_simulated_model_chooses(tap, overlap):
    """Sets may differ only in units whose score is within 1e-4 of the cut."""
    model, ids = tiny_opt(), input_ids(1)
    torch.manual_seed(0)
    networks = {(k, n): Predictor(32, u, 8).eval() for k, u in (("mlp", 64), ("heads", 4)) for n in (0, 1)}
    weights = repack(model, "float32", free=False)
    weights.predictors = {key: pack_predictor(network, "float32") for key, network in networks.items()}
    budget = make_budget(Sparsity(ratio=0.5), anatomy(model))
    seen = {}

    engine = Engine(weights, Predicted(budget), tap=tap, window=WINDOW, overlap=overlap)
    engine.prefill(ids[:, :PROMPT].numpy())
    for position in range(PROMPT, LENGTH):
        engine.step(ids[:, position].numpy())
        for half in engine.halves:
            assert half.choice is not None
            units, scores = half.choice.units_BK[0].tolist(), half.choice.scores_BU[0].copy()
            seen[half.kind, half.layer, position] = set(units), scores

    class Simulated(Selector):
        name, reads_tap = "predictor", True

        @torch.no_grad()
        def scores(self, choice):
            return networks[choice.kind, choice.layer](choice.tap_ND)

    sparsifier = Sparsifier(anatomy(model), Simulated(), budget, tap=tap, record=True)
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
    assert len(seen) == 4 * (LENGTH - PROMPT) and different <= 2
    assert tap_source(tap, "mlp", 0).layer == 0


@pytest.mark.parametrize("kv", ["lazy", "all"])
def test_greedy_tokens_equal_the_simulated_models(kv):
    """200 tokens across window flushes, up to the first position whose two best logits are within 1e-3."""
    model = tiny_opt(max_position_embeddings=256)
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
    with pytest.raises(ConfigError, match="post-norm OPT"):
        repack(tiny_opt_post_norm(), "float32")
    with pytest.raises(ConfigError, match="models of type llama"):
        repack(tiny_llama(), "float32")


def test_what_does_not_fit_is_refused():
    engine = Engine(repack(tiny_opt(), "float32"))
    with pytest.raises(DataError, match="longer than the context of 64"):
        engine.prefill(input_ids(1, 65).numpy())
    engine.prefill(input_ids(1, 10).numpy(), capacity=11)
    engine.step(np.array([5]))
    with pytest.raises(DataError, match="the cache holds 11 positions and is full"):
        engine.step(np.array([5]))


def test_repacking_frees_the_models_own_matrices():
    model = tiny_opt()
    repack(model, "bfloat16")
    assert all(layer.fc1.weight.numel() == 0 for layer in model.model.decoder.layers)


def test_threads_of_torch_stay_as_they_were():
    before = torch.get_num_threads()
    decoded(Engine(repack(tiny_opt(), "float32")), input_ids(1, 12))
    assert torch.get_num_threads() == before


def test_a_data_loader_with_workers_works_after_the_kernels():
    decoded(Engine(repack(tiny_opt(), "float32")), input_ids(1, 12))
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    assert sum(int(batch.sum()) for batch in loader) == 28


@pytest.mark.parametrize("storage", STORAGES)
def test_random_weights_decode(storage):
    shape = {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 600, "num_hidden_layers": 2, "vocab_size": 512}
    weights = random_weights({**shape, "max_position_embeddings": 32}, storage, ranks=(8, 8))
    chooser = Predicted(Budget((150, 150), (1, 1)))
    engine = Engine(weights, chooser)
    logits = engine.prefill(np.full((1, 8), 5))
    for _ in range(4):
        logits = engine.step(logits.argmax(-1).numpy())
    assert bool(torch.isfinite(logits).all()) and engine.counters.used == {"mlp": 4 * 2 * 150, "heads": 4 * 2}

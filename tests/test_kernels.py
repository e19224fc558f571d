"""The kernels, through torch's operators, against plain PyTorch over random shapes and sets, in every storage type.

`gated` stands for the second kind of model: two rows a neuron, RMSNorm, grouped heads, rotary positions.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.decode import ops, reference
from dejavu.decode.storage import Rows, pack, unpack
from dejavu.decode.vectors import best, layer_norm, rms_norm
from dejavu.decode.weights import NOTHING, Norm, Projection, matrix, normed, normed_matrix, turns
from dejavu.errors import ConfigError
from dejavu.models.anatomy import Rotary, plain_frequencies
from dejavu.models.topk import top_k_mask
from dejavu.schema import STORAGES

# int8 vectors are rounded to 16 bits besides: a part in 65,000 of the largest, over a row.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-4, "int8": 2e-3}
BATCHES = (1, 2, 3, 8)
THREADS = 2


def projection(generator: torch.Generator, rows: int, columns: int, outputs: int, storage: str) -> Projection:
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    return Projection(pack(weight, storage), torch.randn(outputs, generator=generator).numpy() * 0.1)


def first_projection(generator: torch.Generator, count: int, width: int, storage: str, gated: bool) -> Projection:
    """W1 of a plain MLP, or of a gated one."""
    part = projection(generator, 2 * count if gated else count, width, 2 * count if gated else count, storage)
    return Projection(part.rows, part.bias.reshape(count, 2)) if gated else part


def some_norm(generator: torch.Generator, width: int, rms: bool = False) -> Norm:
    weight, bias = (torch.randn(width, generator=generator).numpy() for _ in range(2))
    return Norm(weight, None if rms else bias, 1e-5)


def close(found: torch.Tensor, expected: torch.Tensor, storage: str) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE[storage], rtol=TOLERANCE[storage])


def beside(storage: str, predictor: tuple[Norm, Projection] | None = None, batch: int = 1) -> tuple:
    """The arguments of a predictor's first half in another's work list, and where its result goes."""
    if predictor is None:
        none_RC = np.zeros((0, 1), pack(torch.ones(1, 1), storage).data_RC.dtype)
        return *normed(None), none_RC, *normed(None)[:2], False, np.zeros((1, 0), np.float32)
    return *normed_matrix(*predictor), True, np.empty((batch, len(predictor[1].bias)), np.float32)


def some_units(data: st.DataObject, count: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A union of units and which sequence chose which: none, one, some, all."""
    size = data.draw(st.sampled_from(sorted({0, 1, count // 2, count})))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    units = np.sort(random.permutation(count)[:size])
    mask = random.random((batch, size)) < data.draw(st.sampled_from([0.3, 1.0]))
    return torch.from_numpy(units), torch.from_numpy(mask)


def run_mlp(x_BD, units, mask, norm, first, second, extra, skip=True) -> tuple[torch.Tensor, np.ndarray]:
    x = x_BD.clone(memory_format=torch.preserve_format)
    sums, read = np.empty((THREADS, len(x), second.bias.size), np.float32), np.zeros((THREADS, 8), np.int64)
    bound = ops.Bound("mlp", *normed_matrix(norm, first), *matrix(second), skip, sums, read, *extra)
    ops.mlp(x, units, mask, bound.number)
    return x, read.sum(0)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(STORAGES), st.sampled_from(BATCHES), st.booleans(), st.booleans())
def test_mlp_equals_the_reference(data, storage, batch, skip, gated):
    width, count = data.draw(st.sampled_from([1, 7, 64, 515, 1100])), data.draw(st.sampled_from([1, 5, 64, 131]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    first = first_projection(generator, count, width, storage, gated)
    second = projection(generator, count, width, width, storage)
    x_BD, norm = torch.randn(batch, width, generator=generator), some_norm(generator, width, rms=gated)
    units, mask = some_units(data, count, batch)
    predictor = (some_norm(generator, width), projection(generator, 9, width, 9, storage))
    extra = data.draw(st.sampled_from([beside(storage), beside(storage, predictor, batch)]))
    found, read = run_mlp(x_BD, units, mask, norm, first, second, extra, skip)
    close(found, reference.mlp(x_BD, units, mask, norm, first, second), storage)
    if extra[-1].size:
        close(torch.from_numpy(extra[-1]), reference.project(x_BD, *predictor, relu=True), storage)
    every = reference.activations(reference.normed(x_BD, norm), unpack(first.rows), torch.from_numpy(first.bias))
    active = (every[:, units] * mask).abs().gt(1e-2).any(0)
    assert read[0] == len(units) and int(active.sum()) <= read[1] <= len(units)
    assert skip or read[1] == len(units)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(STORAGES), st.sampled_from(BATCHES), st.booleans())
def test_attention_equals_the_reference_and_catches_up_on_pending_positions(data, storage, batch, gated):
    groups, size, width = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([4, 10])), 33
    count = groups * (data.draw(st.sampled_from([1, 3])) if gated else 1)
    length, pending = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    parts = [projection(generator, n * size, width, n * size, storage) for n in (count, groups, groups)]
    output, norm = projection(generator, count * size, width, width, storage), some_norm(generator, width, rms=gated)
    table = turns(Rotary(plain_frequencies(100.0, size), 1.2), 16) if gated else NOTHING
    turns_PK = torch.from_numpy(table) if gated else None
    x_BTD = torch.randn(batch, length, width, generator=generator)
    start = np.random.default_rng(0).integers(0, length, batch)
    units, mask = some_units(data, count, batch)
    window, known = 8, max(0, length - pending)
    h_BTD = reference.normed(x_BTD, norm)
    keys, values = (np.zeros((batch, groups, length, size), np.float32) for _ in range(2))
    place_BT = (torch.arange(length) - torch.from_numpy(start)[:, None]).clamp(min=0)
    for array, part in ((keys, parts[1]), (values, parts[2])):
        every = (h_BTD @ unpack(part.rows).T + torch.from_numpy(part.bias)).unflatten(-1, (groups, size))
        if array is keys and turns_PK is not None:
            every = reference.turned(every, turns_PK[place_BT][:, :, None])
        array[:, :, :known] = every.transpose(1, 2)[:, :, :known].numpy()
    waiting = np.zeros((batch, window, width), np.int16 if storage == "int8" else np.float32)
    waiting_scale = np.ones((batch, window), np.float32)
    for b in range(batch):
        for position in range(known, length - 1):  # the newest is put there by the kernel
            h, slot = h_BTD[b, position].numpy(), position % window
            scale = np.abs(h).max() / 32_767 if storage == "int8" else 1.0
            waiting[b, slot], waiting_scale[b, slot] = np.rint(h / scale) if storage == "int8" else h, scale
    filled, lengths = np.full((batch, groups), known, np.int64), np.full(batch, length, np.int64)
    sums, read = np.empty((THREADS, batch, width), np.float32), np.zeros((THREADS, 8), np.int64)
    x, flushed = x_BTD[:, -1].clone(), data.draw(st.booleans())
    bound = ops.Bound(
        "attention", *normed_matrix(norm, parts[0]), *matrix(parts[1]), *matrix(parts[2]), *matrix(output), keys,
        values, waiting, waiting_scale, start, lengths, filled, length if flushed else length + 1, 0,
        np.float32(size**-0.5), table, sums, read, *beside(storage),
    )  # fmt: skip
    ops.attention(x, units, mask, bound.number)
    start_B = torch.from_numpy(start)
    close(x, reference.attention(x_BTD, units, mask, norm, *parts, output, start_B, size, turns_PK), storage)
    chosen, total = int(mask.sum()), read.sum(0)
    assert total[0] == chosen * size and total[2] == len(units) * size
    needed = {(b, int(units[n]) * groups // count) for b, n in mask.nonzero().tolist()}
    completed = batch * groups if flushed else len(needed)
    assert completed <= total[1] / (2 * size) <= completed + (batch if gated else 0), "two threads may share a group"
    assert all(filled[place] == length for place in needed) and (filled == length).sum() >= completed


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(STORAGES), st.sampled_from(BATCHES), st.sampled_from([(1, 1), (5, 700), (130, 33)]), st.booleans()
)
def test_project_equals_the_reference(storage, batch, shape, relu):
    generator = torch.Generator().manual_seed(batch)
    part, norm = projection(generator, *shape, shape[0], storage), some_norm(generator, shape[1])
    x, out = torch.randn(batch, shape[1], generator=generator), torch.empty(batch, shape[0])
    bound = ops.Bound("project", *normed_matrix(norm, part), relu, 3)
    ops.project(x, out, bound.number)
    close(out, reference.project(x, norm, part, relu), storage)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(STORAGES), st.sampled_from(BATCHES), st.sampled_from([(1, 1), (5, 700), (130, 33)]), st.booleans()
)
def test_choosing_equals_the_reference(storage, batch, shape, skip):
    generator = torch.Generator().manual_seed(batch)
    rank, units = shape
    up = projection(generator, rank, units, units, storage)
    hidden = torch.relu(torch.randn(batch, rank, generator=generator))
    scores, chosen = torch.empty(batch, units), torch.empty(batch, (units + 1) // 2, dtype=torch.int64)
    bound = ops.Bound("choose", *matrix(up), 3, skip)
    assert ops.choose(hidden, scores, chosen, bound.number)
    close(scores, reference.scores(hidden, up), storage)
    mask = torch.zeros(batch, units, dtype=torch.bool).scatter(1, chosen, True)
    assert torch.equal(mask, top_k_mask(scores, chosen.shape[1]))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(STORAGES), st.sampled_from(BATCHES), st.sampled_from([0, 1, 20, 41]), st.data())
def test_a_choosing_half_is_the_half_over_the_best_of_the_sequences_that_go_on(storage, batch, kept, data):
    width, rank, count, generator = 33, 9, 41, torch.Generator().manual_seed(batch)
    first, second = (projection(generator, count, width, outputs, storage) for outputs in (count, width))
    up = projection(generator, rank, count, count, storage)
    x_BD, norm = torch.randn(batch, width, generator=generator), some_norm(generator, width)
    hidden = torch.relu(torch.randn(batch, rank, generator=generator))
    active = np.array(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    scores, best_BK = np.empty((batch, count), np.float32), np.empty((batch, kept), np.int64)
    sums, read = np.empty((THREADS, batch, width), np.float32), np.zeros((THREADS, 8), np.int64)
    half = (*normed_matrix(norm, first), *matrix(second), True, sums, read, *beside(storage))
    bound = ops.Bound("choose_mlp", (hidden.numpy(), scores, best_BK, active, *matrix(up), THREADS, True, 1), half)
    found = x_BD.clone()
    union = ops.choose_mlp(found, bound.number)
    mask = top_k_mask(torch.from_numpy(scores), kept) & torch.from_numpy(active)[:, None]
    units = torch.nonzero(mask.any(0)).flatten()
    assert union == len(units) == read[:, 0].sum()
    close(found, reference.mlp(x_BD, units, mask[:, units], norm, first, second), storage)
    up.bias[7] = np.nan
    assert ops.choose_mlp(found, bound.number) == -1 or kept == 0


@pytest.mark.parametrize("storage", STORAGES[:2])  # NaN has no place in 8 bits
def test_rows_that_are_not_chosen_may_be_nan(storage):
    generator = torch.Generator().manual_seed(0)
    first, second = (projection(generator, 64, 48, n, storage) for n in (64, 48))
    x = torch.randn(2, 48, generator=generator)
    units, mask = torch.tensor([3, 9, 40, 63]), torch.ones(2, 4, dtype=torch.bool)
    before, _ = run_mlp(x, units, mask, None, first, second, beside(storage))
    others = np.setdiff1d(np.arange(64), units)
    nan = np.float32(np.nan) if storage == "float32" else np.uint16(0x7FC0)
    first.rows.data_RC[others], second.rows.data_RC[others] = nan, nan
    first.bias[others] = np.nan
    after, _ = run_mlp(x, units, mask, None, first, second, beside(storage))
    assert torch.equal(after, before) and bool(torch.isfinite(before).all())


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(0, 3), st.data())
def test_the_best_are_exact_with_ties_to_the_lower_index(units, kind, data):
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    scores = random.integers(0, 4, units) if kind == 0 else random.standard_normal(units)
    scores = (np.maximum(scores, 0) if kind == 1 else scores).astype(np.float32)
    if kind == 2:
        scores[random.random(units) < 0.3] = data.draw(st.sampled_from([-0.0, np.inf, -np.inf, -3e38, 3e38]))
    chosen = np.empty(data.draw(st.integers(0, units)), np.int64)
    assert best(scores, chosen) and np.all(np.diff(chosen) > 0)
    mask = np.zeros(units, bool)
    mask[chosen] = True
    assert np.array_equal(mask, top_k_mask(torch.from_numpy(scores)[None], len(chosen))[0].numpy())


def test_wrong_shapes_types_and_layouts_are_refused_before_a_wrong_number():
    generator = torch.Generator().manual_seed(0)
    first, second = projection(generator, 8, 6, 8, "float32"), projection(generator, 8, 6, 6, "float32")
    x, units, mask = torch.ones(2, 6), torch.arange(3), torch.ones(2, 3, dtype=torch.bool)
    wrong = {
        "x": [(wrong_x, units, mask) for wrong_x in (x.double(), x[0], torch.ones(2, 7), torch.ones(6, 2).T)],
        "units": [(x, units.int(), mask), (x, units[None], mask)],
        "mask": [(x, units, mask.float()), (x, units, mask[:, :2]), (x, units, mask.T)],
    }
    for name, cases in wrong.items():
        for case in cases:
            with pytest.raises(ValueError, match=f"^{name} must be a contiguous"):
                run_mlp(*case, None, first, second, beside("float32"))
    choice = (x.numpy(), x.numpy(), np.empty((2, 1), np.int64), np.ones(2, bool), *matrix(first), 2, True, 1)
    half = (*normed_matrix(None, first), *matrix(second), True, np.empty((2, 2, 6), np.float32))
    bound = ops.Bound("choose_mlp", choice, (*half, np.zeros((2, 8), np.int64), *beside("float32")))
    for case in (x.double(), x[:1], torch.ones(2, 7), torch.ones(6, 2).T):
        with pytest.raises(ValueError, match=r"^x must be a contiguous"):
            ops.choose_mlp(case, bound.number)
    with pytest.raises(ValueError, match="rows in int8 are a C-contiguous matrix of int8, not float32"):
        Rows(np.ones((2, 2), np.float32), np.ones(2, np.float32), "int8")
    with pytest.raises(ValueError, match="C-contiguous"):
        Rows(np.ones((2, 3), np.float32).T, np.ones(3, np.float32), "float32")
    with pytest.raises(ValueError, match="as many float32 scales"):
        Rows(np.ones((2, 3), np.int8), np.ones(3, np.float32), "int8")


def test_a_score_that_is_nan_is_told():
    assert not best(np.array([1.0, np.nan, 2.0], np.float32), np.empty(1, np.int64))


def test_a_norm_of_what_is_not_finite_is_not_finite():
    norm = some_norm(torch.Generator().manual_seed(0), 64)
    assert norm.bias_D is not None
    for bad in (np.nan, np.inf):
        x = np.ones((1, 64), np.float32)
        x[0, 9] = bad
        assert np.isnan(layer_norm(x, norm.weight_D, norm.bias_D, norm.epsilon)).any()
        assert np.isnan(rms_norm(x, norm.weight_D, norm.epsilon)[0, 9])


def test_what_cannot_be_right_is_refused():
    with pytest.raises(ConfigError, match=r"decode\.storage=int4 is not known"):
        pack(torch.ones(2, 2), "int4")
    with pytest.raises(ConfigError, match="not finite"):
        pack(torch.full((2, 2), torch.inf), "int8")


def test_int8_keeps_a_row_to_half_a_step():
    weight = torch.randn(16, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 16)[:, None]
    rows = pack(weight, "int8")
    assert np.abs(rows.data_RC).max() == 127
    step = torch.from_numpy(rows.scale_R)[:, None]
    assert bool(((unpack(rows) - weight).abs() <= step * 0.5001).all())
    assert rows.bytes_per_row == 304 and pack(weight, "bfloat16").bytes_per_row == 600
    assert torch.equal(unpack(pack(weight, "bfloat16")), weight.bfloat16().float())
    assert torch.equal(unpack(pack(torch.zeros(2, 3), "int8")), torch.zeros(2, 3))

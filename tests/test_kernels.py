"""The kernels against plain PyTorch over random shapes and sets, in every storage type."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.decode import kernels, reference
from dejavu.decode.choosing import best
from dejavu.decode.storage import STORAGES, pack, unpack
from dejavu.decode.vectors import reading
from dejavu.decode.weights import Projection
from dejavu.errors import ConfigError, DataError
from dejavu.models.topk import top_k_mask

# int8 vectors are rounded to 16 bits besides: a part in 65,000 of the largest, over a row.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-4, "int8": 2e-3}
BATCHES = (1, 2, 3, 8)
SHAPES = ((1, 1), (5, 700), (130, 33))


def projection(generator: torch.Generator, rows: int, columns: int, outputs: int, storage: str) -> Projection:
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    return Projection(pack(weight, storage), torch.randn(outputs, generator=generator).numpy() * 0.1)


def arguments(*parts: Projection) -> list[np.ndarray]:
    return [array for part in parts for array in (part.rows.data_RC, part.rows.scale_R, part.bias)]


def some_units(data: st.DataObject, count: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A union of units and which sequence chose which: none, one, some, all."""
    size = data.draw(st.sampled_from(sorted({0, 1, count // 2, count})))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    units = np.sort(random.permutation(count)[:size])
    return units, random.random((batch, size)) < data.draw(st.sampled_from([0.3, 1.0]))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(STORAGES), st.sampled_from(BATCHES))
def test_neurons_equal_the_reference(data, storage, batch):
    width, count = data.draw(st.sampled_from([1, 7, 64, 515, 1100])), data.draw(st.sampled_from([1, 5, 64, 131]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    first = projection(generator, count, width, count, storage)
    second = projection(generator, count, width, width, storage)
    x_BD = torch.randn(batch, width, generator=generator)
    units, mask = some_units(data, count, batch)
    sums, read = np.empty((2, batch, width), np.float32), np.zeros((2, 2), np.int64)
    h, scale = reading(x_BD.numpy(), None, storage)
    kernels.neurons(units, mask, h, scale, *arguments(first), *arguments(second)[:2], sums, read)
    expected = reference.neurons(torch.from_numpy(units), torch.from_numpy(mask), x_BD, first, second)
    np.testing.assert_allclose(sums.sum(0), expected.numpy(), atol=TOLERANCE[storage], rtol=TOLERANCE[storage])
    rows, bias = unpack(first.rows)[units], torch.from_numpy(first.bias)[units]
    active = (torch.relu(x_BD @ rows.T + bias) * torch.from_numpy(mask)).gt(1e-3).any(0)
    assert read[:, 0].sum() == len(units) and read[:, 1].sum() >= int(active.sum())


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(STORAGES), st.sampled_from(BATCHES))
def test_heads_equal_the_reference_and_catch_up_on_pending_positions(data, storage, batch):
    count, size, width = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([4, 10])), 33
    length, pending = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    parts = [projection(generator, count * size, width, count * size, storage) for _ in range(3)]
    output = projection(generator, count * size, width, width, storage)
    inputs = torch.randn(batch, length, width, generator=generator)
    start = np.random.default_rng(0).integers(0, length, batch)
    units, mask = some_units(data, count, batch)
    window, known = 8, max(0, length - pending)
    keys, values = (np.zeros((batch, count, length, size), np.float32) for _ in range(2))
    for array, part in ((keys, parts[1]), (values, parts[2])):
        every = inputs @ unpack(part.rows).T + torch.from_numpy(part.bias)
        array[:, :, :known] = every.unflatten(-1, (count, size)).transpose(1, 2)[:, :, :known].numpy()
    h, scales = reading(inputs.reshape(-1, width).numpy(), None, storage)
    waiting = np.zeros((batch, window, width), h.dtype)
    waiting_scale = np.ones((batch, window), np.float32)
    for position in range(known, length):
        waiting[:, position % window] = h.reshape(batch, length, width)[:, position]
        waiting_scale[:, position % window] = scales.reshape(batch, length)[:, position]
    filled = np.full((batch, count), known, np.int64)
    sums, read = np.empty((2, batch, width), np.float32), np.zeros((2, 4), np.int64)
    lengths = np.full(batch, length, np.int64)
    kernels.heads(
        units, mask, waiting, waiting_scale, start, lengths, filled, *arguments(*parts), *arguments(output)[:2], keys,
        values, np.float32(size**-0.5), sums, read,
    )  # fmt: skip
    expected = reference.heads(
        torch.from_numpy(units), torch.from_numpy(mask), inputs, torch.from_numpy(start), *parts, output, size
    )
    np.testing.assert_allclose(sums.sum(0), expected.numpy(), atol=TOLERANCE[storage], rtol=TOLERANCE[storage])
    chosen = int(mask.sum())
    assert read[:, 0].sum() == chosen * size and read[:, 1].sum() == chosen * (length - known) * 2 * size
    assert read[:, 2].sum() == len(units) * size


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(STORAGES), st.sampled_from(BATCHES), st.sampled_from([(1, 1), (5, 700), (130, 33)]), st.booleans()
)
def test_project_equals_the_reference(storage, batch, shape, relu):
    generator = torch.Generator().manual_seed(batch)
    part = projection(generator, *shape, shape[0], storage)
    x = torch.randn(batch, shape[1], generator=generator)
    h, scale = reading(x.numpy(), None, storage)
    out = np.empty((batch, shape[0]), np.float32)
    kernels.project(*arguments(part), h, scale, relu, 3, out)
    expected = reference.project(part, x, relu).numpy()
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[storage], rtol=TOLERANCE[storage])


@pytest.mark.parametrize("storage", STORAGES[:2])  # NaN has no place in 8 bits
def test_rows_that_are_not_chosen_may_be_nan(storage):
    generator = torch.Generator().manual_seed(0)
    first, second = (projection(generator, 64, 48, n, storage) for n in (64, 48))
    x = torch.randn(2, 48, generator=generator).numpy()
    units, mask = np.array([3, 9, 40, 63]), np.ones((2, 4), bool)

    def run() -> np.ndarray:
        sums, read = np.empty((2, 2, 48), np.float32), np.zeros((2, 2), np.int64)
        ones = np.ones(2, np.float32)
        kernels.neurons(units, mask, x, ones, *arguments(first), *arguments(second)[:2], sums, read)
        return sums

    before = run()
    others = np.setdiff1d(np.arange(64), units)
    nan = np.float32(np.nan) if storage == "float32" else np.uint16(0x7FC0)
    first.rows.data_RC[others], second.rows.data_RC[others] = nan, nan
    first.bias[others] = np.nan
    assert np.array_equal(run(), before) and np.isfinite(before).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 3), st.data())
def test_top_k_is_exact_with_ties_to_the_lower_index(units, kind, data):
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    scores = random.integers(0, 4, (2, units)) if kind == 0 else random.standard_normal((2, units))
    scores = (np.maximum(scores, 0) if kind == 1 else scores).astype(np.float32)
    k = data.draw(st.integers(1, units))
    union, mask = best(scores, k)
    chosen = np.zeros((2, units), bool)
    chosen[:, union] = mask
    assert np.array_equal(chosen, top_k_mask(torch.from_numpy(scores), k).numpy())
    assert np.all(np.diff(union) > 0)


def test_what_cannot_be_right_is_refused():
    with pytest.raises(DataError, match="NaN"):
        best(np.array([[1.0, np.nan]], np.float32), 1)
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

"""What a cache says about active sets: measured on small examples by hand, on a real cache, and drawn."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from test_activations import cached, load, text
from tiny import tiny_llama, tiny_opt

from dejavu.activations.cache import ActivationCache
from dejavu.analysis.active_sets import active_sets, overlap, share_of_mass, union_of_batch, unions_of_text
from dejavu.analysis.activity import COLUMNS, STRETCH, activity, cosine, read_activity, sample, write_activity
from dejavu.analysis.activity_figures import hot_and_cold, lookahead_cosine, overlap_of_tokens, union_growth
from dejavu.errors import DataError
from dejavu.models.taps import TapSource

FIGURES = (overlap_of_tokens, hot_and_cold, union_growth, lookahead_cosine)


def sets(*rows: str) -> np.ndarray:
    """Rows of 0 and 1 as a mask."""
    return np.array([[character == "1" for character in row] for row in rows])


def test_an_active_set_is_the_largest_share_and_never_a_silent_unit():
    c_NU = np.array([[4, 3, 2, 1], [0, 0, 5, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=np.float32)
    assert (active_sets(c_NU, 0.5) == sets("1100", "0010", "0000", "1100")).all()


def test_overlap_is_a_share_of_the_later_set():
    active_NU = sets("1100", "1000", "0000", "0110")
    pairs = np.array([0, 1, 0, 3]), np.array([1, 0, 2, 0])  # 1 of 1, 1 of 2, an empty set, 1 of 2
    assert overlap(active_NU, *pairs) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert np.isnan(overlap(active_NU, np.array([], int), np.array([], int)))


def test_mass_of_a_fixed_set_and_of_each_token_s_own():
    c_NU = np.array([[8, 2, 0], [0, 5, 5], [0, 0, 0]], dtype=np.float32)
    fixed_U, own_U = share_of_mass(c_NU)  # means 8/3, 7/3, 5/3; the third token counts 1
    assert fixed_U == pytest.approx([(0.8 + 0 + 1) / 3, (1 + 0.5 + 1) / 3, 1])
    assert own_U == pytest.approx([(0.8 + 0.5 + 1) / 3, 1, 1])


def test_the_union_of_a_batch_is_the_mean_over_all_choices_of_tokens():
    active_NU = sets("1100", "1000", "0010", "1010", "0000")
    for batch in (1, 2, 3, 5):
        every = [active_NU[list(chosen)].any(axis=0).mean() for chosen in itertools.combinations(range(5), batch)]
        assert union_of_batch(active_NU.mean(axis=0), 5, batch) == pytest.approx(np.mean(every))


def test_the_union_of_consecutive_tokens_is_the_mean_over_all_windows_in_one_text():
    random = np.random.default_rng(0)
    active_NU, text_N = random.random((40, 6)) < 0.2, np.repeat([0, 1, 2], [9, 19, 12])
    found = unions_of_text(active_NU, text_N, [1, 2, 4, 8, 16, 32])
    for size in (1, 2, 4, 8, 16):
        windows = [slice(start, start + size) for start in range(40 - size + 1)]
        every = [active_NU[window].any(axis=0).mean() for window in windows if len(set(text_N[window])) == 1]
        assert found[size] == pytest.approx(np.mean(every))
    assert np.isnan(found[32]), "no text is that long"


def test_a_sample_is_bounded_and_made_of_whole_stretches():
    assert (sample(100, 4096) == np.arange(100)).all() and (sample(100, 5) == np.arange(100)).all()
    rows = sample(1_000_000, 4096)
    assert len(rows) == 4096 and rows[0] == 0 and rows[-1] == 999_999
    assert (np.diff(rows.reshape(-1, STRETCH), axis=1) == 1).all()
    assert len(sample(1000, 990)) <= 1000 and (np.diff(sample(1000, 990)) > 0).all()


def test_cosines_of_tensors():
    a_ND, b_ND = np.array([[1, 0], [0, 2], [0, 0]], np.float16), np.array([[2, 0], [1, 1], [1, 1]], np.float16)
    found = cosine(a_ND, b_ND)
    assert found["value"] == pytest.approx((1 + 0.5**0.5 + 0) / 3)
    assert found["low"] == pytest.approx(0.5**0.5 / 2) and found["high"] == pytest.approx((1 + 0.5**0.5) / 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A collect's folder: 20 blocks of 12 tokens, documents of 9 tokens."""
    folder = tmp_path_factory.mktemp("collect")
    cached(folder / "cache", load(tiny_opt), text(blocks=20))
    return folder


@pytest.fixture(scope="module")
def table(folder) -> pd.DataFrame:
    assert write_activity(folder) == folder / "activity.parquet"
    return read_activity(folder)


def one(table: pd.DataFrame, measure: str, kind: str, layer: int, variant: str = "", x: float | None = None) -> float:
    rows = table[(table["measure"] == measure) & (table["kind"] == kind) & (table["layer"] == layer)]
    rows = rows[rows["variant"] == variant]
    rows = rows[rows["x"].isna()] if x is None else rows[rows["x"] == x]
    assert len(rows) == 1
    return float(rows["value"].iloc[0])


def test_the_table_of_a_cache_is_what_its_arrays_say(folder, table):
    assert {name: str(kind) for name, kind in table.dtypes.items()} == COLUMNS
    cache = ActivationCache(folder / "cache")
    c_NU = cache.mlp(1, slice(None))
    active_NU = active_sets(c_NU, 0.25)
    assert one(table, "union", "mlp", 1, "text", 1) == pytest.approx(active_NU.mean())
    assert one(table, "union", "mlp", 1, "batch", 1) == pytest.approx(active_NU.mean())
    block, position, document = np.arange(240) // 12, np.asarray(cache.positions), np.asarray(cache.documents)
    shares = []
    for earlier in range(238):
        later = earlier + 2  # a context does not reach over the end of its block or document
        if block[earlier] == block[later] and document[earlier] == document[later] and active_NU[later].any():
            shares.append((active_NU[earlier] & active_NU[later]).sum() / active_NU[later].sum())
            assert position[later] == position[earlier] + 2
    assert one(table, "overlap", "mlp", 1, "same text", 2) == pytest.approx(np.mean(shares))
    assert one(table, "overlap", "heads", 0, "other text") > 0
    assert one(table, "mass", "mlp", 0, "own set", 1.0) == pytest.approx(1)
    hottest = table[(table["measure"] == "frequency") & (table["kind"] == "mlp") & (table["layer"] == 1)]
    assert hottest["value"].is_monotonic_decreasing
    assert hottest["value"].iloc[0] == pytest.approx(active_NU.mean(axis=0).max())
    residuals = [cache.tap(TapSource("residual", layer), slice(None)).astype(np.float32) for layer in (0, 1)]
    dots_N = (residuals[0] * residuals[1]).sum(1) / np.linalg.norm(residuals[0], axis=1)
    assert one(table, "cosine", "residual", 0, "raw", 1) == pytest.approx(
        float((dots_N / np.linalg.norm(residuals[1], axis=1)).mean()), abs=1e-5
    )
    assert one(table, "tap", "heads", 0, "overlap") == pytest.approx(1), "r_0, which is what it reads"
    assert one(table, "tap", "mlp", 1, "previous") < one(table, "tap", "mlp", 1, "overlap") < 1


def test_every_figure_is_drawn_and_what_lacks_is_named(table, tmp_path):
    for figure in FIGURES:
        path = figure(table, tmp_path / figure.__name__)
        assert path.with_suffix(".svg").stat().st_size > 10_000
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50
        with pytest.raises(DataError, match="the table holds no"):
            figure(table.iloc[:0], tmp_path / "none")


def test_a_cache_of_some_layers_and_of_a_gated_model_can_be_looked_at(tmp_path):
    cache, _ = cached(tmp_path / "cache", load(tiny_llama), text(), "top", 0.5)
    found = activity(cache)
    assert set(found["layer"]) == {0, 1} and np.isfinite(found[found["measure"] == "mass"]["value"]).all()
    cache.recorded = [1]  # as with collect.layers=[1]
    assert set(activity(cache).query("measure != 'cosine'")["layer"]) == {1}


def test_a_folder_without_the_table_is_named(tmp_path):
    with pytest.raises(DataError, match=r"activity.parquet is missing or damaged: `dejavu collect` makes it"):
        read_activity(tmp_path)

"""Run folders -> table -> files, summaries and figures, on generated runs."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from finished_runs import RATIOS, write_run
from omegaconf import OmegaConf
from PIL import Image
from rich.console import Console

from dejavu.analysis.figures import sparsity_vs_quality
from dejavu.analysis.latency import frontier, pareto, speed_and_quality
from dejavu.analysis.runs import COLUMNS, load_runs, neighbours
from dejavu.analysis.tables import in_order, read_table, readable, rich_neighbours, rich_table, with_error, write_table
from dejavu.errors import DataError

CONTRACT = (  # as the design has it
    "model, selector, mlp, heads, task, metric, value, stderr, mlp_density, head_density, sparse_token_share, backend, "
    "positions, budget, rule, tap, rank, corpus, seed, n, delta, delta_stderr, run"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The runs of a pipeline: dense, and four selectors at five ratios."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root, "dense")
    for selector in ("oracle", "predictor", "static", "random"):
        for ratio in RATIOS:
            write_run(root / "sparse", selector, ratio)
    return root


@pytest.fixture(scope="module")
def table(root) -> pd.DataFrame:
    return load_runs(root)


@pytest.fixture(scope="module")
def pairs(root, table) -> pd.DataFrame:
    return neighbours(table, root)


def one(table: pd.DataFrame, **wanted) -> pd.Series:
    """The only row with these values."""
    rows = table[np.logical_and.reduce([table[key] == value for key, value in wanted.items()])]
    assert len(rows) == 1
    return rows.iloc[0]


def test_the_table_has_the_contract_s_columns_and_types(table):
    assert ", ".join(table.columns) == CONTRACT == ", ".join(COLUMNS)
    assert len(table) == 21 * (3 + 2 + 1 + 1)
    assert {name: str(kind) for name, kind in table.dtypes.items()} == COLUMNS
    assert table["rank"].isna().all()
    assert set(table["run"]) >= {"dense-0", "sparse/oracle-0.5"}


def test_dense_rows_skip_nothing_and_have_no_difference(table):
    dense = table[table["selector"] == "dense"]
    assert (dense[["mlp", "heads"]] == 0).all(axis=None)
    assert dense[["delta", "delta_stderr"]].isna().all(axis=None)


def test_differences_to_dense_are_paired(table):
    for metric, sign in (("bits_per_byte", 1), ("token_perplexity", 1)):
        row = one(table, selector="static", mlp=0.5, metric=metric)
        dense = one(table, selector="dense", metric=metric)
        assert row["delta"] == pytest.approx(row["value"] - dense["value"])
        assert sign * row["delta"] > 0
    row = one(table, selector="oracle", mlp=0.5, metric="bits_per_byte")
    assert row["delta_stderr"] < row["stderr"] / 3
    assert one(table, selector="static", mlp=0.9, task="continuation_choice")["delta"] < 0


def test_differences_that_a_result_holds_are_kept(tmp_path):
    entry = {"value": 2.0, "stderr": 0.1, "n": 5, "delta": 0.25, "delta_stderr": 0.01}
    write_run(tmp_path, "dense")
    write_run(tmp_path, "oracle", 0.5, metrics={"pydocs": {"bits_per_byte": entry}})
    row = one(load_runs(tmp_path), selector="oracle")
    assert (row["delta"], row["delta_stderr"]) == (0.25, 0.01)


def test_without_a_fitting_dense_run_differences_are_missing(tmp_path):
    write_run(tmp_path, "dense", model={"name": "other", "parameters": 1, "fingerprint": "g"})
    write_run(tmp_path, "oracle", 0.5)
    assert load_runs(tmp_path)["delta"].isna().all()


def test_a_dense_run_over_other_documents_is_refused(tmp_path):
    write_run(tmp_path, "dense", count=79)
    write_run(tmp_path, "oracle", 0.5)
    with pytest.raises(DataError, match=r"oracle-0.5 cannot be compared with dense-0: 1 documents of task pydocs"):
        load_runs(tmp_path)


def test_rank_comes_from_the_config_or_the_bundle(tmp_path):
    write_run(tmp_path, "dense", seed=3)
    write_run(tmp_path, "predictor", 0.5, name="a", predictor={"rank": 32})
    write_run(tmp_path, "predictor", 0.5, name="b", config_rank=64)
    table = load_runs(tmp_path).drop_duplicates("run").set_index("run")
    assert table["rank"].to_dict() == {"a": 32, "b": 64, "dense-0": None}
    assert table.loc["dense-0", "seed"] == 3


def test_swept_keys_become_columns(tmp_path):
    write_run(tmp_path, "dense")
    write_run(tmp_path, "oracle", 0.5, overrides=["sparsity.mlp=0.5", "+trainer.epochs=8", "run_dir=x", "extra=deep"])
    table = load_runs(tmp_path)
    assert ", ".join(table.columns) == f"{CONTRACT}, trainer.epochs, extra"
    oracle = table[table["selector"] == "oracle"]
    assert set(oracle["trainer.epochs"]) == {8.0}
    assert set(oracle["extra"]) == {"deep"}


def test_unfinished_and_other_runs_are_left_out(tmp_path):
    write_run(tmp_path, "dense")
    write_run(tmp_path, "oracle", 0.5, status="failed")
    write_run(tmp_path, "oracle", 0.75, stage="train")
    assert set(load_runs(tmp_path)["selector"]) == {"dense"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"stage": "evaluate", "status": "ok"}'])
def test_a_damaged_result_is_named(tmp_path, content):
    write_run(tmp_path, "dense")
    (write_run(tmp_path, "oracle", 0.5) / "result.json").write_text(content)
    with pytest.raises(DataError, match=r"oracle-0.5/result.json is missing or damaged"):
        load_runs(tmp_path)


def test_damaged_numbers_samples_and_empty_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="no finished evaluation"):
        load_runs(tmp_path)
    dense = write_run(tmp_path, "dense")
    bad = write_run(tmp_path, "oracle", 0.5, metrics={"pydocs": {"bits_per_byte": {"value": "x", "stderr": 0, "n": 1}}})
    with pytest.raises(DataError, match=r"oracle-0.5/result.json"):
        load_runs(tmp_path)
    (bad / "result.json").unlink()
    (dense / "samples.parquet").write_bytes(b"PAR1")
    write_run(tmp_path, "random", 0.5)
    with pytest.raises(DataError, match=r"dense-0/samples.parquet is missing or damaged"):
        load_runs(tmp_path)


def test_neighbours_are_ordered_by_quality(root, table, pairs):
    some = pairs[(pairs["metric"] == "bits_per_byte") & (pairs["mlp"] == 0.75)]
    assert list(zip(some["better"], some["worse"], strict=True)) == [
        ("oracle", "predictor"),
        ("predictor", "random"),
        ("random", "static"),
    ]
    assert (some["delta"] > 0).all()
    values = table.set_index(["run", "metric", "task"])["value"]
    for row in pairs.to_dict("records"):
        key = (row["metric"], row["task"])
        assert row["delta"] == pytest.approx(values[row["worse_run"], *key] - values[row["better_run"], *key])
    assert (pairs.loc[pairs["metric"] == "acc", "delta"] <= 0).all()
    with pytest.raises(DataError, match="does not hold the run"):
        neighbours(table, root / "sparse")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_survive_being_written_and_read(table, tmp_path, suffix):
    write_table(table.iloc[:3], tmp_path)  # is replaced
    assert write_table(table, tmp_path, parquet=True) == tmp_path / "table.csv"
    pd.testing.assert_frame_equal(read_table(tmp_path / f"table.{suffix}"), table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.parquet"]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"other.csv is not a readable table"):
        read_table(tmp_path / "other.csv")


def printed(renderable, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(renderable)
    return console.export_text()


def test_the_summary_shows_dense_first_and_differences_when_there_is_room(table):
    narrow, wide = (printed(rich_table(table, Console(width=width)), width) for width in (120, 240))
    lines = [line for line in narrow.splitlines() if "%" in line]
    assert len(lines) == 21
    assert lines[0].split()[0] == "dense"
    row = one(table, selector="oracle", mlp=0.5, metric="bits_per_byte")
    assert with_error(row["value"], row["stderr"]) in narrow
    difference = with_error(row["delta"], row["delta_stderr"], sign="+")
    assert difference in wide and difference not in narrow
    assert in_order(table)["selector"].iloc[0] == "dense"


def test_the_neighbours_are_printed(pairs):
    text = printed(rich_neighbours(pairs), 120)
    assert "predictor" in text and "±" in text and "loss" not in text


@pytest.mark.parametrize(
    ("value", "stderr", "sign", "text"),
    [
        (1.23456, 0.0123, "", "1.235 ± 0.012"),
        (1234.5, 45.0, "", "1234 ± 45"),
        (3.1e7, 2.2e6, "", "3.1e+07 ± 2.2e+06"),
        (0.05, 0.004, "+", "+0.0500 ± 0.0040"),
        (0.5, float("nan"), "", "0.5"),
        (0.0, 0.0, "+", "+0 ± 0"),
        (float("inf"), float("nan"), "", "inf"),
    ],
)
def test_numbers_show_two_digits_of_their_error(value, stderr, sign, text):
    assert with_error(value, stderr, sign) == text


def test_the_figure_is_written_in_both_formats(table, tmp_path):
    path = sparsity_vs_quality(table, tmp_path / "quality.png")
    with Image.open(path) as image:
        assert image.size == (900, 450)
    svg = (tmp_path / "quality.svg").read_bytes()
    assert svg.startswith(b"<?xml")
    sparsity_vs_quality(table, tmp_path / "quality.png")
    assert (tmp_path / "quality.svg").read_bytes() == svg
    assert sorted(each.name for each in tmp_path.iterdir()) == ["quality.png", "quality.svg"]


def test_a_figure_copes_with_broken_perplexities(table, tmp_path):
    huge = table.assign(value=table["value"].where(table["selector"] != "static", table["value"] ** 4))
    huge.loc[(huge["selector"] == "static") & (huge["mlp"] == 0.9), "value"] = np.inf
    assert sparsity_vs_quality(huge, tmp_path / "huge.png").exists()


def test_tables_that_cannot_be_drawn_are_refused(table, tmp_path):
    cases = [
        (table[table["metric"] == "loss"], "no finite main metric"),
        (pd.concat([table, table.assign(model="b")]), "several models"),
        (pd.concat([table, table]), "several runs of"),
    ]
    for broken, message in cases:
        with pytest.raises(DataError, match=message):
            sparsity_vs_quality(broken, tmp_path / "none.png")


def decoded(root: Path, storage: str, selector: str, ratio: float, ms: float, loss: float) -> None:
    """An evaluation by the engine."""
    entry = {"value": loss, "stderr": 1.0, "n": 20}
    folder = write_run(
        root, selector, ratio, name=f"{storage}-{ratio:g}", timing={"ms_per_token": ms},
        metrics={"pydocs_token": {"token_perplexity": entry, "loss": {**entry, "value": 4.0}}},
    )  # fmt: skip
    config = OmegaConf.load(folder / "config.yaml")
    config.decode = {"storage": storage}
    OmegaConf.save(config, folder / "config.yaml")


def test_speed_and_quality_are_of_one_object(tmp_path):
    write_run(tmp_path, "oracle", 0.5)  # simulated: it has no speed
    with pytest.raises(DataError, match="no evaluation that decoded"):
        speed_and_quality(tmp_path)
    points = [
        ("int8", "dense", 0.0, 2.0, 40.0), ("int8", "static", 0.5, 1.0, 48.0), ("float32", "dense", 0.0, 3.0, 41.0),
    ]  # fmt: skip
    for point in points:
        decoded(tmp_path, *point)
    table = speed_and_quality(tmp_path)
    rows = table[table["metric"] == "token_perplexity"]
    found = set(zip(rows["storage"], rows["selector"], rows["ms_per_token"], rows["value"], strict=True))
    assert found == {(storage, selector, ms, value) for storage, selector, _, ms, value in points}
    assert frontier(rows)["run"].tolist() == ["int8-0.5", "int8-0"], "float32 dense is slower and worse than int8 dense"
    path = pareto(table, tmp_path / "pareto")
    assert path.exists() and path.with_suffix(".svg").exists()
    with pytest.raises(DataError, match="no perplexity to draw"):
        pareto(table[table["metric"] == "loss"], tmp_path / "none")


def spaced(text: pd.DataFrame) -> pd.DataFrame:
    """A summary for notebooks with spaces at which a line may end everywhere."""
    return text.map(lambda cell: cell.replace("\N{NO-BREAK SPACE}", " "))


def test_runs_that_differ_in_a_swept_key_get_a_row_each(tmp_path):
    for epochs in (1, 2):
        write_run(tmp_path, "oracle", 0.5, name=f"e{epochs}", overrides=[f"+trainer.epochs={epochs}"])
    table = load_runs(tmp_path)
    text = spaced(readable(table))
    assert text["trainer.epochs"].tolist() == ["1.0", "2.0"] and set(text["selector"]) == {"oracle"}
    assert sum("oracle" in line for line in printed(rich_table(table), 160).splitlines()) == 2
    row = one(table, run="e1", metric="bits_per_byte")
    assert text["pydocs, bits_per_byte"].iloc[0] == with_error(row["value"], row["stderr"]), (
        "no dense run, no difference"
    )


def test_the_summary_for_notebooks_puts_differences_in_brackets(table):
    text = spaced(readable(table))
    assert len(text) == 21 and text["selector"].iloc[0] == "dense"
    row = one(table, selector="oracle", mlp=0.25, metric="bits_per_byte")
    cell = text[(text["selector"] == "oracle") & (text["neurons skipped"] == "25 %")]["pydocs, bits_per_byte"].iloc[0]
    assert cell.endswith(f"({with_error(row['delta'], row['delta_stderr'], sign='+')})")

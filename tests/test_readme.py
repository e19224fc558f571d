"""Every command in README and docs composes; README's, where not marked long, are executed in their order in an empty
folder."""

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from dejavu.analysis.bundles import TASK, place_of
from dejavu.analysis.bundles import main as compare
from dejavu.analysis.readme import REAL, TABLES, main, markers, real
from dejavu.analysis.runs import COLUMNS, typed
from dejavu.analysis.tables import write_table
from dejavu.errors import DataError

BEGIN, END = markers("table")
ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("dejavu ")]
# docs/extending.md adds files first: its commands run in test_extending.py.
PAGES = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "extending"]
DOCS = [
    line for page in PAGES for line in re.findall(r"^(?: {4})?(dejavu .*)$", re.sub(r"\\\n", "", page), re.MULTILINE)
]
# Smaller than what a reader would run, otherwise the very command; the demo of `make demo` is run small as well.
SMALL = ["corpus.tokens=8192", "tasks.limit=4", "trainer.epochs=1", "tracking=off"]


def words_of(line: str) -> list[str]:
    return shlex.split(line.split("#")[0].replace("sweeps", str(ROOT / "sweeps")))[1:]


@pytest.mark.parametrize("line", COMMANDS + DOCS)
def test_every_command_composes(line, dejavu, capsys):
    # A sweep composes one job at a time: here the first of each list of values.
    words = [re.sub(r"=([^,\[]*),.*", r"=\1", word) for word in words_of(line) if word != "-m"]
    assert dejavu(*words, "--cfg", "job") == 0
    assert "selector:" in capsys.readouterr().out


def test_the_commands_not_marked_long_run_in_their_order(dejavu, tmp_path):
    small_demo = [*SMALL, "pipeline.ratios=[0.75]", "pipeline.selectors=[static]"]
    assert dejavu("pipeline", "-cn", "demo", *small_demo) == 0
    for line in COMMANDS:
        if "long:" in line or "DIR" in line:
            continue
        fewer = ["sparsity.selector=oracle", "sparsity.part=mlp"] if "-cn per_part" in line else []
        if fewer and "sparsity.ratio" not in line:
            fewer.append("sparsity.ratio=0.75")
        assert dejavu(*words_of(line), *SMALL, *fewer) == 0, line
    assert len(list((tmp_path / "runs" / "per_part").glob("*/result.json"))) == 2


def test_numbers_in_the_readme_come_from_the_tables_command():
    table = README.split("<!-- table: begin -->")[1].split("<!-- table: end -->")[0]
    assert table.count("\n|") == 2 + 1 + 5 * 4, "header, dense, five ratios of four selectors"
    assert (ROOT / "docs" / "images" / "sparsity_vs_quality.png").exists()


def test_the_table_is_replaced_between_its_markers_only(tmp_path):
    metrics = [("pydocs", "bits_per_byte"), ("pydocs_token", "loss"), ("continuation_choice", "acc")]
    rows = [
        {
            "model": "m", "selector": selector, "mlp": ratio, "heads": ratio, "task": task, "metric": metric,
            "value": 1.5, "stderr": 0.01, "delta": None if selector == "dense" else 0.25, "delta_stderr": 0.002,
        }
        for selector, ratio in (("dense", 0.0), ("oracle", 0.5))
        for task, metric in metrics
    ]  # fmt: skip
    run, readme = tmp_path / "run", tmp_path / "README.md"
    (tmp_path / "docs").mkdir()
    write_table(typed(pd.DataFrame(rows).reindex(columns=COLUMNS)), run)
    (run / "sparsity_vs_quality.png").write_bytes(b"picture")
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main([str(run), str(readme)])
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n|") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| 50 % | oracle | 1.500 ± 0.010 | +0.2500 ± 0.0020 | 1.500 ± 0.010 |" in text
    assert "| 0 % | dense | 1.500 ± 0.010 | (dense: 1.500 ± 0.010) | 1.500 ± 0.010 |" in text
    assert (tmp_path / "docs" / "images" / "sparsity_vs_quality.png").read_bytes() == b"picture"
    readme.write_text("no markers")
    with pytest.raises(DataError, match="once each"):
        main([str(run), str(readme)])


def real_rows(selector: str, ratio: float, loss: float) -> list[dict]:
    """Rows of an evaluation of `tasks=real` that lost `loss` points or percent, measured to a tenth of that."""
    rows = []
    for task, metric in REAL:
        accuracy = metric == "acc"
        delta = None if selector == "dense" else (-loss / 100 if accuracy else loss / 5)
        rows.append(
            {
                "model": "m", "selector": selector, "mlp": ratio, "heads": ratio, "rule": "topk", "task": task,
                "metric": metric, "value": 0.4 if accuracy else 20.0, "stderr": 0.01, "n": 500, "delta": delta,
                "delta_stderr": 0.001 if accuracy else 0.02, "mlp_density": 1 - ratio, "head_density": 1 - ratio,
                "sparse_token_share": float(ratio > 0),
            }
        )  # fmt: skip
    return rows


def test_the_real_table_says_what_can_be_skipped():
    rows = real_rows("dense", 0, 0) + real_rows("oracle", 0.25, 0.1) + real_rows("oracle", 0.5, 3)
    rows += real_rows("random", 0.25, 9)
    text = real(typed(pd.DataFrame(rows).reindex(columns=COLUMNS)))
    assert "| 25 %, 25 % | oracle | 75 %, 75 % | 100 % | 0.400 ± 0.010 (-0.0010 ± 0.0010) |" in text
    assert "OpenBookQA, acc (n = 500)" in text
    assert text.endswith("(6): oracle: 25 % of neurons and 25 % of heads; random: none of its ratios.")


def test_the_engines_table_reads_quality_and_speed_from_the_same_runs(tmp_path):
    for storage, ratio, ms in (("int8", 0.75, 0.5), ("float32", 0.75, 0.9), ("float32", 0.0, 1.25)):
        run = tmp_path / f"{storage}-{ratio}"
        run.mkdir()
        loss = {"value": 4.0, "stderr": 0.1, "n": 20, "delta": 0.125, "delta_stderr": 0.01}
        sparsity = {
            "selector": "predictor", "requested": {"mlp": ratio, "heads": ratio},
            "measured": {"mlp_density": 1 - ratio, "head_density": 1 - ratio},
        }  # fmt: skip
        metrics = {"pydocs_token": {"loss": loss, "token_perplexity": {"value": 54.6, "stderr": 5.0, "n": 20}}}
        record = {"metrics": metrics, "sparsity": sparsity, "timing": {"ms_per_token": ms}}
        (run / "result.json").write_text(json.dumps(record))
        (run / "config.yaml").write_text(f"decode:\n  storage: {storage}\n")
    lines = TABLES["engine"](tmp_path).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["float32", "float32", "int8"]
    assert lines[0].endswith("| 1.25 |") and lines[2].endswith("| +0.125 ± 0.010 | 54.6 ± 5.0 | 0.50 |")
    assert "| 75 %, 75 % | 25 %, 25 % |" in lines[2]


def test_the_table_of_bundles_reads_recall_cost_and_losses(tmp_path):
    for name, rank in (("rank=8", 8), ("top", 32)):
        bundle = tmp_path / "ranks" / f"predictor.{name}" / "bundle"
        bundle.mkdir(parents=True)
        described = {"id": name, "tap": "overlap", "rank": rank}
        described["metrics"] = {"recall_of_mass": {"mlp": 0.8765, "heads": 0.5}, "tokens": 9000}
        (bundle / "config.json").write_text(json.dumps(described))
        for part, delta in (("both", 0.5), ("mlp", 0.25)):
            run = tmp_path / "quality" / f"{name}-{part}"
            run.mkdir(parents=True)
            loss = {"value": 4.0, "stderr": 0.1, "n": 20, "delta": delta, "delta_stderr": 0.01}
            measured = {"cost": {"predictors": 0.08}}
            record = {"status": "ok", "metrics": {TASK: {"loss": loss}}, "sparsity": {"measured": measured}}
            (run / "result.json").write_text(json.dumps(record))
            place = bundle if part == "both" else bundle.parent
            (run / "config.yaml").write_text(
                f"predictors: {place}\nsparsity: {{selector: predictor, part: {part}, ratio: 0.75}}\n"
            )
    lines = TABLES["ranks"](tmp_path / "quality").splitlines()
    assert lines[2] == "| rank=8 | overlap | 8 | 9,000 | 0.876 | 0.500 | 8.0 % | +0.500 ± 0.010 | +0.250 ± 0.010 |"
    assert len(lines) == 6 and lines[-1].startswith("At 75 % skipped")
    oracle = tmp_path / "quality" / "oracle"
    oracle.mkdir()
    record["metrics"][TASK]["loss"]["delta"] = 0.125
    (oracle / "result.json").write_text(json.dumps(record))
    (oracle / "config.yaml").write_text("sparsity: {selector: oracle, part: both, ratio: 0.75}\n")
    compare([str(tmp_path / "quality")])
    table = pd.read_csv(tmp_path / "quality" / "bundles.csv")
    assert table["name"].tolist() == ["oracle", "rank=8", "top"] and table["both"].tolist() == [0.125, 0.5, 0.5]
    assert table["mlp"].isna().tolist() == [True, False, False]
    assert (tmp_path / "quality" / "bundles.png").stat().st_size > 5_000
    assert TABLES["ranks"](tmp_path / "quality").splitlines()[2] == "| oracle |  |  |  |  |  |  | +0.125 ± 0.010 |  |"
    assert len(TABLES["forms"](tmp_path / "quality").splitlines()) == 5, "of another group the oracle alone"
    with pytest.raises(DataError, match="no evaluation with predictors"):
        TABLES["ranks"](tmp_path)
    (oracle / "config.yaml").write_text("sparsity: {selector: oracle, part: both, ratio: 0.5}\n")
    with pytest.raises(DataError, match="at several ratios"):
        TABLES["ranks"](tmp_path / "quality")


def test_bundles_stand_in_the_order_of_their_numbers():
    names = ["rank=128", "tokens-8", "rank=16", "default", "rank=8", "oracle"]
    assert sorted(names, key=place_of) == ["oracle", "default", "rank=8", "rank=16", "rank=128", "tokens-8"]


def calibrated_evaluation(root: Path, selector: str, budget: str, ratio: float, found: float) -> None:
    """Files of an evaluation with a calibrated bundle: what `dejavu evaluate -cn calibrated` leaves."""
    bundle = root / "calibrate" / selector / "bundle"
    bundle.mkdir(parents=True, exist_ok=True)
    point = {"asked": 0.01, "skipped": found + 0.00001, "increase": 0.0098}
    (bundle / "config.json").write_text(json.dumps({"calibration": {"max_perplexity_increase": point}}))
    run = root / "quality" / selector / f"{budget},{ratio}"
    run.mkdir(parents=True)
    measured: dict = {"body_density": 1 - ratio}
    if selector == "predictor":
        measured["cost"] = {"predictors": 0.1}
    loss = {"value": 4.0, "stderr": 0.1, "n": 20, "delta": 0.0125, "delta_stderr": 0.001}
    record = {"status": "ok", "metrics": {TASK: {"loss": loss}}, "sparsity": {"measured": measured}}
    (run / "result.json").write_text(json.dumps(record))
    (run / "config.yaml").write_text(
        f"predictors: {bundle.parent}\nsparsity: {{selector: {selector}, budget: {budget}, ratio: {ratio}}}\n"
    )


def test_the_calibrated_table_sets_the_found_share_net_beside_the_oracles(tmp_path):
    for selector, found in (("predictor", 0.3), ("oracle", 0.4)):
        calibrated_evaluation(tmp_path, selector, "calibrated", found, found)
        calibrated_evaluation(tmp_path, selector, "uniform", 0.25, found)
    lines = TABLES["calibrated"](tmp_path / "quality").splitlines()
    start = "| predictor | found for +1 % perplexity | 30.0 % | 10.0 % | 20.0 % | +0.0098 | +0.0125 ± 0.0010 | +1.3 % |"
    assert start in lines and "| oracle | uniform | 25.0 % | 0.0 % | 25.0 % |  | +0.0125 ± 0.0010 | +1.3 % |" in lines
    assert lines[-1].endswith("oracle 40.0 % of the body, predictor 20.0 % (50 % of that).")
    with pytest.raises(DataError, match="no evaluation with a calibrated bundle"):
        TABLES["calibrated"](tmp_path / "calibrate")

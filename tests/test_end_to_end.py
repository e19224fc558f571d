"""The table that joins what the engine scored with what the benchmark timed."""

import pandas as pd
import pytest
from finished_runs import write_run
from omegaconf import OmegaConf

from dejavu.analysis.end_to_end import end_to_end, main
from dejavu.analysis.latency import speed_and_quality
from dejavu.analysis.readme import REAL
from dejavu.errors import DataError


def decoded(root, selector: str, ratio: float = 0.0) -> None:
    """An evaluation by the engine in int8."""
    accuracy = {"value": 0.3, "stderr": 0.02, "n": 500, "delta": -0.01, "delta_stderr": 0.005}
    asked = {"requested": {"mlp": ratio, "heads": ratio}, "selector": selector}
    measured = {"mlp_density": 1 - ratio, "head_density": 1 - ratio, "sparse_token_share": 1.0}
    folder = write_run(
        root, selector, ratio, metrics={"openbookqa": {"acc": accuracy}}, timing={"ms_per_token": 9.0},
        sparsity=asked | {"measured": measured},
    )  # fmt: skip
    config = OmegaConf.load(folder / "config.yaml")
    config.decode = {"storage": "int8"}
    config.tasks.run = {"openbookqa": {"kind": "lm_eval", "limit": None}}
    OmegaConf.save(config, folder / "config.yaml")


TIMES = pd.DataFrame(
    [
        ("dejavu-dense", "opt-tiny", "int8", "dense", 0.0, 128, 8.0),
        ("dejavu-sparse", "opt-tiny", "int8", "predictor", 0.5, 128, 5.0),
        ("dejavu-sparse", "opt-tiny", "bfloat16", "predictor", 0.5, 128, 6.0),
        ("hf-eager", "opt-tiny", "bfloat16", "dense", 0.0, 128, 20.0),
        ("ctranslate2", "opt-tiny", "int8", "dense", 0.0, 128, 10.0),
        ("hf-compile", "opt-tiny", "bfloat16", "dense", 0.0, 128, None),
    ],
    columns=["contender", "model", "storage", "selector", "mlp", "prompt_tokens", "ms_per_token"],
).assign(budget="uniform")


def test_quality_and_speed_of_a_state_stand_in_one_row(tmp_path):
    for selector, ratio in (("dense", 0.0), ("predictor", 0.5), ("random", 0.5)):
        decoded(tmp_path, selector, ratio)
    lines = end_to_end(speed_and_quality(tmp_path), TIMES).splitlines()
    assert REAL["openbookqa", "acc"] + " (n = 500)" in lines[0]
    scored = "0.300 ± 0.020 (-0.0100 ± 0.0050)"
    assert lines[2:5] == [
        "| dejavu | int8 | dense | 0 % | 0.300 ± 0.020 | 8.0 | 1.25x |",
        f"| dejavu | int8 | predictor | 50 % | {scored} | 5.0 | 2.00x |",
        f"| dejavu | int8 | random | 50 % | {scored} |  |  |",
    ]
    assert lines[5:] == [
        "| ctranslate2 | int8 | dense |  |  | 10.0 | 1.00x |", "| hf-eager | bfloat16 | dense |  |  | 20.0 | 0.50x |",
        "| hf-compile | bfloat16 | dense |  |  |  |  |",
    ]  # fmt: skip


def test_the_table_is_put_between_its_markers(tmp_path):
    decoded(tmp_path / "quality", "predictor", 0.5)
    (tmp_path / "times").mkdir()
    TIMES.to_csv(tmp_path / "times" / "benchmark.csv", index=False)
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- end_to_end: begin -->\n<!-- end_to_end: end -->\nafter\n")
    main([str(tmp_path / "quality"), str(tmp_path / "times"), str(page)])
    assert "| dejavu | int8 | predictor | 50 % |" in page.read_text() and page.read_text().endswith("after\n")


def test_what_does_not_belong_together_is_refused(tmp_path):
    decoded(tmp_path, "predictor", 0.5)
    quality = speed_and_quality(tmp_path)
    with pytest.raises(DataError, match="of several models: opt-125m, opt-tiny"):
        end_to_end(quality, TIMES.assign(model="opt-125m"))
    with pytest.raises(DataError, match=r"prompts of \[64, 128\] tokens"):
        end_to_end(quality, TIMES.assign(prompt_tokens=[64, *[128] * 5]))

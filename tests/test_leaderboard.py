"""What a sweep leaves behind: table, pictures at equal sparsity and equal cost, heat maps."""

import json

import pytest
from finished_runs import write_run
from PIL import Image

from dejavu.analysis.figures import density_vs_quality
from dejavu.analysis.heatmaps import layer_heat_map, selector_heat_map
from dejavu.analysis.leaderboard import failures, leaderboard
from dejavu.analysis.runs import load_runs
from dejavu.analysis.tables import read_table
from dejavu.errors import DataError


def colours(path) -> int:
    """How many different colours a picture has: an empty one has two or three."""
    with Image.open(path) as image:
        return len(image.convert("RGB").getcolors(maxcolors=1 << 24))


def test_a_sweep_leaves_one_table_and_its_pictures(tmp_path, capsys):
    write_run(tmp_path, "dense")
    for selector in ("oracle", "random"):
        for ratio in (0.25, 0.75):
            write_run(tmp_path, selector, ratio)
    written = leaderboard(tmp_path)
    names = {path.name for path in written}
    assert names == {
        "table.csv", "sparsity_vs_quality.png", "density_vs_quality.png", "density_neurons.png", "density_heads.png",
        "recall_of_mass_neurons.png", "recall_of_mass_heads.png",
    }  # fmt: skip
    assert (tmp_path / "table.parquet").exists() and all(path.with_suffix(".svg").exists() for path in written[1:])
    assert len(read_table(tmp_path / "table.csv")) == len(load_runs(tmp_path))
    assert all(colours(path) > 20 for path in written[1:])
    shown = capsys.readouterr().out
    assert "oracle" in shown and "random" in shown and "table.csv" in shown


def test_a_sweep_without_a_diagonal_still_has_its_table(tmp_path):
    write_run(tmp_path, "oracle", 0.5)
    result = json.loads((tmp_path / "oracle-0.5" / "result.json").read_text())
    result["sparsity"]["requested"]["heads"] = 0.0
    (tmp_path / "oracle-0.5" / "result.json").write_text(json.dumps(result))
    names = {path.name for path in leaderboard(tmp_path)}
    assert "table.csv" in names and "sparsity_vs_quality.png" not in names and "density_vs_quality.png" in names


def test_each_part_left_out_has_a_curve_of_its_own(tmp_path, monkeypatch):
    write_run(tmp_path, "dense")
    density = {"dense-0": 1.0}
    names = ["oracle, both", "oracle, neurons", "oracle, heads", "predictor, both", "predictor, neurons"]
    for selector, ratio in (("oracle", 0.25), ("oracle", 0.5), ("predictor", 0.5)):
        for part, (mlp, heads) in {"both": (1, 1), "mlp": (1, 0), "heads": (0, 1)}.items():
            folder = write_run(tmp_path, selector, ratio, name=f"{selector}-{part}-{ratio}")
            result = json.loads((folder / "result.json").read_text())
            result["sparsity"]["requested"] = {"mlp": mlp * ratio, "heads": heads * ratio}
            (folder / "result.json").write_text(json.dumps(result))
            density[folder.name] = 1 - ratio * (mlp * 2 + heads) / 3
    drawn = []
    monkeypatch.setattr("dejavu.analysis.figures.save", lambda figure, path: drawn.append(figure))
    density_vs_quality(load_runs(tmp_path), density, tmp_path / "a.png")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        *names,
        "predictor, heads",
        "95 % interval",
    ]
    drawn[0].canvas.draw()
    box = drawn[0].legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= drawn[0].bbox.x1, "the legend is within the picture"
    curves = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    assert curves["oracle, neurons"].get_xdata() == pytest.approx([0, 1 / 6, 1 / 3])
    assert len({curves[name].get_linestyle() for name in names[:3]}) == 3


def test_an_empty_sweep_is_refused(tmp_path):
    with pytest.raises(DataError, match="no finished evaluation"):
        leaderboard(tmp_path)


def test_equal_cost_puts_selectors_that_leave_heads_whole_where_they_belong(tmp_path):
    """A selector of neurons only skips fewer weights at the same ratio; its point moves to the left."""
    for selector in ("oracle", "static"):
        write_run(tmp_path, selector, 0.5)
    table = load_runs(tmp_path)
    assert density_vs_quality(table, {"oracle-0.5": 0.5, "static-0.5": 0.8}, tmp_path / "a.png").exists()
    with pytest.raises(DataError, match="no finite main metric"):
        density_vs_quality(table, {}, tmp_path / "b.png")


def test_heat_maps_show_layers_and_leave_unknown_ones_white(tmp_path):
    measured = {"mlp_density_per_layer": [0.1, 1.0], "head_recall_per_layer": [0.5, None]}
    assert colours(layer_heat_map(measured, tmp_path / "layers")) > 20
    for broken in ({}, {"mlp_recall_per_layer": [None, None]}):
        with pytest.raises(DataError, match="nothing per layer"):
            layer_heat_map(broken, tmp_path / "none")
    with pytest.raises(DataError, match="nothing per layer"):
        selector_heat_map({"oracle": {}}, "mlp_density_per_layer", "t", tmp_path / "none")


@pytest.mark.filterwarnings("error")
def test_long_names_of_jobs_leave_room_for_the_layers(tmp_path):
    """Matplotlib warns when nothing is left."""
    name = ",".join(["predictors=_runs_predictors_forms_predictor=reference_"] * 3)
    selector_heat_map({name: {"mlp_density_per_layer": [0.1] * 12}}, "mlp_density_per_layer", "t", tmp_path / "a")


def test_notes_become_a_column_only_where_there_are_some(tmp_path):
    write_run(tmp_path, "dense")
    assert "note" not in load_runs(tmp_path)
    entry = {"value": 2.0, "stderr": 0.1, "n": 5, "note": "not the published sample"}
    write_run(tmp_path, "oracle", 0.5, metrics={"pydocs_token": {"token_perplexity": entry}})
    notes = load_runs(tmp_path).set_index("selector")["note"]
    assert notes["oracle"] == "not the published sample" and notes["dense"].isna().all()


def test_failed_evaluations_are_named_with_their_error(tmp_path):
    write_run(tmp_path, "dense")
    write_run(tmp_path, "oracle", 0.5, status="failed", error={"type": "DataError", "message": "no space"})
    assert failures(tmp_path).to_dict("records") == [{"run": "oracle-0.5", "error": "DataError: no space"}]

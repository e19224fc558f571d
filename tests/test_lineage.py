"""Where results come from: ids are followed over folders, and told to W&B as artifacts of their descriptions alone."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from bundles import untrained_bundle
from tiny import tiny_opt

from dejavu.analysis.lineage import lineage
from dejavu.errors import DataError
from dejavu.predictors.bundle import recalibrated
from dejavu.predictors.manifest import CONFIG
from dejavu.predictors.merge import merge_bundles
from dejavu.tracking.artifacts import declare_inputs, declare_outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A runs folder: two bundles of a layer each, merged, the merged one calibrated."""
    root = tmp_path_factory.mktemp("runs")
    parts = [untrained_bundle(tiny_opt(), root / f"part{layer}" / "bundle", layers=[layer]) for layer in (0, 1)]
    merged = merge_bundles(parts, root / "merged" / "bundle")
    calibrated = recalibrated(merged, root / "calibrated" / "bundle", {"curve": []}, ["1"])
    return SimpleNamespace(root=root, parts=parts, merged=merged, calibrated=calibrated)


def test_calibrated_merged_and_trained_bundles_name_their_parents(runs):
    origin = lineage(runs.calibrated.folder, runs.root)
    assert (origin.kind, origin.id) == ("bundle", runs.calibrated.id)
    (merged,) = origin.parents
    assert (merged.id, merged.folder) == (runs.merged.id, runs.merged.folder)
    assert [part.id for part in merged.parents] == [part.id for part in runs.parts]
    (cache,) = merged.parents[0].parents
    assert (cache.kind, cache.id, cache.folder) == ("cache", "none", None)
    lines = list(origin.lines())
    assert lines[0] == f"bundle {runs.calibrated.id}  {runs.calibrated.folder}"
    assert lines[3] == "      cache none  not found" and len(lines) == 6


def test_what_is_made_of_a_merged_or_calibrated_bundle_names_no_grandparent(runs, tmp_path):
    one = recalibrated(runs.parts[0], tmp_path / "one", {"curve": []}, ["1"])
    merged = merge_bundles([one, runs.parts[1]], tmp_path / "merged")
    assert "calibrated_from" not in merged.config and "calibration" not in merged.config
    assert [parent.id for parent in lineage(merged.folder, tmp_path).parents] == [one.id, runs.parts[1].id]


def test_bundles_of_different_caches_merge_into_one_that_names_none(tmp_path):
    parts = [untrained_bundle(tiny_opt(), tmp_path / str(layer), layers=[layer]) for layer in (0, 1)]
    parts[0].config["cache"] = "another"
    assert "cache" not in merge_bundles(parts, tmp_path / "merged").config


def test_a_run_is_followed_although_its_bundle_lies_elsewhere(runs, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    result = {"stage": "evaluate", "config_hash": "h", "inputs": {"cache": None, "bundle": runs.merged.id}}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.yaml").write_text(f"predictors: {runs.root / 'merged'}\n")
    origin = lineage(folder, tmp_path)
    assert (origin.kind, origin.id) == ("evaluate", "h")
    assert origin.parents[0].folder == runs.merged.folder
    assert origin.parents[0].parents[0].folder is None, "its parts are neither there nor below runs"


def test_a_folder_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="neither a run nor a cache nor a bundle"):
        lineage(tmp_path)


class Online:
    """In place of an online W&B run."""

    offline = False

    def __init__(self) -> None:
        self.used: list[Any] = []
        self.logged: list[Any] = []

    def use_artifact(self, artifact: Any) -> None:
        self.used.append(artifact)

    def log_artifact(self, artifact: Any) -> None:
        self.logged.append(artifact)


def test_online_a_run_declares_what_it_reads_and_makes(runs):
    run, folder = Online(), runs.calibrated.folder.parent
    inputs = {"cache": None, "bundle": runs.merged.id}
    declare_inputs(run, {"cache": None, "predictors": str(runs.merged.folder)}, inputs)
    declare_outputs(run, {"bundle": {"id": runs.calibrated.id}}, folder)
    (used,), (made,) = run.used, run.logged
    assert (used.name, used.type) == (f"bundle-{runs.merged.id}", "bundle")
    assert (made.name, made.metadata) == (f"bundle-{runs.calibrated.id}", {"id": runs.calibrated.id})
    for artifact in (used, made):
        assert list(artifact.manifest.entries) == [CONFIG], "the description, never the weights"


def test_a_run_that_reads_a_bundle_makes_none_of_it(runs):
    run = Online()
    declare_outputs(run, {"bundle": {"id": "b"}}, runs.root)
    declare_outputs(run, {"metrics": {}}, runs.merged.folder.parent)
    assert not run.logged


def test_offline_inputs_are_not_declared(runs):
    run = Online()
    run.offline = True
    declare_inputs(run, {"predictors": str(runs.merged.folder)}, {"bundle": runs.merged.id})
    assert not run.used

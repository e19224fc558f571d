"""`dejavu merge`: bundles that were trained layer by layer become one."""

from pathlib import Path

from dejavu.predictors.bundle import discard, load_bundle
from dejavu.predictors.merge import merge_bundles
from dejavu.stages.inputs import given
from dejavu.tracking.run import Run


def run(run: Run) -> None:
    """Load all, merge them into `run.folder/bundle`."""
    bundles = [load_bundle(given(path, "bundle")) for path in run.config.merge]
    discard(run.folder / "bundle")
    made = merge_bundles(bundles, Path(run.folder) / "bundle")
    run.say(f"merged {len(bundles)} bundles into {made.folder}, layers {', '.join(map(str, made.layers))}")
    run.record |= {
        "model": made.config["model"],
        "bundle": {
            "id": made.id,
            "of": [bundle.id for bundle in bundles],
            "rank": made.config["rank"],
            "tap": made.config["tap"],
        },
    }

"""Where a result comes from: evaluation -> bundle -> cache, followed by the ids that each names. Reads files only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.activations.manifest import cache_id, read_manifest
from dejavu.analysis.runs import read_config, read_result
from dejavu.errors import DataError
from dejavu.predictors.manifest import bundle_id, read_bundle_config
from dejavu.tracking.artifacts import FILES, KEYS

Named = tuple[str, str]  # (cache or bundle, its id)


@dataclass(frozen=True)
class Origin:
    """A run (kind: its stage, id: its config hash), a bundle or a cache, and what it was made from."""

    kind: str
    id: str
    folder: Path | None  # None: named by an id that is not there any more, or not here
    parents: tuple["Origin", ...] = ()

    def lines(self, depth: int = 0) -> Iterator[str]:
        """One line for itself and each of its ancestors, further in with every generation."""
        yield f"{'  ' * depth}{self.kind} {self.id}  {self.folder or 'not found'}"
        for parent in self.parents:
            yield from parent.lines(depth + 1)


def lineage(folder: Path | str, runs: Path | str = "runs") -> Origin:
    """The ancestry of a run's, bundle's or cache's folder. What is named by id is looked for below `runs`.

    Raises DataError for a folder that is none of them.
    """
    folder = Path(folder)
    if (folder / "result.json").is_file():
        result, config = read_result(folder / "result.json"), read_config(folder / "config.yaml")
        places = [Path(str(config[key])) for key in KEYS.values() if config.get(key)]
        found = known([*places, *map(Path, config.get("merge") or []), Path(runs)])
        return Origin(result["stage"], result["config_hash"], folder, ancestors(parents_of_run(result), found))
    for kind, file in FILES.items():
        if (folder / file).is_file():
            return traced(
                (kind, identity(kind, folder)), known([Path(runs)]) | {(kind, identity(kind, folder)): folder}
            )
    raise DataError(f"{folder} is neither a run nor a cache nor a bundle: name a folder that `dejavu` wrote")


def known(places: Sequence[Path]) -> dict[Named, Path]:
    """Every cache and bundle at or below some places, by kind and id; what is damaged is left out."""
    found: dict[Named, Path] = {}
    for kind, file in FILES.items():
        for path in (path for place in places for path in sorted(place.glob(f"**/{file}"))):
            try:
                found.setdefault((kind, identity(kind, path.parent)), path.parent)
            except DataError:  # another's manifest.json or config.json, such as a model's
                continue
    return found


def identity(kind: str, folder: Path) -> str:
    """The id of a cache or bundle. Raises DataError when the folder holds none."""
    return cache_id(folder) if kind == "cache" else bundle_id(folder)


def ancestors(named: Sequence[Named], found: dict[Named, Path]) -> tuple[Origin, ...]:
    return tuple(traced(each, found) for each in named)


def traced(named: Named, found: dict[Named, Path]) -> Origin:
    """A cache or bundle with its ancestors, as far as they are there."""
    kind, id = named
    folder = found.get(named)
    if folder is None:
        return Origin(kind, id, None)
    parents = parents_of_cache(folder) if kind == "cache" else parents_of_bundle(folder)
    return Origin(kind, id, folder, ancestors(parents, found))


def parents_of_run(result: dict[str, Any]) -> list[Named]:
    """What a run read; of `dejavu merge` the bundles that it merged."""
    read = [(kind, id) for kind, id in result["inputs"].items() if id is not None]
    merged = result.get("bundle", {}).get("of", []) if result["stage"] == "merge" else []
    return [*read, *(("bundle", id) for id in merged)]


def parents_of_bundle(folder: Path) -> list[Named]:
    """The bundle it was calibrated from, else those it was merged from, else the cache it was trained on."""
    config = read_bundle_config(folder)
    if "calibrated_from" in config:
        return [("bundle", config["calibrated_from"])]
    if "merged_from" in config:
        return [("bundle", id) for id in config["merged_from"]]
    return [("cache", config["cache"])] if "cache" in config else []


def parents_of_cache(folder: Path) -> list[Named]:
    """The bundle that thinned out the stream of an on-policy cache; a dense model's has none."""
    bundle = read_manifest(folder).get("stream", {}).get("bundle")
    return [] if bundle is None else [("bundle", bundle)]

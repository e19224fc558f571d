"""Run folders -> one long table, and paired comparisons between selectors. Reads files only."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from dejavu.errors import DataError
from dejavu.evaluation import metrics

COLUMNS = {
    "model": "str", "selector": "str", "mlp": "float64", "heads": "float64", "task": "str", "metric": "str",
    "value": "float64", "stderr": "float64", "mlp_density": "float64", "head_density": "float64",
    "sparse_token_share": "float64", "backend": "str", "positions": "str", "budget": "str", "rule": "str",
    "tap": "str", "rank": "Int64", "corpus": "str", "seed": "Int64", "n": "Int64", "delta": "float64",
    "delta_stderr": "float64", "run": "str",
}  # fmt: skip
NEIGHBOURS = {
    "model": "str", "task": "str", "metric": "str", "mlp": "float64", "heads": "float64", "n": "Int64",
    "better": "str", "worse": "str", "delta": "float64", "delta_stderr": "float64", "better_run": "str",
    "worse_run": "str",
}  # fmt: skip
REPRESENTED = {
    "model", "model.name", "corpus", "corpus.name", "tasks", "backend", "seed", "predictor.tap", "predictor.rank",
    *(f"sparsity.{key}" for key in ("selector", "mlp", "heads", "part", "ratio", "point")),
    *(f"sparsity.{key}" for key in ("positions", "budget", "rule")),
}  # fmt: skip
HOUSEKEEPING = {"run_dir", "runs", "force", "tracking", "launcher", "hydra", "cache", "predictors", "data_root"}

Read = Callable[[Path], pd.DataFrame]


@dataclass(frozen=True)
class Run:
    """A finished evaluation: its folder, that folder relative to the root, its result.json and its config.yaml."""

    folder: Path
    name: str
    result: dict[str, Any]
    config: dict[str, Any]


def load_runs(folder: Path | str) -> pd.DataFrame:
    """The long table of all finished evaluations below `folder`: COLUMNS, notes if any, then keys that were overridden.

    A sparse row without a paired difference in its result gets it from the samples of the dense run of the same model,
    dtype, task and limit; it stays NaN where there is none. Raises DataError for a damaged run, or for none at all.
    """
    runs = find_runs(Path(folder))
    if not runs:
        raise DataError(f"{folder} holds no finished evaluation: run `dejavu evaluate` or name another folder")
    return long_table(runs)


def long_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The long table of these runs, in their order."""
    read = functools.cache(read_samples)
    swept = list(dict.fromkeys(key for run in runs for key in overrides(run)))
    records = []
    for run in runs:
        values = {key: config_value(run, key) for key in swept}
        records += [record | values for record in run_records(run, runs, read)]
    notes = ["note"] if any(record["note"] is not None for record in records) else []
    return typed(pd.DataFrame(records, columns=[*COLUMNS, *notes, *swept]))


def find_runs(root: Path) -> list[Run]:
    """Every folder below `root` whose result.json says stage evaluate and status ok, in the order of names."""
    runs = []
    for path in sorted(root.rglob("result.json")):
        result = read_result(path)
        if result.get("stage") == "evaluate" and result.get("status") == "ok":
            if not {"model", "sparsity", "metrics", "seed"} <= result.keys():
                raise damaged(path)
            config = read_config(path.parent / "config.yaml")
            runs.append(Run(path.parent, path.parent.relative_to(root).as_posix(), result, config))
    return runs


def read_result(path: Path) -> dict[str, Any]:
    """The content of a result.json. Raises DataError when it is not a JSON object."""
    try:
        result = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path) from error
    if not isinstance(result, dict):
        raise damaged(path)
    return result


def read_config(path: Path) -> dict[str, Any]:
    """The resolved config of a run. Raises DataError when it is missing or no mapping."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # OmegaConf passes on the errors of its YAML parser
        raise damaged(path) from error
    if not isinstance(config, dict):
        raise damaged(path)
    return {str(key): value for key, value in config.items()}


def read_samples(folder: Path) -> pd.DataFrame:
    """The samples of a run. Raises DataError when they are missing or damaged."""
    path = folder / "samples.parquet"
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise damaged(path) from error


def damaged(path: Path) -> DataError:
    return DataError(f"{path} is missing or damaged: delete its folder and run that evaluation again")


def run_records(run: Run, runs: Sequence[Run], read: Read) -> Iterator[dict[str, Any]]:
    """One row per task and metric of a run."""
    try:
        settings = run_settings(run)
        for task, measured in run.result["metrics"].items():
            differences = paired_with_dense(run, task, runs, read)
            for metric, entry in measured.items():
                scores = {"value": number(entry["value"]), "stderr": number(entry["stderr"]), "n": int(entry["n"])}
                scores["note"] = entry.get("note")
                yield settings | {"task": task, "metric": metric} | scores | differences.get(metric, {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(run.folder / "result.json") from error


def run_settings(run: Run) -> dict[str, Any]:
    """What all rows of a run share. A dense run skips nothing, whatever ratios its config names."""
    result, config = run.result, run.config
    selector, requested = result["sparsity"]["selector"], result["sparsity"]["requested"]
    known = {key: value for key, value in (result.get("predictor") or {}).items() if value is not None}
    predictor = config["predictor"] | known
    settings = {
        "model": result["model"]["name"],
        "selector": selector,
        "mlp": 0.0 if selector == "dense" else number(requested["mlp"]),
        "heads": 0.0 if selector == "dense" else number(requested["heads"]),
        "backend": config["backend"],
        "tap": predictor["tap"],
        "rank": predictor["rank"],
        "corpus": config["corpus"]["name"],
        "seed": result["seed"],
        "run": run.name,
    }
    settings |= {key: config["sparsity"][key] for key in ("positions", "budget", "rule")}
    settings["positions"] = result["sparsity"].get("positions", settings["positions"])
    densities = ("mlp_density", "head_density", "sparse_token_share")
    return settings | {key: number(result["sparsity"]["measured"][key]) for key in densities}


def number(value: Any) -> float:
    """A number of a result; null is NaN (a single document has no standard error)."""
    return float("nan") if value is None else float(value)


def paired_with_dense(run: Run, task: str, runs: Sequence[Run], read: Read) -> dict[str, dict[str, float]]:
    """{metric: {delta, delta_stderr}} of a task: the result's own, else from the samples; {} where none can be had."""
    if run.result["sparsity"]["selector"] == "dense":
        return {}
    measured = run.result["metrics"][task]
    stored = {
        name: {key: entry[key] for key in ("delta", "delta_stderr")}
        for name, entry in measured.items()
        if entry.get("delta") is not None and entry.get("delta_stderr") is not None
    }
    dense = dense_run(run, task, runs)
    if stored or dense is None or not all((each.folder / "samples.parquet").exists() for each in (run, dense)):
        return stored
    return compare(run, dense, task, read)


def dense_run(run: Run, task: str, runs: Sequence[Run]) -> Run | None:
    """The dense run that scored the same task of the same model the same way; the same seed first."""
    matches = [
        other
        for other in runs
        if other.result["sparsity"]["selector"] == "dense"
        and task in other.result["metrics"]
        and protocol(other, task) == protocol(run, task)
    ]
    return min(matches, key=lambda other: other.result["seed"] != run.result["seed"], default=None)


def protocol(run: Run, task: str) -> tuple:
    """What two runs must share for their documents to be paired."""
    settings = task_settings(run, task)
    limits = [limit for limit in (settings.pop("limit", None), run.config["tasks"].get("limit")) if limit is not None]
    return run.result["model"]["fingerprint"], run.config["dtype"], settings, min(limits, default=None)


def task_settings(run: Run, task: str) -> dict[str, Any]:
    """A copy of a task's own config: kind, corpus, limit and so on."""
    return dict(run.config["tasks"]["run"].get(task) or {})


def compare(run: Run, base: Run, task: str, read: Read) -> dict[str, dict[str, float]]:
    """{metric: {delta, delta_stderr}}: `run` minus `base`. Raises DataError naming both when they do not fit."""
    settings = task_settings(run, task)
    samples, dense = (frame[frame["task"] == task] for frame in (read(run.folder), read(base.folder)))
    try:
        return metrics.paired(samples, dense, metrics.metric_names(settings["kind"], settings.get("metrics", ())))
    except DataError as error:
        raise DataError(f"{run.name} cannot be compared with {base.name}: {error}") from error


def neighbours(table: pd.DataFrame, folder: Path | str) -> pd.DataFrame:
    """Paired differences, worse minus better, between runs next to each other in quality (columns: NEIGHBOURS).

    Runs are ranked by value within each model, task, metric, mlp, heads and number of documents; `folder` is the one
    the table was loaded from. Raises DataError when samples are missing or two runs hold different documents.
    """
    runs = {run.name: run for run in find_runs(Path(folder))}
    read = functools.cache(read_samples)

    @functools.cache
    def difference(worse: str, better: str, task: str) -> dict[str, dict[str, float]]:
        return compare(runs[worse], runs[better], task, read)

    missing = sorted(set(table["run"]) - set(runs))
    if missing:
        raise DataError(f"{folder} does not hold the run {missing[0]} of the table: name the folder it was loaded from")
    keys = ["model", "task", "metric", "mlp", "heads", "n"]
    records = []
    for _, group in table.dropna(subset=["value"]).groupby(keys, sort=False, dropna=False):
        metric, task = group["metric"].iloc[0], group["task"].iloc[0]
        ranked = group.sort_values("value", ascending=not metrics.higher_is_better(metric), kind="stable")
        for better, worse in itertools.pairwise(ranked.to_dict("records")):
            pair = {"better": better["selector"], "worse": worse["selector"]}
            pair |= {"better_run": better["run"], "worse_run": worse["run"]}
            found = difference(worse["run"], better["run"], task).get(metric)
            if found is not None:
                records.append({key: better[key] for key in keys} | pair | found)
    return pd.DataFrame(records, columns=list(NEIGHBOURS)).astype(NEIGHBOURS)


def overrides(run: Run) -> dict[str, str]:
    """{dotted key: value as typed} of a run's overrides, without those that the table shows or that only say where."""
    pairs = (text.lstrip("+").partition("=")[::2] for text in run.result.get("overrides") or [] if "=" in text)
    return {
        key: value
        for key, value in pairs
        if key not in REPRESENTED and key not in COLUMNS and key.split(".")[0].split("/")[0] not in HOUSEKEEPING
    }


def config_value(run: Run, key: str) -> Any:
    """The resolved value of a dotted key; what was typed for a group or a key that the config lacks, else None."""
    value: Any = run.config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None or isinstance(value, dict):
        given = overrides(run).get(key)
        return None if given == "null" else given
    return str(value) if isinstance(value, list) else value


def typed(table: pd.DataFrame) -> pd.DataFrame:
    """COLUMNS in their types; other columns as numbers where all of them are, else as text."""
    extra = {name: "float64" if is_numeric(table[name]) else "str" for name in table.columns if name not in COLUMNS}
    return table.astype(COLUMNS | extra)


def is_numeric(column: pd.Series) -> bool:
    """Whether every value that is there reads as a number."""
    return bool(pd.to_numeric(column, errors="coerce").notna().equals(column.notna()))

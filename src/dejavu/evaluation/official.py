"""lm-eval's own tasks with their definitions unchanged, over the hub's rows or over local ones.

A member of an inline group inherits the registered task, its YAML and its functions; all that is put in its place is
where the rows come from. `TaskManager()` with defaults would read 15 seconds of YAML, so only the task's folder is.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from dejavu.corpora.available import BENCHMARKS
from dejavu.corpora.benchmarks import benchmark_rows, row_document
from dejavu.corpora.documents import Document
from dejavu.errors import DataError

TASKS = Path(lm_eval.__file__).parent / "tasks"
FOLDERS = {"cb": "super_glue/cb", "copa": "super_glue/copa", "rte": "glue/rte", "lambada_openai": "lambada"}
SPLITS = ("training_split", "validation_split", "test_split")


def official_task(name: str, data_root: Path | None) -> ConfigurableTask:
    """The task as lm-eval defines it. Raises DataError when its rows cannot be had."""
    manager = TaskManager(include_defaults=False, include_path=[TASKS / FOLDERS.get(name, name)])
    member = {"task": name} | ({} if data_root is None else local_rows(name, data_root))
    try:
        loaded = manager.load([{"group": "local", "task": [member]}])
    except DataError:
        raise
    except Exception as error:  # the hub's client has a dozen types for what is one thing here
        raise DataError(
            f"task {name} could not be loaded from {BENCHMARKS[name].hub} ({type(error).__name__}: {error}); "
            "set data_root=DIR to use local files (layout: docs/data.md)"
        ) from error
    task: ConfigurableTask = loaded["tasks"][name]
    return task


def local_rows(name: str, data_root: Path) -> dict[str, Any]:
    """What replaces the hub's rows in a task's definition."""
    (split,) = BENCHMARKS[name].files
    rows = benchmark_rows(name, data_root)
    dataset = {split: datasets.Dataset.from_list(rows)}
    absent: dict[str, Any] = {key: None for key in SPLITS if key != f"{split}_split"}
    return absent | {f"{split}_split": split, "custom_dataset": lambda **_: dataset}


def scored_documents(task: ConfigurableTask, limit: int | None) -> list[Document]:
    """The documents that the task scores, the first `limit` of its split, in order."""
    name = str(task.config.task)
    rows = list(task.eval_docs)[:limit]
    return [row_document(name, row, number) for number, row in enumerate(rows)]


def sample_rows(task: ConfigurableTask, samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """lm-eval's samples as rows of our table; which columns are filled depends on the kind of task."""
    name, kind = str(task.config.task), task.OUTPUT_TYPE
    for sample in samples:
        document = row_document(name, sample["doc"], sample["doc_id"])
        row = {"document": f"{sample['doc_id']:05d}-{document.hash}", "tokens": 0, "bytes": 0, "words": 0}
        row |= {"loglikelihood": np.nan, "correct": np.nan, "correct_norm": np.nan}
        if kind == "loglikelihood_rolling":
            loglikelihood, words = sample["word_perplexity"]
            row |= {"loglikelihood": loglikelihood, "words": words, "bytes": sample["byte_perplexity"][1]}
        elif kind == "loglikelihood":
            loglikelihood, greedy = sample["filtered_resps"][0]
            row |= {"loglikelihood": loglikelihood, "correct": float(greedy)}
            row["words"] = len(re.split(r"\s+", sample["target"].strip()))
        else:
            row["correct"] = float(sample["acc"])
            row["correct_norm"] = float(sample.get("acc_norm", np.nan))
            if "f1" in sample:
                row["predicted"], row["label"] = (int(value) for value in sample["f1"])
        yield row

"""A folder in the layout of data_root with a few generated rows of every file that lm-eval's tasks and corpora read."""

import json
from pathlib import Path
from typing import Any

NAMES = ("Ada", "Bert", "Cleo", "Dora", "Emil", "Fay")
THINGS = ("kettle", "ladder", "violin", "lantern", "saddle", "anchor")


def data_folder(root: Path, rows: int = 6) -> Path:
    """Write `rows` rows of each set below `root` and return it."""
    numbers = range(rows)
    write(root / "winogrande/dev.jsonl", [winogrande(n) for n in numbers])
    for split in ("train", "dev", "test"):
        write(root / f"openbookqa/{split}.jsonl", [openbookqa(n, split) for n in numbers])
    for split in ("train", "valid"):
        write(root / f"c4/c4_{split}.jsonl", [{"id": f"c4-{split}-{n}", "text": story(n, split)} for n in numbers])
    write(root / "extras/piqa_valid.jsonl", [piqa(n) for n in numbers])
    write(root / "extras/copa_val.jsonl", [copa(n) for n in numbers])
    write(root / "extras/cb_val.jsonl", [cb(n) for n in numbers])
    write(root / "extras/rte_val.jsonl", [rte(n) for n in numbers])
    write(root / "extras/lambada_openai_test.jsonl", [lambada(n) for n in numbers])
    for split in ("train", "valid", "test"):
        path = root / f"wikitext2/wiki.{split}.raw"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(page(n, split) for n in numbers), "utf-8")
    return root


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def name(number: int) -> str:
    return NAMES[number % len(NAMES)]


def thing(number: int) -> str:
    return THINGS[number % len(THINGS)]


def story(number: int, split: str) -> str:
    text = f"In the {split} year {number} {name(number)} carried the {thing(number)} up the hill and sold it. "
    return text * (3 + number)


def page(number: int, split: str) -> str:
    title = f" = The {thing(number)} of {name(number)} {number} ( {split} ) = "
    return f"{title}\n \n {story(number, split).replace('.', ' .')} \n \n"


def winogrande(number: int) -> dict[str, Any]:
    sentence = f"{name(number)} gave the {thing(number)} to {name(number + 1)} because _ had no use for it."
    answer = str(1 + number % 2)
    return {"qID": str(number), "sentence": sentence, "option1": name(number), "option2": name(number + 1),
            "answer": answer}  # fmt: skip


def openbookqa(number: int, split: str) -> dict[str, Any]:
    choices = [{"text": f"a {thing(number + k)}", "label": label} for k, label in enumerate("ABCD")]
    stem = f"In the {split} set, what does {name(number)} need for task {number}?"
    return {"id": f"{split}-{number}", "question": {"stem": stem, "choices": choices}, "answerKey": "ABCD"[number % 4]}


def piqa(number: int) -> dict[str, Any]:
    goal = f"mend a {thing(number)}"
    return {"goal": goal, "sol1": "Use glue and wait.", "sol2": "Throw it into the sea.", "label": number % 2}


def copa(number: int) -> dict[str, Any]:
    return {"premise": f"{name(number)} dropped the {thing(number)}.", "choice1": "It broke.", "choice2": "It sang.",
            "question": ("cause", "effect")[number % 2], "label": number % 2, "idx": number}  # fmt: skip


def cb(number: int) -> dict[str, Any]:
    label = ("entailment", "contradiction", "neutral")[number % 3]
    return {"premise": f"{name(number)} said that it rained.", "hypothesis": "it rained", "label": label, "idx": number}


def rte(number: int) -> dict[str, Any]:
    label = ("entailment", "not_entailment")[number % 2]
    return {"premise": f"{name(number)} owns a {thing(number)}.", "hypothesis": f"{name(number)} exists.",
            "label": label, "idx": number}  # fmt: skip


def lambada(number: int) -> dict[str, Any]:
    context = f"{name(number)} looked at the {thing(number)} for a long time and then bought the"
    return {"text": f"{context} {thing(number)}", "context": context, "target": thing(number)}

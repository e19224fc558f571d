"""The process in which a contender lives: builds it, then does what lines of JSON on its input say. Its argument is
the process that asks, with which it ends.

{"do": "build", "spec": {...}}                                  -> {"memory_mb": ...}
{"do": "start", "variant": 0, "prompt": [...], "room": 64}      -> {"ms": first token}
{"do": "decode", "variant": 0, "tokens": 8}                     -> {"ms": [each token]}
"""

import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def build(spec: dict[str, Any], scratch: Path) -> list[Any]:
    """The contenders of a spec: one, or for this project's engine one for each variant over the same weights."""
    import torch

    from dejavu.benchmark.peers import refuse_missing

    refuse_missing(spec["family"])
    torch.set_num_threads(spec["threads"])
    if spec["family"] == "dejavu":
        from dejavu.benchmark.engines import engines

        return engines(spec)
    from dejavu.benchmark import contenders, ctranslate2_files
    from dejavu.models.families import shape_of

    if spec["family"] == "ctranslate2":
        contenders.refuse_vocabulary(shape_of(spec["architecture"]).vocabulary)
        folder = scratch / "model"
        if spec["source"] is None:
            ctranslate2_files.write_random(shape_of(spec["architecture"]), folder, spec["storage"], spec["seed"])
        else:
            ctranslate2_files.convert(spec["source"], folder, spec["storage"])
        return [contenders.CTranslate2(folder, spec["compute_type"], spec["threads"])]
    return [contenders.HuggingFace(contenders.hugging_face_model(spec), spec["family"] == "hf-compile")]


def answer(order: dict[str, Any], made: list[Any], scratch: Path) -> dict[str, Any]:
    """Do what a line says."""
    if order["do"] == "build":
        made.extend(build(order["spec"], scratch))
        return {}
    contender = made[order["variant"]]
    if order["do"] == "start":
        if order["variant"] > 0:  # the same weights have read the prompt already
            return {"ms": contender.adopt(made[0])}
        return {"ms": contender.start(order["prompt"], order["room"])}
    return {"ms": contender.decode(order["tokens"])}


def leave_with(parent: int, scratch: Path) -> None:
    """End this process, and its gigabytes, when the one that asked is gone: compiling may last minutes more."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Answer until the input ends. Libraries may print: their output goes where errors go."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="dejavu-benchmark-") as scratch:
        threading.Thread(target=leave_with, args=(int(sys.argv[1]), Path(scratch)), daemon=True).start()
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line), made, Path(scratch))
            except Exception as error:  # whatever it is, the other side turns it into a row that says so
                reply = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
            reply["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    answers.close()
    os._exit(0)  # a library's thread that still waits must not keep the process


if __name__ == "__main__":
    main()

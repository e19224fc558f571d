"""Kernels are compiled for what is bound, and processes that compile at one time do not spoil each other's."""

import os
import subprocess
import sys

import numpy as np
import pytest
from tiny import tiny_opt

from dejavu.decode import attention, kernels
from dejavu.decode.choosing import Predicted
from dejavu.decode.engine import Engine
from dejavu.decode.random_weights import random_weights
from dejavu.schema import STORAGES
from dejavu.sparsity.budget import Budget

KERNELS = (kernels.mlp, attention.attention, kernels.normed_project, kernels.choose_mlp)

SCRIPT = """
import time
import numba
import numpy as np
from numba.core import caching
from dejavu.decode.compiling import compile_for

@numba.njit(cache=True)
def size(values):
    return values.itemsize

save = caching.IndexDataCacheFile._save_index
def slowly(*given):  # two that save at one time surely meet
    time.sleep(1)
    save(*given)
caching.IndexDataCacheFile._save_index = slowly

print("ready", flush=True)
for name in input().split():
    compile_for(size, (numba.typeof(np.zeros(1, name)),))
    print(size(np.zeros(1, name)), len(size.stats.cache_hits))
"""


def test_processes_that_compile_at_one_time_do_not_spoil_each_others(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def begin() -> "subprocess.Popen[str]":
        command = [sys.executable, str(tmp_path / "script.py")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    both = {"float32": begin(), "int8": begin()}
    for name, process in both.items():
        assert process.stdin is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
    assert [process.communicate()[0].split() for process in both.values()] == [["4", "0"], ["1", "0"]]
    assert begin().communicate("float32 int8\n")[0].split() == ["4", "1", "1", "2"], "both are loaded, each its own"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_call_compiles_nothing_that_was_not_bound(storage):
    weights = random_weights(tiny_opt().config.to_dict(), storage, ranks=(4, 4))
    engine = Engine(weights, Predicted(Budget((16, 16), (2, 2))), threads=2, overlap=True)
    prompt = np.array([[2, 5, 7]])
    engine.prefill(prompt)  # binds what it allocates
    bound = [len(kernel.overloads) for kernel in KERNELS]
    for _ in range(3):
        assert engine.step(prompt[:, 0]).isfinite().all()
    assert [len(kernel.overloads) for kernel in KERNELS] == bound and min(bound) > 0

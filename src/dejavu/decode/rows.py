"""The two inner loops of the engine, for each storage type: a stored row times a vector, and rows added to a vector.

Written so that LLVM emits what the machine has for it: packed multiply-adds of 16-bit integers for int8, widening in
registers for bfloat16. Rows are read four at a time, since hardware prefetch follows streams but no random rows. Four
dot products step through their rows in chunks of `CHUNK` columns; int8 weights of at most 127 times vectors of at most
32,767 cannot overflow 32 bits within one, and chunks are added in float32.

Shape suffixes: R rows, C columns; `g` four rows at a time.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int8, int16, int32, njit, types, uint16
from numba.extending import intrinsic, overload

CHUNK = 512
LARGEST = 32_767  # of a vector in 16 bits
_I32 = ir.IntType(32)


@intrinsic
def widened(context: Any, value: Any) -> Any:
    """A bfloat16's bits as the float32 of the same value."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shifted = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return float32(uint16), build


@intrinsic
def multiply_add(context: Any, total: Any, weight: Any, value: Any) -> Any:
    """total + weight * value in 32 bits (Numba's own integers would widen to 64)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, weight, value = arguments
        return builder.add(total, builder.mul(builder.sext(weight, _I32), builder.sext(value, _I32)))

    return int32(int32, int8, int16), build


def chunk_dot(data_RC, row, vector_C, first, last):
    """Sum over columns first to last of a row times a vector. Compiled per storage type below; Python never runs it."""
    raise NotImplementedError


@overload(chunk_dot, inline="always", jit_options={"fastmath": True, "error_model": "numpy"})
def _chunk_dot(data_RC, row, vector_C, first, last):
    if data_RC.dtype == types.int8:

        def dot(data_RC, row, vector_C, first, last):
            total = int32(0)
            for column in range(first, last):
                total = multiply_add(total, data_RC[row, column], vector_C[column])
            return float32(total)

    elif data_RC.dtype == types.uint16:

        def dot(data_RC, row, vector_C, first, last):
            total = float32(0)
            for column in range(first, last):
                total += widened(data_RC[row, column]) * vector_C[column]
            return total

    else:

        def dot(data_RC, row, vector_C, first, last):
            total = float32(0)
            for column in range(first, last):
                total += data_RC[row, column] * vector_C[column]
            return total

    return dot


def value_of(data_RC, row, column):
    """A stored value as float32, without its row's scale. Compiled per storage type below."""
    raise NotImplementedError


@overload(value_of, inline="always", jit_options={"fastmath": True})
def _value_of(data_RC, row, column):
    if data_RC.dtype == types.uint16:
        return lambda data_RC, row, column: widened(data_RC[row, column])
    return lambda data_RC, row, column: float32(data_RC[row, column])


@njit(fastmath=True, error_model="numpy", cache=True)
def dot4(data_RC, scale_R, rows_g, vector_C, vector_scale, out_g):
    """out = rows times vector, four rows at once."""
    for g in range(4):
        out_g[g] = float32(0)
    columns = data_RC.shape[1]
    for first in range(0, columns, CHUNK):
        last = min(first + CHUNK, columns)
        for g in range(4):
            out_g[g] += chunk_dot(data_RC, rows_g[g], vector_C, first, last)
    for g in range(4):
        out_g[g] *= scale_R[rows_g[g]] * vector_scale


@njit(fastmath=True, error_model="numpy", cache=True)
def add4(data_RC, rows_g, factors_g, out_C):
    """out += sum of four rows times their factors (scales included)."""
    r0, r1, r2, r3 = rows_g[0], rows_g[1], rows_g[2], rows_g[3]
    f0, f1, f2, f3 = factors_g[0], factors_g[1], factors_g[2], factors_g[3]
    for column in range(data_RC.shape[1]):
        out_C[column] += (
            f0 * value_of(data_RC, r0, column)
            + f1 * value_of(data_RC, r1, column)
            + f2 * value_of(data_RC, r2, column)
            + f3 * value_of(data_RC, r3, column)
        )


@njit(fastmath=True, error_model="numpy", cache=True)
def add1(data_RC, row, factor, out_C):
    """out += one row times its factor."""
    for column in range(data_RC.shape[1]):
        out_C[column] += factor * value_of(data_RC, row, column)


@njit(error_model="numpy", cache=True)
def quantised(vector_C, out_C):
    """The vector in 16 bits, its largest magnitude at 32,767; returns what a unit of it is worth."""
    largest = float32(0)
    for column in range(len(vector_C)):
        largest = max(largest, abs(vector_C[column]))
    if largest == 0:
        out_C[:] = 0
        return float32(0)
    factor = float32(LARGEST) / largest
    for column in range(len(vector_C)):
        out_C[column] = int16(np.rint(vector_C[column] * factor))
    return largest / float32(LARGEST)

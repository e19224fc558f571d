"""The two inner loops of the engine, for each storage type: stored rows times a vector, and rows added to a vector.

Written in LLVM's own language, since what decides the speed is not left to the compiler's mood: four rows are read side
by side, 64 bytes of each a turn, while the next four are asked for from memory (hardware prefetch follows streams, but
no random rows); bfloat16 is widened in registers; int8 is multiplied with 16-bit integers and summed in pairs, in 32
bits (on x86 one instruction, `vpmaddwd`). Columns beyond the last full turn are done one by one in Numba.

Shape suffixes: R rows, C columns; `g` four rows at a time.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import float32, int16, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

TURN_BYTES = 64  # of each row
LARGEST = 32_767  # of a vector in 16 bits
CHUNK = 4096  # int8 columns before 32 bits could overflow: 8 lanes x 516 products of 127 * 32,767
AVX2 = bool(get_host_cpu_features().get("avx2"))
OPTIONS = {"fastmath": True, "error_model": "numpy", "cache": True}

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FAST = ("fast",)


def _vector(builder: Any, pointer: Any, element: Any, lanes: int, align: int) -> Any:
    """Load `lanes` elements."""
    wide = builder.bitcast(pointer, ir.VectorType(element, lanes).as_pointer())
    return builder.load(wide, align=align)


def _floats(builder: Any, pointer: Any, dtype: Any) -> Any:
    """Eight stored values as float32, without their row's scale."""
    v8i32, v8f32 = ir.VectorType(_I32, 8), ir.VectorType(_F32, 8)
    if dtype == types.float32:
        return _vector(builder, pointer, _F32, 8, 4)
    if dtype == types.int8:
        return builder.sitofp(builder.sext(_vector(builder, pointer, _I8, 8, 1), v8i32), v8f32)
    bits = builder.zext(_vector(builder, pointer, _I16, 8, 2), v8i32)  # a bfloat16 is the upper half of a float32
    return builder.bitcast(builder.shl(bits, ir.Constant(v8i32, [16] * 8)), v8f32)


def _pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """sum over neighbouring pairs of a * b: 16 products of 16 bits to 8 sums of 32."""
    wide = ir.VectorType(_I32, 8)
    if AVX2:
        function = ir.FunctionType(wide, [a.type] * 2)
        return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx2.pmadd.wd"), [a, b])

    def half(value: Any, first: int) -> Any:
        lanes = ir.Constant(ir.VectorType(_I32, 8), list(range(first, 16, 2)))
        return builder.sext(builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes), wide)

    return builder.add(builder.mul(half(a, 0), half(b, 0)), builder.mul(half(a, 1), half(b, 1)))


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""
    function = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.fmuladd.v8f32"), [a, b, c])


def _summed(builder: Any, vector: Any) -> Any:
    """The sum of eight lanes as a float32."""
    element = vector.type.element
    if element == _I32:
        function = ir.FunctionType(_I32, [vector.type])
        name = "llvm.vector.reduce.add.v8i32"
        return builder.sitofp(
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector]), _F32
        )
    function = ir.FunctionType(_F32, [_F32, vector.type])
    reduce = cgutils.get_or_insert_function(builder.module, function, "llvm.vector.reduce.fadd.v8f32")
    return builder.call(reduce, [ir.Constant(_F32, 0.0), vector], fastmath=("reassoc",))


def _ask_for(builder: Any, pointer: Any) -> None:
    """Prefetch the 64 bytes at a pointer."""
    function = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    constants = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # to read, keep near, data
    builder.call(prefetch, [builder.bitcast(pointer, _I8.as_pointer()), *constants])


class _Rows:
    """Pointers to four rows and to the four after them, which are given as tuples of row numbers."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, rows: Any, after: Any) -> None:
        self.builder, self.dtype = builder, array_type.dtype
        matrix = context.make_array(array_type)(context, builder, array)
        columns = cgutils.unpack_tuple(builder, matrix.shape)[1]
        self.rows, self.after = (
            [builder.gep(matrix.data, [builder.mul(row, columns)]) for row in cgutils.unpack_tuple(builder, four)]
            for four in (rows, after)
        )

    def at(self, g: int, column: Any, more: int = 0) -> Any:
        """Pointer to a column of row g."""
        return self.builder.gep(self.rows[g], [self.builder.add(column, ir.Constant(_I64, more))])

    def ask_for_next(self, column: Any) -> None:
        """Prefetch the same columns of the four rows after these."""
        for pointer in self.after:
            _ask_for(self.builder, self.builder.gep(pointer, [column]))


def turn(dtype: Any) -> int:
    """Columns in one turn."""
    return TURN_BYTES // (dtype.bitwidth // 8)


def _row_of(context: Any, builder: Any, array_type: Any, array: Any, row: Any) -> Any:
    """Pointer to a row of a matrix."""
    matrix = context.make_array(array_type)(context, builder, array)
    return builder.gep(matrix.data, [builder.mul(row, cgutils.unpack_tuple(builder, matrix.shape)[1])])


@intrinsic
def dot4_turns(typing: Any, data: Any, rows: Any, after: Any, vectors: Any, b: Any, first: Any, last: Any) -> Any:
    """For each of four rows, the sum over columns first to last (whole turns) of row times vector b."""
    columns, integers = turn(data.dtype), data.dtype == types.int8

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, numbers, next_numbers, x, sequence, start, stop = arguments
        four = _Rows(context, builder, signature.args[0], array, numbers, next_numbers)
        x_row = _row_of(context, builder, signature.args[3], x, sequence)
        element, lanes, chains = (_I32, 16, 1) if integers else (_F32, 8, 2)
        zero = ir.Constant(ir.VectorType(element, 8), [0 if integers else 0.0] * 8)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(chains)] for _ in range(4)]
        for total in (each for chain in totals for each in chain):
            builder.store(zero, total)
        with cgutils.for_range_slice(builder, start, stop, ir.Constant(_I64, columns)) as (column, _):
            four.ask_for_next(column)
            for number, offset in enumerate(range(0, columns, lanes)):
                place = builder.gep(x_row, [builder.add(column, ir.Constant(_I64, offset))])
                x_part = _vector(builder, place, _I16, 16, 2) if integers else _vector(builder, place, _F32, 8, 4)
                for g in range(4):
                    total = totals[g][number % chains]
                    if integers:
                        stored = _vector(builder, four.at(g, column, offset), _I8, 16, 1)
                        part = _pair_sums(builder, builder.sext(stored, ir.VectorType(_I16, 16)), x_part)
                        builder.store(builder.add(builder.load(total), part), total)
                    else:
                        stored = _floats(builder, four.at(g, column, offset), data.dtype)
                        builder.store(_fused(builder, stored, x_part, builder.load(total)), total)
        sums = []
        for chain in totals:
            found = builder.load(chain[0])
            if chains == 2:
                found = builder.fadd(found, builder.load(chain[1]), flags=_FAST)
            sums.append(_summed(builder, found))
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(float32, 4)(data, rows, after, vectors, int64, int64, int64), build


@intrinsic
def add4_turns(
    typing: Any, data: Any, rows: Any, after: Any, factors: Any, first: Any, last: Any, out: Any, b: Any
) -> Any:
    """out[b] += sum of four rows times their factors, columns first to last (whole turns)."""
    columns = turn(data.dtype)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, numbers, next_numbers, factor_g, start, stop, result, sequence = arguments
        four = _Rows(context, builder, signature.args[0], array, numbers, next_numbers)
        out_row = _row_of(context, builder, signature.args[6], result, sequence)
        v8f32, v8i32 = ir.VectorType(_F32, 8), ir.VectorType(_I32, 8)
        spread = []
        for value in cgutils.unpack_tuple(builder, factor_g):
            one = builder.insert_element(ir.Constant(v8f32, ir.Undefined), value, ir.Constant(_I32, 0))
            spread.append(builder.shuffle_vector(one, ir.Constant(v8f32, ir.Undefined), ir.Constant(v8i32, [0] * 8)))
        with cgutils.for_range_slice(builder, start, stop, ir.Constant(_I64, columns)) as (column, _):
            four.ask_for_next(column)
            for offset in range(0, columns, 8):
                place = builder.gep(out_row, [builder.add(column, ir.Constant(_I64, offset))])
                total = _vector(builder, place, _F32, 8, 4)
                for g in range(4):
                    stored = _floats(builder, four.at(g, column, offset), data.dtype)
                    total = _fused(builder, stored, spread[g], total)
                builder.store(total, builder.bitcast(place, v8f32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(data, rows, after, factors, int64, int64, out, int64), build


@intrinsic
def widened(typing: Any, value: Any) -> Any:
    """A bfloat16's bits as the float32 of the same value."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shifted = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, _F32)

    return float32(types.uint16), build


def value_of(data_RC, row, column):
    """A stored value as float32, without its row's scale. Compiled per storage type below; Python never runs it."""
    raise NotImplementedError


@overload(value_of, inline="always")
def _value_of(data_RC, row, column):
    if data_RC.dtype == types.uint16:
        return lambda data_RC, row, column: widened(data_RC[row, column])
    return lambda data_RC, row, column: float32(data_RC[row, column])


def turn_of(data_RC):
    """Columns in one turn of a stored matrix. Compiled per storage type below."""
    raise NotImplementedError


@overload(turn_of, inline="always")
def _turn_of(data_RC):
    columns = turn(data_RC.dtype)
    return lambda data_RC: columns


@njit(**OPTIONS)
def dot4(data_RC, scale_R, rows, after, x_BC, b, x_scale):
    """Four rows times vector b; `after` are the rows that will be wanted next. Rows and results are tuples of four."""
    columns, step = data_RC.shape[1], turn_of(data_RC)
    whole = columns - columns % step
    r0, r1, r2, r3 = rows
    t0, t1, t2, t3 = float32(0), float32(0), float32(0), float32(0)
    for first in range(0, whole, CHUNK):
        u0, u1, u2, u3 = dot4_turns(data_RC, rows, after, x_BC, b, first, min(first + CHUNK, whole))
        t0, t1, t2, t3 = t0 + u0, t1 + u1, t2 + u2, t3 + u3
    for column in range(whole, columns):
        x = float32(x_BC[b, column])
        t0 += value_of(data_RC, r0, column) * x
        t1 += value_of(data_RC, r1, column) * x
        t2 += value_of(data_RC, r2, column) * x
        t3 += value_of(data_RC, r3, column) * x
    return (
        t0 * scale_R[r0] * x_scale, t1 * scale_R[r1] * x_scale, t2 * scale_R[r2] * x_scale, t3 * scale_R[r3] * x_scale,
    )  # fmt: skip


@njit(**OPTIONS)
def add4(data_RC, rows, after, factors, first, last, out_BC, b):
    """out[b] += sum of four rows times their factors (scales included), columns first to last."""
    whole = last - (last - first) % turn_of(data_RC)
    add4_turns(data_RC, rows, after, factors, first, whole, out_BC, b)
    r0, r1, r2, r3 = rows
    f0, f1, f2, f3 = factors
    for column in range(whole, last):
        out_BC[b, column] += (
            f0 * value_of(data_RC, r0, column)
            + f1 * value_of(data_RC, r1, column)
            + f2 * value_of(data_RC, r2, column)
            + f3 * value_of(data_RC, r3, column)
        )


@njit(**OPTIONS)
def add1(data_RC, row, factor, first, last, out_BC, b):
    """out[b] += one row times its factor, columns first to last."""
    for column in range(first, last):
        out_BC[b, column] += factor * value_of(data_RC, row, column)


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

"""What differs between kinds of models inside the kernels: norm, activation, positions.

The types of the arguments say which it is when a kernel is compiled, so a kernel for one kind holds nothing of another:

    norm         LayerNorm has a bias, RMSNorm None in its place
    activation   a plain MLP has a bias a neuron, (F,); a gated one two, (F, 2), and two rows of its first matrix:
                 2j is the gate of neuron j, 2j + 1 what it is multiplied with
    positions    rotary ones have a table, (positions, K): cosines, then sines; learned ones nothing, (0,) (`attention`)

Shape suffixes as in `kernels`. Python never runs the functions that only raise.
"""

import numpy as np
from numba import float32, njit, types
from numba.extending import overload

from dejavu.decode.rows import OPTIONS, dot4
from dejavu.decode.vectors import layer_norm, rms_norm


def normalised(x_BD, weight_D, bias_D, epsilon):
    """Each row normed."""
    raise NotImplementedError


@overload(normalised)
def _normalised(x_BD, weight_D, bias_D, epsilon):
    if isinstance(bias_D, types.NoneType):
        return lambda x_BD, weight_D, bias_D, epsilon: rms_norm(x_BD, weight_D, epsilon)
    return lambda x_BD, weight_D, bias_D, epsilon: layer_norm(x_BD, weight_D, bias_D, epsilon)


def products(w, s, bias, rows, after, x_BD, b, x_scale):
    """The rows of four neurons times vector b: four sums, or four of the gates and four of what they multiply."""
    raise NotImplementedError


@overload(products)
def _products(w, s, bias, rows, after, x_BD, b, x_scale):
    def plain(w, s, bias, rows, after, x_BD, b, x_scale):
        return dot4(w, s, rows, after, x_BD, b, x_scale)

    def gated(w, s, bias, rows, after, x_BD, b, x_scale):
        front, back = pairs(rows[0], rows[1]), pairs(rows[2], rows[3])
        g0, u0, g1, u1 = dot4(w, s, front, back, x_BD, b, x_scale)
        g2, u2, g3, u3 = dot4(w, s, back, pairs(after[0], after[1]), x_BD, b, x_scale)
        return (g0, g1, g2, g3), (u0, u1, u2, u3)

    return plain if bias.ndim == 1 else gated


@njit(**OPTIONS)
def pairs(first, second):
    """The rows of two gated neurons."""
    return 2 * first, 2 * first + 1, 2 * second, 2 * second + 1


def activation(found, g, bias, neuron):
    """a of the g-th of four neurons, from their products."""
    raise NotImplementedError


@overload(activation)
def _activation(found, g, bias, neuron):
    def relu(found, g, bias, neuron):
        value = found[g] + bias[neuron]
        return value if value > 0 else float32(0)

    def silu_times_up(found, g, bias, neuron):
        gates, ups = found
        gate = gates[g] + bias[neuron, 0]
        return gate / (float32(1) + np.exp(-gate)) * (ups[g] + bias[neuron, 1])

    return relu if bias.ndim == 1 else silu_times_up

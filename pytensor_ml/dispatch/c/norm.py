"""C kernels of the norms."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.variable import TensorVariable
from pytensor.utils import hash_from_code

from pytensor_ml.base import LayerOp
from pytensor_ml.dispatch.c.basic import CKernel, c_funcify
from pytensor_ml.dispatch.c.threads import THREADS
from pytensor_ml.layers.norm import (
    LayerNormLayer,
    LayerNormPullback,
    PreciseSum,
    RMSNormLayer,
    RMSNormPullback,
    ZeroCenteredRMSNormLayer,
)


@c_funcify.register(PreciseSum)
def c_funcify_precise_sum(op: PreciseSum, node: Apply) -> list[Variable]:
    x: Any = node.inputs[0]
    return [pt.sum(x, axis=op.axes, dtype=x.type.dtype, acc_dtype="float64")]


@c_funcify.register(RMSNormLayer)
@c_funcify.register(ZeroCenteredRMSNormLayer)
def c_funcify_rms_norm(
    op: RMSNormLayer | ZeroCenteredRMSNormLayer, node: Apply
) -> list[Variable] | None:
    X, *parameters = node.inputs
    offset = int(isinstance(op, ZeroCenteredRMSNormLayer))
    reference = RMSNormLayer(n_in=op.n_in, epsilon=op.epsilon, affine=True)
    return _run_kernel(reference, X, _factor(X, parameters, offset))


@c_funcify.register(RMSNormPullback)
def c_funcify_rms_norm_pullback(op: RMSNormPullback, node: Apply) -> list[Variable] | None:
    X, dY, *parameters = node.inputs
    reference = RMSNormPullback(n_in=op.n_in, epsilon=op.epsilon, offset=0)
    gradients = _run_kernel(reference, X, dY, _factor(X, parameters, op.offset))
    return gradients and _cast_like(gradients, [X, *parameters])


@c_funcify.register(LayerNormLayer)
def c_funcify_layer_norm(op: LayerNormLayer, node: Apply) -> list[Variable] | None:
    X, *loc_and_scale = node.inputs
    reference = LayerNormLayer(n_in=op.n_in, epsilon=op.epsilon, affine=True)
    loc = _factor(X, loc_and_scale[:1], offset=0) if loc_and_scale else _full(X, 0)
    return _run_kernel(reference, X, loc, _factor(X, loc_and_scale[1:], offset=0))


@c_funcify.register(LayerNormPullback)
def c_funcify_layer_norm_pullback(op: LayerNormPullback, node: Apply) -> list[Variable] | None:
    X, dY, *loc_and_scale = node.inputs
    reference = LayerNormPullback(n_in=op.n_in, epsilon=op.epsilon)
    scale = _factor(X, loc_and_scale[1:], offset=0)
    gradients = _run_kernel(reference, X, dY, scale, scale)
    return gradients and _cast_like(gradients, [X, *loc_and_scale])


def _full(X: Any, value: float) -> TensorVariable:
    return pt.constant(np.full(X.type.shape[-1], value, X.type.dtype))


def _factor(X: Any, parameter: list[Any], offset: int) -> TensorVariable:
    """Return what the kernel multiplies the normalized rows by: offset + parameter, or ones."""
    if not parameter:
        return _full(X, 1)
    return pt.constant(offset, dtype=X.type.dtype) + parameter[0].astype(X.type.dtype)


def _run_kernel(reference: LayerOp, X: Any, *others: Any) -> list[Variable] | None:
    """Apply the kernel that computes ``reference``; float16 has none and runs its inner graph."""
    if X.type.dtype == "float16":
        return None
    outputs: Any = reference(X, *others, return_list=True)
    return NormKernel(outputs[0].owner.op).make_node(X, *others).outputs


def _cast_like(gradients: list[Any], inputs: list[Variable]) -> list[Variable]:
    return [g.astype(x.type.dtype) for g, x in zip(gradients, inputs, strict=False)]


class NormKernel(CKernel):
    """An affine norm, or its pullback, of float32 or float64 with parameters of the same dtype."""

    layer_op: RMSNormLayer | RMSNormPullback | LayerNormLayer | LayerNormPullback

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (hash_from_code(SUPPORT_CODE),)

    def c_support_code(self, **kwargs: Any) -> str:
        return SUPPORT_CODE

    def c_code(self, node: Apply, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        function = {
            RMSNormLayer: "rms_norm",
            RMSNormPullback: "rms_norm_pullback",
            LayerNormLayer: "layer_norm",
            LayerNormPullback: "layer_norm_pullback",
        }[type(self.layer_op)]
        dtype = node.inputs[0].type.dtype
        arguments = ", ".join([*inputs, *outputs, repr(float(self.layer_op.epsilon))])
        return f"""
        if (!pytensor_ml_norm::{function}<npy_{dtype}>({arguments})) {{ {sub["fail"]} }}
        """


# A compiler may not reorder a sum, so sums are written in lanes that it can vectorize.
SUPPORT_CODE = (
    THREADS
    + r"""
#include <cmath>
#include <vector>

namespace pytensor_ml_norm {

using namespace pytensor_ml_threads;

const int LANES = 16;

// As on Numba: so many terms are added up in T, and means from here on have lost nothing that
// counts, should some products be too small for T.
const npy_intp BLOCK = 512;
const double LEAST_MEAN = 1e-30;

// Adds up the K terms of type T that `term(i, terms)` gives for every i < n.
template <int K, typename T, typename Term>
inline void sum(npy_intp n, double (&sums)[K], Term term) {
    for (int k = 0; k < K; ++k) sums[k] = 0;
    for (npy_intp i = 0; i < n;) {
        const npy_intp stop = std::min(n, i + BLOCK);
        T lanes[K][LANES] = {}, terms[K];
        for (; i + LANES <= stop; i += LANES)
            for (int l = 0; l < LANES; ++l) {
                T t[K];
                term(i + l, t);
                for (int k = 0; k < K; ++k) lanes[k][l] += t[k];
            }
        for (; i < stop; ++i) {
            term(i, terms);
            for (int k = 0; k < K; ++k) lanes[k][0] += terms[k];
        }
        for (int k = 0; k < K; ++k)
            for (int l = 0; l < LANES; ++l) sums[k] += lanes[k][l];
    }
}

// A C-contiguous array with the values of another, for the time of a call.
template <typename T>
struct Values {
    PyArrayObject* array;
    explicit Values(PyArrayObject* source)
        : array((PyArrayObject*)PyArray_GETCONTIGUOUS(source)) {}
    ~Values() { Py_XDECREF(array); }
    Values(const Values&) = delete;
    const T* data() const { return (const T*)PyArray_DATA(array); }
};

inline bool allocate(PyArrayObject*& out, PyArrayObject* like) {
    if (out && PyArray_IS_C_CONTIGUOUS(out) && PyArray_SAMESHAPE(out, like)) return true;
    Py_XDECREF(out);
    out = (PyArrayObject*)PyArray_EMPTY(
        PyArray_NDIM(like), PyArray_DIMS(like), PyArray_TYPE(like), 0);
    return out != NULL;
}

inline npy_intp width(PyArrayObject* x) { return PyArray_DIM(x, PyArray_NDIM(x) - 1); }

inline npy_intp n_rows(PyArrayObject* x) { return width(x) ? PyArray_SIZE(x) / width(x) : 0; }

inline bool same_width(PyArrayObject* x, PyArrayObject* parameter) {
    if (width(x) == width(parameter)) return true;
    PyErr_Format(PyExc_ValueError,
                 "A norm of width %zd got an input whose last axis is %zd wide.",
                 (Py_ssize_t)width(parameter), (Py_ssize_t)width(x));
    return false;
}

inline bool same_shape(PyArrayObject* x, PyArrayObject* dy) {
    if (PyArray_SAMESHAPE(x, dy)) return true;
    PyErr_SetString(PyExc_ValueError, "A norm got a gradient of another shape than its input.");
    return false;
}

// A sum over rows, which leaves the dtype of the rows every 16 of them.
template <typename T>
struct ColumnSum {
    std::vector<T> recent;
    std::vector<double> total;
    explicit ColumnSum(npy_intp n) : recent(n), total(n) {}
    void flush() {
        for (size_t i = 0; i < total.size(); ++i) {
            total[i] += recent[i];
            recent[i] = 0;
        }
    }
};

// Fills `out` with the sum of what the parts of the rows have, in their order.
template <typename T>
void write(std::vector<ColumnSum<T>>& parts, PyArrayObject* out) {
    for (ColumnSum<T>& part : parts) part.flush();
    for (size_t i = 0; i < parts[0].total.size(); ++i) {
        double total = 0;
        for (const ColumnSum<T>& part : parts) total += part.total[i];
        ((T*)PyArray_DATA(out))[i] = T(total);
    }
}

template <typename T>
bool rms_norm(PyArrayObject* X, PyArrayObject* Scale, PyArrayObject*& Y, T epsilon) {
    const Values<T> x_values(X), scale_values(Scale);
    if (!find_threads() || !x_values.array || !scale_values.array || !same_width(X, Scale) ||
        !allocate(Y, X))
        return false;
    const npy_intp n = width(X);
    const T *all_x = x_values.data(), *scale = scale_values.data();
    T* const all_y = (T*)PyArray_DATA(Y);
    const npy_intp n_parts = count_parts(n_rows(X), 2 * PyArray_NBYTES(X));
    return in_threads(n_rows(X), n_parts, [=](npy_intp row, npy_intp stop) {
        const T* x = all_x + row * n;
        T* __restrict__ y = all_y + row * n;
        double xx[1] = {0};
        for (; row < stop; ++row, x += n, y += n) {
            if (!(LEAST_MEAN * n < xx[0] && xx[0] < INFINITY))
                sum<1, double>(n, xx, [&](npy_intp i, double* t) { t[0] = double(x[i]) * x[i]; });
            const T r = T(1 / std::sqrt(xx[0] / n + epsilon));
            // The next row is read while this one is written, which takes as long.
            const T* next = row + 1 < stop ? x + n : x;
            sum<1, T>(n, xx, [=](npy_intp i, T* t) {
                y[i] = x[i] * r * scale[i];
                t[0] = next[i] * next[i];
            });
        }
    });
}

template <typename T>
bool rms_norm_pullback(PyArrayObject* X, PyArrayObject* DY, PyArrayObject* Scale,
                       PyArrayObject*& DX, PyArrayObject*& DScale, T epsilon) {
    const Values<T> x_values(X), dy_values(DY), scale_values(Scale);
    if (!find_threads() || !x_values.array || !dy_values.array || !scale_values.array ||
        !same_width(X, Scale) || !same_shape(X, DY) || !allocate(DX, X) ||
        !allocate(DScale, Scale))
        return false;
    const npy_intp n = width(X);
    const T *all_x = x_values.data(), *all_dy = dy_values.data(), *scale = scale_values.data();
    T* const all_dx = (T*)PyArray_DATA(DX);
    const npy_intp rows = n_rows(X), n_parts = count_parts(rows, 3 * PyArray_NBYTES(X));
    std::vector<ColumnSum<T>> by_scale(n_parts, ColumnSum<T>(n));
    const auto work = [&](npy_intp part, npy_intp stop_part) {
        for (; part < stop_part; ++part) {
            npy_intp row = rows * part / n_parts;
            const npy_intp stop = rows * (part + 1) / n_parts;
            const T *x = all_x + row * n, *dy = all_dy + row * n;
            T* __restrict__ dx = all_dx + row * n;
            T* __restrict__ dscale = by_scale[part].recent.data();
            for (npy_intp n_done = 0; row < stop; ++row, x += n, dy += n, dx += n) {
                double sums[2];
                sum<2, T>(n, sums, [&](npy_intp i, T* t) {
                    t[0] = x[i] * x[i];
                    t[1] = dy[i] * scale[i] * x[i];
                });
                if (!(LEAST_MEAN * n < sums[0] && sums[0] < INFINITY &&
                      LEAST_MEAN * n < std::abs(sums[1]) && std::abs(sums[1]) < INFINITY))
                    sum<2, double>(n, sums, [&](npy_intp i, double* t) {
                        t[0] = double(x[i]) * x[i];
                        t[1] = double(dy[i] * scale[i]) * x[i];
                    });
                const double rms = std::sqrt(sums[0] / n + epsilon);
                const T r = T(1 / rms), mean = T(sums[1] / rms / n);
                for (npy_intp i = 0; i < n; ++i) {
                    const T normalized = x[i] * r;
                    dscale[i] += dy[i] * normalized;
                    dx[i] = r * (dy[i] * scale[i] - normalized * mean);
                }
                if (++n_done % 16 == 0) by_scale[part].flush();
            }
        }
    };
    if (!in_threads(n_parts, n_parts, work)) return false;
    write(by_scale, DScale);
    return true;
}

// Fills `d` with a row minus its mean, and then minus the mean of what rounding left.
template <typename T>
inline void center(const T* x, double* __restrict__ d, npy_intp n) {
    double total[1];
    sum<1, double>(n, total, [&](npy_intp i, double* t) { t[0] = x[i]; });
    const double mean = total[0] / n;
    for (npy_intp i = 0; i < n; ++i) d[i] = x[i] - mean;
    sum<1, double>(n, total, [&](npy_intp i, double* t) { t[0] = d[i]; });
    const double rest = total[0] / n;
    for (npy_intp i = 0; i < n; ++i) d[i] -= rest;
}

template <typename T>
bool layer_norm(PyArrayObject* X, PyArrayObject* Loc, PyArrayObject* Scale, PyArrayObject*& Y,
                T epsilon) {
    const Values<T> x_values(X), loc_values(Loc), scale_values(Scale);
    if (!find_threads() || !x_values.array || !loc_values.array || !scale_values.array ||
        !same_width(X, Loc) || !same_width(X, Scale) || !allocate(Y, X))
        return false;
    const npy_intp n = width(X);
    const T *all_x = x_values.data(), *loc = loc_values.data(), *scale = scale_values.data();
    T* const all_y = (T*)PyArray_DATA(Y);
    const npy_intp n_parts = count_parts(n_rows(X), 2 * PyArray_NBYTES(X));
    return in_threads(n_rows(X), n_parts, [=](npy_intp row, npy_intp stop) {
        const T* x = all_x + row * n;
        T* __restrict__ y = all_y + row * n;
        std::vector<double> centered(n);
        double* d = centered.data();
        for (; row < stop; ++row, x += n, y += n) {
            center(x, d, n);
            double dd[1];
            sum<1, double>(n, dd, [&](npy_intp i, double* t) { t[0] = d[i] * d[i]; });
            const double r = 1 / std::sqrt(dd[0] / n + epsilon);
            for (npy_intp i = 0; i < n; ++i) y[i] = T(d[i] * r) * scale[i] + loc[i];
        }
    });
}

template <typename T>
bool layer_norm_pullback(PyArrayObject* X, PyArrayObject* DY, PyArrayObject* Loc,
                         PyArrayObject* Scale, PyArrayObject*& DX, PyArrayObject*& DLoc,
                         PyArrayObject*& DScale, T epsilon) {
    const Values<T> x_values(X), dy_values(DY), scale_values(Scale);
    if (!find_threads() || !x_values.array || !dy_values.array || !scale_values.array ||
        !same_width(X, Scale) || !same_shape(X, DY) || !allocate(DX, X) ||
        !allocate(DLoc, Scale) || !allocate(DScale, Scale))
        return false;
    const npy_intp n = width(X);
    const T *all_x = x_values.data(), *all_dy = dy_values.data(), *scale = scale_values.data();
    T* const all_dx = (T*)PyArray_DATA(DX);
    const npy_intp rows = n_rows(X), n_parts = count_parts(rows, 3 * PyArray_NBYTES(X));
    std::vector<ColumnSum<T>> by_loc(n_parts, ColumnSum<T>(n)), by_scale(by_loc);
    const auto work = [&](npy_intp part, npy_intp stop_part) {
        std::vector<double> centered(n);
        double* d = centered.data();
        for (; part < stop_part; ++part) {
            npy_intp row = rows * part / n_parts;
            const npy_intp stop = rows * (part + 1) / n_parts;
            const T *x = all_x + row * n, *dy = all_dy + row * n;
            T* __restrict__ dx = all_dx + row * n;
            T* __restrict__ dloc = by_loc[part].recent.data();
            T* __restrict__ dscale = by_scale[part].recent.data();
            for (npy_intp n_done = 0; row < stop; ++row, x += n, dy += n, dx += n) {
                center(x, d, n);
                double sums[3];
                sum<3, double>(n, sums, [&](npy_intp i, double* t) {
                    const double g = dy[i] * scale[i];
                    t[0] = d[i] * d[i];
                    t[1] = g;
                    t[2] = g * d[i];
                });
                const double r = 1 / std::sqrt(sums[0] / n + epsilon);
                const T root = T(r), g_mean = T(sums[1] / n), gd_mean = T(sums[2] * r / n);
                for (npy_intp i = 0; i < n; ++i) {
                    const T normalized = T(d[i] * r);
                    dloc[i] += dy[i];
                    dscale[i] += dy[i] * normalized;
                    dx[i] = root * (dy[i] * scale[i] - g_mean - normalized * gd_mean);
                }
                if (++n_done % 16 == 0) {
                    by_loc[part].flush();
                    by_scale[part].flush();
                }
            }
        }
    };
    if (!in_threads(n_parts, n_parts, work)) return false;
    write(by_loc, DLoc);
    write(by_scale, DScale);
    return true;
}

}
"""
)

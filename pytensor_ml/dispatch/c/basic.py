"""How an op finds its C kernel, and what kernels share."""

from functools import singledispatch
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.link.c.op import COp

from pytensor_ml.base import LayerOp
from pytensor_ml.dispatch.c.threads import THREADS
from pytensor_ml.dispatch.memory import keep_freed_memory

keep_freed_memory()


@singledispatch
def c_funcify(op: Op, node: Apply) -> list[Variable] | None:
    """Return variables that replace the outputs of ``node``, or None to run the inner graph.

    Register an implementation by the class of the op.
    """
    return None


class CKernel(COp):
    """An op that computes in the subclass's C code what a ``layer_op`` does.

    PyTensor pickles an op into the key of its compiled module, and unpickles the keys of all
    modules in each process: a key must not hold ``layer_op``, nor the functions compiled of it.
    """

    __props__ = ("kind", "settings")

    def __init__(self, layer_op: LayerOp):
        self.kind = type(layer_op)
        self.settings = tuple(layer_op._props_dict().items())
        self.layer_op = layer_op

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__props__}

    def make_node(self, *inputs: Variable) -> Apply:
        return Apply(self, list(inputs), [kind() for kind in self.layer_op.output_types])

    def c_compile_args(self, **kwargs: Any) -> list[str]:
        # Otherwise GCC does not vectorize a choice between two floats, such as the exponential's.
        return ["-fno-trapping-math"]

    def infer_shape(self, node: Apply, shapes: Any) -> Any:
        return self.layer_op.infer_shape(node, shapes)

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        self.layer_op.perform(node, inputs, outputs)


EXPONENTIAL = r"""
#include <cmath>
#include <cstring>

namespace pytensor_ml_exponential {

inline double exponential(double x) { return std::exp(x); }

// The exponential of what is not above 0, or NaN, such that the compiler vectorizes a loop of it:
// x = n log 2 + r, and a series in r.
inline float exponential(float x) {
    const float magic = 12582912.0f, log_2_high = 0.693359375f;
    const float log_2_low = float(0.69314718055994530942 - 0.693359375);
    const float bounded = x < -87.0f ? -87.0f : x;
    const float shifted = bounded * 1.44269504088896341f + magic;
    const float n = shifted - magic;
    const float r = (bounded - n * log_2_high) - n * log_2_low;
    const float tail = 1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (
        1 / 720.f + r * (1 / 5040.f)))));
    npy_uint32 bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000u;
    float power_of_2;
    std::memcpy(&power_of_2, &bits, 4);
    const float y = (1 + (r + r * r * tail)) * power_of_2;
    return x < -87.0f ? 0.0f : y;
}

template <typename T>
inline T sigmoid(T x) {
    const T small = exponential(-std::abs(x));
    return (x < 0 ? small : T(1)) / (1 + small);
}

}
"""

# Products go to the BLAS of SciPy, whose address SciPy's Cython interface gives: PyTensor has none
# to link to. What is to be vectorized sums in lanes, since the compiler may not reorder a sum.
PRODUCTS = (
    EXPONENTIAL
    + THREADS
    + r"""
#include <limits>
#include <vector>

namespace pytensor_ml_products {

using pytensor_ml_exponential::exponential;
using pytensor_ml_threads::count_parts;
using pytensor_ml_threads::count_threads;
using pytensor_ml_threads::in_threads;

const npy_intp LANES = 16;

// As on Numba: rows or columns that a part of a product has at least, and a multiple of, and
// multiplications that take as long as another thread takes to begin.
const npy_intp TILE = 32, LEAST_PRODUCTS = 1 << 20;

inline bool fail(const char* message) {
    PyErr_SetString(PyExc_ValueError, message);
    return false;
}

// The address of a function of SciPy's BLAS, or NULL with an error.
inline void* blas_function(const char* name, const char* signature) {
    PyObject* module = PyImport_ImportModule("scipy.linalg.cython_blas");
    PyObject* table = module ? PyObject_GetAttrString(module, "__pyx_capi__") : NULL;
    PyObject* capsule = table ? PyMapping_GetItemString(table, name) : NULL;
    const char* found = capsule ? PyCapsule_GetName(capsule) : NULL;
    void* address = NULL;
    if (found && std::strstr(found, signature))
        address = PyCapsule_GetPointer(capsule, found);
    else if (found)
        PyErr_Format(PyExc_NotImplementedError,
                     "These C kernels need a SciPy whose BLAS has 32-bit integers; "
                     "this one has %s. Compile for another backend.", found);
    Py_XDECREF(capsule);
    Py_XDECREF(table);
    Py_XDECREF(module);
    return address;
}

template <typename T>
struct Blas {
    typedef void (*Gemm)(char*, char*, int*, int*, int*, T*, T*, int*, T*, int*, T*, T*, int*);
    typedef void (*Gemv)(char*, int*, int*, T*, T*, int*, T*, int*, T*, T*, int*);

    static Gemm gemm() {
        static Gemm address = NULL;
        if (!address)
            address = (Gemm)blas_function(sizeof(T) == 4 ? "sgemm" : "dgemm",
                                          "char *, char *, int *, int *, int *,");
        return address;
    }

    static Gemv gemv() {
        static Gemv address = NULL;
        if (!address)
            address = (Gemv)blas_function(sizeof(T) == 4 ? "sgemv" : "dgemv",
                                          "char *, int *, int *,");
        return address;
    }
};

// Finds what products need, or sets an error. A kernel does so before it multiplies.
template <typename T>
bool can_multiply() {
    return Blas<T>::gemm() && Blas<T>::gemv() && pytensor_ml_threads::find_threads();
}

// A row-major matrix that may be the transpose of what lies in memory.
template <typename T>
struct Matrix {
    const T* data;
    npy_intp stride;
    bool transposed;

    // Without what is before a row of what lies in memory.
    Matrix from(npy_intp row) const { return {data + row * stride, stride, transposed}; }
    Matrix transpose() const { return {data, stride, !transposed}; }
};

// out = beta * out + a b, where out is (m, n) and a is (m, k).
template <typename T>
void multiply(npy_intp m, npy_intp n, npy_intp k, Matrix<T> a, Matrix<T> b,
              T beta, T* out, npy_intp out_stride) {
    if (m == 0 || n == 0) return;
    if (k == 0) {
        if (beta == 0)
            for (npy_intp i = 0; i < m; ++i) std::fill_n(out + i * out_stride, n, T(0));
        return;
    }
    const bool by_rows = m >= n;
    const npy_intp n_tiles = (std::max(m, n) + TILE - 1) / TILE;
    const npy_intp n_parts = m * n * k < LEAST_PRODUCTS ? 1 : std::min(count_threads(), n_tiles);
    in_threads(n_tiles, n_parts, [=](npy_intp first, npy_intp stop) {
        first *= TILE;
        stop = std::min(stop * TILE, by_rows ? m : n);
        const T *own_a = a.data, *own_b = b.data;
        if (by_rows)
            own_a += first * (a.transposed ? 1 : a.stride);
        else
            own_b += first * (b.transposed ? b.stride : 1);
        int rows = int(by_rows ? stop - first : m), columns = int(by_rows ? n : stop - first);
        int inner = int(k);
        int a_stride = int(std::max(a.stride, npy_intp(1)));
        int b_stride = int(std::max(b.stride, npy_intp(1)));
        int stride = int(std::max(out_stride, npy_intp(1)));
        T alpha = 1, kept = beta;
        // Fortran's columns are our rows, so it forms the transpose, b a.
        Blas<T>::gemm()(const_cast<char*>(b.transposed ? "T" : "N"),
                        const_cast<char*>(a.transposed ? "T" : "N"),
                        &columns, &rows, &inner, &alpha, const_cast<T*>(own_b), &b_stride,
                        const_cast<T*>(own_a), &a_stride, &kept,
                        out + first * (by_rows ? out_stride : 1), &stride);
    });
}

// y = x w, for one row, where w is (n_in, n_out) and without gaps. The weight is read once and
// nothing else is to do, which the product of matrices is slower at.
template <typename T>
void multiply_vector(npy_intp n_in, npy_intp n_out, const T* x, Matrix<T> w, T* y) {
    std::fill_n(y, n_out, T(0));
    if (n_in == 0 || n_out == 0) return;
    const npy_intp n_bytes = n_in * n_out * npy_intp(sizeof(T));
    const npy_intp n_parts =
        std::max(std::min({count_threads(), n_bytes / pytensor_ml_threads::LEAST_BYTES, n_in,
                           n_out}), npy_intp(1));
    // Each thread reads whole rows of the memory, which is faster, and adds to a sum of its own.
    std::vector<T> sums(w.transposed ? 0 : (n_parts - 1) * n_out);
    T* const other_sums = sums.data();
    in_threads(n_parts, n_parts, [=](npy_intp part, npy_intp stop) {
        for (; part < stop; ++part) {
            const npy_intp n = w.transposed ? n_out : n_in;
            const npy_intp first = n * part / n_parts;
            int columns = int(w.transposed ? n_in : n_out);
            int rows = int(n * (part + 1) / n_parts - first), stride = int(w.stride), one = 1;
            T unit = 1;
            T* const sum = w.transposed ? y + first
                           : part == 0  ? y
                                        : other_sums + (part - 1) * n_out;
            Blas<T>::gemv()(const_cast<char*>(w.transposed ? "T" : "N"), &columns, &rows, &unit,
                            const_cast<T*>(w.data + first * w.stride), &stride,
                            const_cast<T*>(w.transposed ? x : x + first), &one, &unit, sum, &one);
        }
    });
    for (size_t i = 0; i < sums.size(); ++i) y[i % n_out] += sums[i];
}

template <typename T>
T maximum(const T* x, npy_intp n) {
    T lanes[LANES], high = -std::numeric_limits<T>::infinity();
    std::fill_n(lanes, LANES, high);
    npy_intp i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; ++l) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (; i < n; ++i) high = x[i] > high ? x[i] : high;
    for (int l = 0; l < LANES; ++l) high = lanes[l] > high ? lanes[l] : high;
    return high;
}

template <typename T>
T sum(const T* x, npy_intp n) {
    T lanes[LANES] = {0}, total = 0;
    npy_intp i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; ++l) lanes[l] += x[i + l];
    for (; i < n; ++i) total += x[i];
    for (int l = 0; l < LANES; ++l) total += lanes[l];
    return total;
}

template <typename T>
T sum_of_products(const T* x, const T* y, npy_intp n) {
    T lanes[LANES] = {0}, total = 0;
    npy_intp i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; ++l) lanes[l] += x[i + l] * y[i + l];
    for (; i < n; ++i) total += x[i] * y[i];
    for (int l = 0; l < LANES; ++l) total += lanes[l];
    return total;
}

}
"""
)

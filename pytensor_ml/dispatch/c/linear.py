"""C kernels of affine maps."""

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.utils import hash_from_code

from pytensor_ml.dispatch.c.basic import PRODUCTS, CKernel, c_funcify
from pytensor_ml.dispatch.c.half import HALF
from pytensor_ml.layers.linear import LinearLayer, LinearPullback


@c_funcify.register(LinearLayer)
@c_funcify.register(LinearPullback)
def c_funcify_linear(op: LinearLayer | LinearPullback, node: Apply) -> list[Variable] | None:
    dtypes = [kind.dtype for kind in (*op.input_types, *op.output_types)]
    if isinstance(op, LinearLayer) and dtypes[1] == "uint16":
        del dtypes[1]
        covered = set(dtypes) == {"float32"}
    else:
        covered = set(dtypes) in ({"float32"}, {"float64"})
    if not covered or op.input_types[0].ndim == 0:
        return None
    return LinearKernel(op).make_node(*node.inputs).outputs


class LinearKernel(CKernel):
    """An affine map of float32 or float64, or its gradients."""

    layer_op: LinearLayer | LinearPullback

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (hash_from_code(SUPPORT_CODE),)

    def c_support_code(self, **kwargs: Any) -> str:
        return SUPPORT_CODE

    def c_code(self, node: Apply, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        if isinstance(self.layer_op, LinearLayer):
            X, W, *b = inputs
            is_halved = node.inputs[1].type.dtype == "uint16"
            function = "run_halved" if is_halved else "run<T>"
            call = f"{function}({X}, {W}, {b[0] if b else 'NULL'}, {outputs[0]})"
        else:
            X, W, g, *_ = inputs
            db = f"&{outputs[2]}" if len(outputs) > 2 else "NULL"
            call = f"pull_back<T>({X}, {W}, {g}, {outputs[0]}, {outputs[1]}, {db})"
        call = call.replace("<T>", f"<npy_{node.inputs[0].type.dtype}>")
        return f"if (!pytensor_ml_linear::{call}) {{ {sub['fail']} }}"


SUPPORT_CODE = (
    PRODUCTS
    + HALF
    + r"""
namespace pytensor_ml_linear {

using namespace pytensor_ml_products;

// An array as a row-major matrix, of the vectors along its last axis if it has more than two axes.
template <typename T>
struct Rows {
    PyArrayObject* array;
    npy_intp rows, columns;
    bool transposed;

    explicit Rows(PyArrayObject* source) : array(NULL), rows(1), transposed(false) {
        const int n_axes = PyArray_NDIM(source);
        columns = PyArray_DIM(source, n_axes - 1);
        for (int axis = 0; axis < n_axes - 1; ++axis) rows *= PyArray_DIM(source, axis);
        if (n_axes == 2 && PyArray_IS_F_CONTIGUOUS(source) && !PyArray_IS_C_CONTIGUOUS(source)) {
            transposed = true;
            array = source;
            Py_INCREF(source);
        } else {
            array = PyArray_GETCONTIGUOUS(source);
        }
    }
    ~Rows() { Py_XDECREF(array); }

    const T* data() const { return (const T*)PyArray_DATA(array); }
    Matrix<T> matrix() const { return {data(), transposed ? rows : columns, transposed}; }
    Matrix<T> transpose() const { return {data(), transposed ? rows : columns, !transposed}; }
};

inline bool allocate(int n_axes, const npy_intp* shape, PyArrayObject* like, PyArrayObject*& out) {
    if (out && PyArray_IS_C_CONTIGUOUS(out) && PyArray_NDIM(out) == n_axes &&
        PyArray_CompareLists(PyArray_DIMS(out), shape, n_axes))
        return true;
    Py_XDECREF(out);
    out = (PyArrayObject*)PyArray_EMPTY(n_axes, shape, PyArray_TYPE(like), 0);
    return out != NULL;
}

// Allocate the output of an affine map.
template <typename T, typename U>
bool prepare(PyArrayObject* X, const Rows<T>& x, const Rows<U>& w, PyArrayObject* b,
             PyArrayObject*& Y) {
    if (!x.array || !w.array) return false;
    if (x.columns != w.rows || (b && PyArray_DIM(b, 0) != w.columns))
        return fail("An affine map got an input or a bias that does not fit its weight.");
    std::vector<npy_intp> shape(PyArray_DIMS(X), PyArray_DIMS(X) + PyArray_NDIM(X));
    shape.back() = w.columns;
    return can_multiply<T>() && allocate(shape.size(), shape.data(), X, Y);
}

template <typename T>
void add_bias(PyArrayObject* b, npy_intp rows, npy_intp columns, T* y) {
    for (npy_intp i = 0; b && i < rows; ++i)
        for (npy_intp j = 0; j < columns; ++j)
            y[i * columns + j] += *(const T*)PyArray_GETPTR1(b, j);
}

// With a weight of float16 words.
inline bool run_halved(PyArrayObject* X, PyArrayObject* W, PyArrayObject* b, PyArrayObject*& Y) {
    const Rows<float> x(X);
    const Rows<npy_uint16> w(W);
    if (!prepare(X, x, w, b, Y)) return false;
    float* y = (float*)PyArray_DATA(Y);
    if (x.rows <= pytensor_ml_half::FEW_ROWS && !x.transposed && w.transposed) {
        for (npy_intp i = 0; i < x.rows; ++i)
            pytensor_ml_half::inner_products(w.columns, x.data() + i * w.rows, w.rows, w.data(),
                                             y + i * w.columns);
    } else {
        const npy_intp size = w.rows * w.columns;
        PyArrayObject* values = (PyArrayObject*)PyArray_EMPTY(1, &size, NPY_FLOAT32, 0);
        if (!values) return false;
        float* data = (float*)PyArray_DATA(values);
        pytensor_ml_half::widen(w.data(), size, data);
        const Matrix<float> matrix = {data, w.transposed ? w.rows : w.columns, w.transposed};
        multiply<float>(x.rows, w.columns, x.columns, x.matrix(), matrix, 0, y, w.columns);
        Py_DECREF(values);
    }
    add_bias(b, x.rows, w.columns, y);
    return true;
}

template <typename T>
bool run(PyArrayObject* X, PyArrayObject* W, PyArrayObject* b, PyArrayObject*& Y) {
    const Rows<T> x(X), w(W);
    if (!prepare(X, x, w, b, Y)) return false;
    T* y = (T*)PyArray_DATA(Y);
    if (x.rows == 1)
        multiply_vector<T>(w.rows, w.columns, x.data(), w.matrix(), y);
    else
        multiply<T>(x.rows, w.columns, x.columns, x.matrix(), w.matrix(), T(0), y, w.columns);
    add_bias(b, x.rows, w.columns, y);
    return true;
}

template <typename T>
bool pull_back(PyArrayObject* X, PyArrayObject* W, PyArrayObject* G, PyArrayObject*& dX,
               PyArrayObject*& dW, PyArrayObject** db) {
    const Rows<T> x(X), w(W), g(G);
    if (!x.array || !w.array || !g.array) return false;
    if (x.columns != w.rows || g.columns != w.columns || g.rows != x.rows)
        return fail("An affine map got an input or a gradient that does not fit its weight.");
    const npy_intp weight_shape[] = {w.rows, w.columns};
    if (!can_multiply<T>() || !allocate(PyArray_NDIM(X), PyArray_DIMS(X), X, dX) ||
        !allocate(2, weight_shape, X, dW) || (db && !allocate(1, &w.columns, X, *db)))
        return false;
    multiply<T>(x.rows, x.columns, w.columns, g.matrix(), w.transpose(), T(0),
                (T*)PyArray_DATA(dX), x.columns);
    multiply<T>(x.columns, w.columns, x.rows, x.transpose(), g.matrix(), T(0),
                (T*)PyArray_DATA(dW), w.columns);
    if (!db) return true;
    std::vector<double> sums(w.columns);
    for (npy_intp i = 0; i < g.rows; ++i)
        for (npy_intp j = 0; j < g.columns; ++j)
            sums[j] += g.data()[g.transposed ? j * g.rows + i : i * g.columns + j];
    for (npy_intp j = 0; j < w.columns; ++j) ((T*)PyArray_DATA(*db))[j] = T(sums[j]);
    return true;
}

}
"""
)

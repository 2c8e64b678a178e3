"""C kernels of rotary embeddings."""

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.utils import hash_from_code

from pytensor_ml.dispatch.c.basic import CKernel, c_funcify
from pytensor_ml.dispatch.c.threads import THREADS
from pytensor_ml.layers.positional import ApplyRotary


@c_funcify.register(ApplyRotary)
def c_funcify_apply_rotary(op: ApplyRotary, node: Apply) -> list[Variable] | None:
    dtypes = {variable.type.dtype for variable in node.inputs}
    if not dtypes <= {"float32", "float64"} or not op.has_aligned_table:
        return None
    return ApplyRotaryKernel(op).make_node(*node.inputs).outputs


class ApplyRotaryKernel(CKernel):
    """A rotation of float32 or float64 by a table of either."""

    layer_op: ApplyRotary

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (hash_from_code(SUPPORT_CODE),)

    def c_support_code(self, **kwargs: Any) -> str:
        return SUPPORT_CODE

    def c_code(self, node: Apply, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        x, table = node.inputs
        half = str(self.layer_op.pairing == "half").lower()
        sign = -1 if self.layer_op.inverse else 1
        types = f"npy_{x.type.dtype}, npy_{table.type.dtype}, {half}"
        arguments = ", ".join([*inputs, *outputs, str(table.type.ndim - 3), str(sign)])
        return f"""
        if (!pytensor_ml_rotary::apply_rotary<{types}>({arguments})) {{ {sub["fail"]} }}
        """


SUPPORT_CODE = (
    THREADS
    + r"""
#include <type_traits>
#include <vector>

namespace pytensor_ml_rotary {

using namespace pytensor_ml_threads;

// X is (batch axes, head axes, steps, channels) and Table (batch axes, steps, pairs, 2).
template <typename X, typename A, bool half>
bool apply_rotary(PyArrayObject* x_array, PyArrayObject* table_array, PyArrayObject*& y_array,
                  int n_batch_axes, int sign) {
    using T = typename std::conditional<(sizeof(X) > sizeof(A)), X, A>::type;
    if (!find_threads()) return false;
    const int n_axes = PyArray_NDIM(x_array);
    const npy_intp* shape = PyArray_DIMS(x_array);
    const npy_intp steps = shape[n_axes - 2], channels = shape[n_axes - 1];
    const npy_intp pairs = PyArray_DIM(table_array, PyArray_NDIM(table_array) - 2);
    npy_intp batch = 1, heads = 1;
    for (int axis = 0; axis < n_batch_axes; ++axis) batch *= shape[axis];
    for (int axis = n_batch_axes; axis < n_axes - 2; ++axis) heads *= shape[axis];
    if (PyArray_SIZE(table_array) != batch * steps * pairs * 2 || 2 * pairs > channels) {
        PyErr_SetString(PyExc_ValueError,
                        "A rotary table's shape does not go with that of what it rotates.");
        return false;
    }
    if (!y_array || !PyArray_IS_C_CONTIGUOUS(y_array) || !PyArray_SAMESHAPE(y_array, x_array)) {
        Py_XDECREF(y_array);
        y_array = (PyArrayObject*)PyArray_EMPTY(n_axes, PyArray_DIMS(x_array),
                                                PyArray_TYPE(x_array), 0);
        if (!y_array) return false;
    }
    PyArrayObject* x_values = (PyArrayObject*)PyArray_GETCONTIGUOUS(x_array);
    PyArrayObject* table_values = (PyArrayObject*)PyArray_GETCONTIGUOUS(table_array);
    if (!x_values || !table_values) {
        Py_XDECREF(x_values);
        Py_XDECREF(table_values);
        return false;
    }
    const X* const all_x = (const X*)PyArray_DATA(x_values);
    const A* const table = (const A*)PyArray_DATA(table_values);
    X* const all_y = (X*)PyArray_DATA(y_array);
    const npy_intp n_angles = steps * pairs, n_items = batch * heads;
    std::vector<T> all_cos(batch * n_angles), all_sin(batch * n_angles);
    for (npy_intp i = 0; i < batch * n_angles; ++i) {
        all_cos[i] = T(table[2 * i]);
        all_sin[i] = T(sign) * T(table[2 * i + 1]);
    }
    const npy_intp n_parts = count_parts(n_items, 2 * PyArray_NBYTES(x_array));
    const bool is_done = in_threads(n_items, n_parts, [&](npy_intp item, npy_intp stop) {
        const X* x = all_x + item * steps * channels;
        X* __restrict__ y = all_y + item * steps * channels;
        for (; item < stop; ++item) {
            const T* cos = all_cos.data() + item / heads * n_angles;
            const T* sin = all_sin.data() + item / heads * n_angles;
            for (npy_intp s = 0; s < steps; ++s) {
                if (half) {
                    for (npy_intp i = 0; i < pairs; ++i) {
                        const T first = x[i], second = x[pairs + i];
                        y[i] = X(first * cos[i] - second * sin[i]);
                        y[pairs + i] = X(second * cos[i] + first * sin[i]);
                    }
                } else {
                    for (npy_intp i = 0; i < pairs; ++i) {
                        const T first = x[2 * i], second = x[2 * i + 1];
                        y[2 * i] = X(first * cos[i] - second * sin[i]);
                        y[2 * i + 1] = X(second * cos[i] + first * sin[i]);
                    }
                }
                for (npy_intp i = 2 * pairs; i < channels; ++i) y[i] = x[i];
                x += channels;
                y += channels;
                cos += pairs;
                sin += pairs;
            }
        }
    });
    Py_DECREF(x_values);
    Py_DECREF(table_values);
    return is_done;
}

}
"""
)

"""C kernels of gated activations."""

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.utils import hash_from_code

from pytensor_ml.dispatch.c.basic import EXPONENTIAL, CKernel, c_funcify
from pytensor_ml.dispatch.c.threads import THREADS
from pytensor_ml.layers.feedforward import GatedActivationLayer, GatedActivationPullback


@c_funcify.register(GatedActivationLayer)
@c_funcify.register(GatedActivationPullback)
def c_funcify_gated_activation(
    op: GatedActivationLayer | GatedActivationPullback, node: Apply
) -> list[Variable] | None:
    kinds = {(x.type.dtype, x.type.broadcastable) for x in node.inputs}
    if len(kinds) > 1 or node.inputs[0].type.dtype not in ("float32", "float64"):
        return None
    return GatedActivationKernel(op).make_node(*node.inputs).outputs


class GatedActivationKernel(CKernel):
    """A gated activation of float32 or float64, or its pullback."""

    layer_op: GatedActivationLayer | GatedActivationPullback

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (hash_from_code(SUPPORT_CODE),)

    def c_support_code(self, **kwargs: Any) -> str:
        return SUPPORT_CODE

    def c_code(self, node: Apply, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        function = "activate" if isinstance(self.layer_op, GatedActivationLayer) else "pull_back"
        settings = f"{self.layer_op.beta!r}, {self.layer_op.cubic!r}"
        arguments = ", ".join([*inputs, *outputs, settings])
        return f"""
        if (!pytensor_ml_gated::{function}<npy_{node.inputs[0].type.dtype}>({arguments})) {{
            {sub["fail"]}
        }}
        """


SUPPORT_CODE = (
    EXPONENTIAL
    + THREADS
    + r"""
namespace pytensor_ml_gated {

using pytensor_ml_exponential::sigmoid;
using namespace pytensor_ml_threads;

// An array's items one after another, copied if they are scattered.
template <typename T>
struct Items {
    PyArrayObject* array;

    explicit Items(PyArrayObject* source) : array(PyArray_GETCONTIGUOUS(source)) {}
    ~Items() { Py_XDECREF(array); }
    const T* data() const { return (const T*)PyArray_DATA(array); }
};

inline bool make_like(PyArrayObject* model, PyArrayObject*& out) {
    if (out && PyArray_IS_C_CONTIGUOUS(out) && PyArray_SAMESHAPE(out, model)) return true;
    Py_XDECREF(out);
    out = (PyArrayObject*)PyArray_EMPTY(PyArray_NDIM(model), PyArray_DIMS(model),
                                        PyArray_TYPE(model), 0);
    return out != NULL;
}

inline bool same_shape(PyArrayObject* x, PyArrayObject* y) {
    if (PyArray_SAMESHAPE(x, y)) return true;
    PyErr_SetString(PyExc_ValueError,
                    "A gated activation got a gate, a value or a gradient of different shapes.");
    return false;
}

// Without a cubic term it must not be formed: it may overflow.
template <typename T>
inline T argument(T x, T cubic) {
    return cubic != 0 ? x + cubic * x * x * x : x;
}

template <typename T>
bool activate(PyArrayObject* gate, PyArrayObject* value, PyArrayObject*& out, T beta, T cubic) {
    if (!find_threads() || !same_shape(gate, value) || !make_like(gate, out)) return false;
    const Items<T> gates(gate), values(value);
    if (!gates.array || !values.array) return false;
    const T *x = gates.data(), *v = values.data();
    T* const all_y = (T*)PyArray_DATA(out);
    const npy_intp n = PyArray_SIZE(gate);
    const npy_intp n_parts = count_parts(n, 3 * n * npy_intp(sizeof(T)));
    return in_threads(n, n_parts, [=](npy_intp first, npy_intp stop) {
        T* __restrict__ y = all_y;
        for (npy_intp i = first; i < stop; ++i)
            y[i] = x[i] * sigmoid(beta * argument(x[i], cubic)) * v[i];
    });
}

template <typename T>
bool pull_back(PyArrayObject* gate, PyArrayObject* value, PyArrayObject* gradient,
               PyArrayObject*& dgate, PyArrayObject*& dvalue, T beta, T cubic) {
    if (!find_threads() || !same_shape(gate, value) || !same_shape(gate, gradient)) return false;
    if (!make_like(gate, dgate) || !make_like(gate, dvalue)) return false;
    const Items<T> gates(gate), values(value), gradients(gradient);
    if (!gates.array || !values.array || !gradients.array) return false;
    const T *x = gates.data(), *v = values.data(), *g = gradients.data();
    T *const all_dx = (T*)PyArray_DATA(dgate), *const all_dv = (T*)PyArray_DATA(dvalue);
    const npy_intp n = PyArray_SIZE(gate);
    const npy_intp n_parts = count_parts(n, 5 * n * npy_intp(sizeof(T)));
    return in_threads(n, n_parts, [=](npy_intp first, npy_intp stop) {
        T *__restrict__ dx = all_dx, *__restrict__ dv = all_dv;
        for (npy_intp i = first; i < stop; ++i) {
            const T s = sigmoid(beta * argument(x[i], cubic));
            const T activation = x[i] * s;
            const T argument_slope = cubic != 0 ? 1 + 3 * cubic * x[i] * x[i] : T(1);
            const T slope = s + activation * (1 - s) * beta * argument_slope;
            dx[i] = g[i] * v[i] * slope;
            dv[i] = g[i] * activation;
        }
    });
}

}
"""
)

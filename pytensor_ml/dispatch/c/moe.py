"""C kernels of mixtures of experts."""

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.utils import hash_from_code

from pytensor_ml.dispatch.c.basic import PRODUCTS, CKernel, c_funcify
from pytensor_ml.layers.moe import ExpertsLayer, ExpertsPullback, RouterLayer, RouterPullback

Moe = RouterLayer | RouterPullback | ExpertsLayer | ExpertsPullback


@c_funcify.register(RouterLayer)
@c_funcify.register(RouterPullback)
@c_funcify.register(ExpertsLayer)
@c_funcify.register(ExpertsPullback)
def c_funcify_moe(op: Moe, node: Apply) -> list[Variable] | None:
    floats = {v.type.dtype for v in node.inputs} - {"int32", "bool"}
    if len(floats) > 1:
        return None
    return MoEKernel(op).make_node(*node.inputs).outputs


class MoEKernel(CKernel):
    """A router, experts, or the pullback of one, whose floats have one dtype."""

    layer_op: Moe

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (hash_from_code(SUPPORT_CODE),)

    def c_support_code(self, **kwargs: Any) -> str:
        return SUPPORT_CODE

    def c_code(self, node: Apply, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        op = self.layer_op
        function = {
            RouterLayer: "route",
            RouterPullback: "route_pullback",
            ExpertsLayer: "run_experts",
            ExpertsPullback: "run_experts_pullback",
        }[type(op)]
        dtype = node.outputs[1 if isinstance(op, RouterLayer) else 0].type.dtype
        arguments = [*inputs, *outputs]
        if isinstance(op, RouterLayer):
            given = op.split_inputs(inputs)
            next_bias = f"&{outputs[3]}" if op.bias_update_factor else "NULL"
            arguments = [*(v or "NULL" for v in given), *outputs[:3], next_bias]
        if isinstance(op, RouterLayer | RouterPullback):
            settings = [int(op.score == "softmax"), int(op.renormalize), op.routed_scaling_factor]
            if isinstance(op, RouterLayer):
                settings += [op.top_k, op.n_groups, op.top_k_groups, op.bias_update_factor]
            arguments.append(f"{{{', '.join(map(repr, settings))}}}")
        return f"""
        if (!pytensor_ml_moe::{function}<npy_{dtype}>({", ".join(arguments)})) {{ {sub["fail"]} }}
        """


SUPPORT_CODE = (
    PRODUCTS
    + r"""
namespace pytensor_ml_moe {

using namespace pytensor_ml_products;
using pytensor_ml_exponential::sigmoid;

// Rows that pass through an expert at a time, so that what is in between stays in the cache.
const npy_intp BLOCK = 256;

struct Settings {
    int is_softmax, renormalize;
    double factor;
    npy_intp top_k, n_groups, n_kept;
    double step;
};

// The rows of an array, which are copied if they are not contiguous.
template <typename T>
struct Rows {
    PyArrayObject* array;
    npy_intp width, n;

    explicit Rows(PyArrayObject* source) : array(NULL), width(0), n(0) {
        if (!source) return;
        array = (PyArrayObject*)PyArray_GETCONTIGUOUS(source);
        const int last = PyArray_NDIM(source) - 1;
        width = last < 0 ? 1 : PyArray_DIM(source, last);
        n = PyArray_MultiplyList(PyArray_DIMS(source), last < 0 ? 0 : last);
    }
    ~Rows() { Py_XDECREF(array); }
    Rows(const Rows&) = delete;
    const T* row(npy_intp i) const { return (const T*)PyArray_DATA(array) + i * width; }
};

inline bool allocate(PyArrayObject*& out, int ndim, const npy_intp* shape, int kind) {
    if (out && PyArray_IS_C_CONTIGUOUS(out) && std::equal(shape, shape + ndim, PyArray_DIMS(out)))
        return true;
    Py_XDECREF(out);
    out = (PyArrayObject*)PyArray_EMPTY(ndim, const_cast<npy_intp*>(shape), kind, 0);
    return out != NULL;
}

inline bool allocate_like(PyArrayObject*& out, PyArrayObject* like, npy_intp width, int kind) {
    std::vector<npy_intp> shape(PyArray_DIMS(like), PyArray_DIMS(like) + PyArray_NDIM(like));
    shape.back() = width;
    return allocate(out, int(shape.size()), shape.data(), kind);
}

inline bool same_tokens(PyArrayObject* a, PyArrayObject* b) {
    return PyArray_NDIM(a) == PyArray_NDIM(b) &&
           std::equal(PyArray_DIMS(a), PyArray_DIMS(a) + PyArray_NDIM(a) - 1, PyArray_DIMS(b));
}

// Takes the indices of the k largest entries that are left, the lowest first where they are equal.
template <typename T>
void put_best(const T* preferences, npy_intp n, npy_intp k, std::vector<char>& is_left,
              npy_int32* chosen) {
    for (npy_intp j = 0; j < k; ++j) {
        npy_intp best = -1;
        for (npy_intp e = 0; e < n; ++e)
            if (is_left[e] && (best < 0 || preferences[e] > preferences[best])) best = e;
        chosen[j] = npy_int32(best);
        is_left[best] = 0;
    }
}

template <typename T>
void put_scores(const T* logits, npy_intp n, bool is_softmax, T* scores) {
    if (!is_softmax) {
        for (npy_intp e = 0; e < n; ++e) {
            const T small = std::exp(-std::abs(logits[e]));
            scores[e] = (logits[e] > 0 ? T(1) : small) / (1 + small);
        }
        return;
    }
    const T high = *std::max_element(logits, logits + n);
    T total = 0;
    for (npy_intp e = 0; e < n; ++e) total += scores[e] = std::exp(logits[e] - high);
    for (npy_intp e = 0; e < n; ++e) scores[e] /= total;
}

template <typename T>
void drop_groups(T* preferences, npy_intp n, const Settings& s) {
    const npy_intp size = n / s.n_groups;
    std::vector<T> group_scores(s.n_groups);
    std::vector<npy_int32> chosen(std::max(s.n_kept, npy_intp(2)));
    for (npy_intp group = 0; group < s.n_groups; ++group) {
        std::vector<char> is_left(size, 1);
        const npy_intp n_best = std::min(size, npy_intp(2));
        put_best(preferences + group * size, size, n_best, is_left, chosen.data());
        for (npy_intp j = 0; j < n_best; ++j)
            group_scores[group] += preferences[group * size + chosen[j]];
    }
    std::vector<char> is_dropped(s.n_groups, 1);
    put_best(group_scores.data(), s.n_groups, s.n_kept, is_dropped, chosen.data());
    for (npy_intp e = 0; e < n; ++e)
        if (is_dropped[e / size]) preferences[e] = -std::numeric_limits<T>::infinity();
}

// Returns what the scores chosen are divided by.
template <typename T>
T divisor(const T* scores, const npy_int32* chosen, npy_intp k, const Settings& s) {
    T total = 0;
    for (npy_intp j = 0; j < k; ++j) total += scores[chosen[j]];
    return s.renormalize && total != 0 ? total : T(1);
}

template <typename T>
bool route(PyArrayObject* Logits, PyArrayObject* Bias, PyArrayObject* Valid, PyArrayObject*& Ids,
           PyArrayObject*& Weights, PyArrayObject*& Load, PyArrayObject** NextBias,
           const Settings& s) {
    const Rows<T> logits(Logits), bias(Bias);
    const Rows<npy_bool> valid(Valid);
    const npy_intp n_experts = logits.width;
    if (!logits.array || (Bias && !bias.array) || (Valid && !valid.array)) return false;
    if (Bias && bias.width != n_experts)
        return fail("A router got a bias whose length is not the number of experts.");
    if (Valid && !(PyArray_NDIM(Valid) == PyArray_NDIM(Logits) - 1 &&
                   std::equal(PyArray_DIMS(Valid), PyArray_DIMS(Valid) + PyArray_NDIM(Valid),
                              PyArray_DIMS(Logits))))
        return fail("A router got valid tokens whose shape is not that of the tokens.");
    if (!allocate_like(Ids, Logits, s.top_k, NPY_INT32) ||
        !allocate_like(Weights, Logits, s.top_k, PyArray_TYPE(Logits)) ||
        !allocate(Load, 1, &n_experts, NPY_INT32) ||
        (NextBias && !allocate(*NextBias, 1, &n_experts, PyArray_TYPE(Bias))))
        return false;
    npy_int32* const load = (npy_int32*)PyArray_DATA(Load);
    std::fill_n(load, n_experts, 0);
    std::vector<T> scores(n_experts), preferences(n_experts);
    std::vector<char> is_left(n_experts);
    for (npy_intp row = 0; row < logits.n; ++row) {
        npy_int32* const ids = (npy_int32*)PyArray_DATA(Ids) + row * s.top_k;
        T* const weights = (T*)PyArray_DATA(Weights) + row * s.top_k;
        put_scores(logits.row(row), n_experts, s.is_softmax, scores.data());
        for (npy_intp e = 0; e < n_experts; ++e) {
            const T preference = Bias ? scores[e] + *(bias.row(0) + e) : scores[e];
            preferences[e] =
                std::isnan(preference) ? -std::numeric_limits<T>::infinity() : preference;
        }
        if (s.n_kept < s.n_groups) drop_groups(preferences.data(), n_experts, s);
        std::fill(is_left.begin(), is_left.end(), 1);
        put_best(preferences.data(), n_experts, s.top_k, is_left, ids);
        const T total = divisor(scores.data(), ids, s.top_k, s);
        const bool counts = !Valid || ((const npy_bool*)PyArray_DATA(valid.array))[row];
        for (npy_intp j = 0; j < s.top_k; ++j) {
            weights[j] = scores[ids[j]] / total * T(s.factor);
            load[ids[j]] += counts;
        }
    }
    npy_int64 total = 0;
    for (npy_intp e = 0; e < n_experts; ++e) total += load[e];
    for (npy_intp e = 0; NextBias && e < n_experts; ++e) {
        const npy_int64 lack = total - npy_int64(load[e]) * n_experts;
        ((T*)PyArray_DATA(*NextBias))[e] = bias.row(0)[e] + T(s.step) * ((lack > 0) - (lack < 0));
    }
    return true;
}

template <typename T>
bool route_pullback(PyArrayObject* Logits, PyArrayObject* Ids, PyArrayObject* G,
                    PyArrayObject*& DLogits, const Settings& s) {
    const Rows<T> logits(Logits), g(G);
    const Rows<npy_int32> ids(Ids);
    const npy_intp n_experts = logits.width, k = ids.width;
    if (!logits.array || !g.array || !ids.array ||
        !allocate_like(DLogits, Logits, n_experts, PyArray_TYPE(Logits)))
        return false;
    if (!same_tokens(Logits, Ids) || !PyArray_SAMESHAPE(Ids, G))
        return fail("A router got a gradient whose shape differs from its weights'.");
    std::vector<T> scores(n_experts);
    for (npy_intp row = 0; row < logits.n; ++row) {
        T* const dlogits = (T*)PyArray_DATA(DLogits) + row * n_experts;
        std::fill_n(dlogits, n_experts, T(0));
        const npy_int32* const chosen = ids.row(row);
        for (npy_intp j = 0; j < k; ++j)
            if (chosen[j] < 0 || chosen[j] >= n_experts)
                return fail("A router got the id of an expert that there is not.");
        put_scores(logits.row(row), n_experts, s.is_softmax, scores.data());
        const T total = divisor(scores.data(), chosen, k, s);
        T mean = 0, shift = 0;
        for (npy_intp j = 0; s.renormalize && j < k; ++j)
            mean += scores[chosen[j]] / total * g.row(row)[j];
        for (npy_intp j = 0; j < k; ++j) {
            const T score = scores[chosen[j]];
            const T dscore = (g.row(row)[j] - mean) / total * T(s.factor);
            shift += dscore * score;
            dlogits[chosen[j]] += dscore * score * (s.is_softmax ? T(1) : 1 - score);
        }
        for (npy_intp e = 0; s.is_softmax && e < n_experts; ++e) dlogits[e] -= scores[e] * shift;
    }
    return true;
}

// What the experts read, with the slots (token * top_k + rank) sorted by expert.
template <typename T>
struct Experts {
    Rows<T> x, weights, gate, up, down;
    Rows<npy_int32> ids;
    npy_intp n_experts, width, hidden, out_width, k;
    std::vector<npy_intp> order, starts;

    Experts(PyArrayObject* X, PyArrayObject* Ids, PyArrayObject* Weights, PyArrayObject* Gate,
            PyArrayObject* Up, PyArrayObject* Down)
        : x(X), weights(Weights), gate(Gate), up(Up), down(Down), ids(Ids),
          n_experts(PyArray_DIM(Gate, 0)), width(PyArray_DIM(Gate, 1)),
          hidden(PyArray_DIM(Gate, 2)), out_width(PyArray_DIM(Down, 2)), k(ids.width) {}

    bool prepare(PyArrayObject* X, PyArrayObject* Ids, PyArrayObject* Weights,
                 PyArrayObject* Gate, PyArrayObject* Up, PyArrayObject* Down) {
        if (!x.array || !weights.array || !gate.array || !up.array || !down.array || !ids.array ||
            !can_multiply<T>())
            return false;
        if (x.width != width) return fail("Experts got tokens of another width than theirs.");
        if (!same_tokens(X, Ids) || !PyArray_SAMESHAPE(Ids, Weights))
            return fail("Experts got ids and weights whose shapes do not match the tokens'.");
        if (!PyArray_SAMESHAPE(Gate, Up) || PyArray_DIM(Down, 0) != n_experts ||
            PyArray_DIM(Down, 1) != hidden)
            return fail("Experts got gate, up and down weights whose shapes do not match.");
        const npy_intp n_slots = ids.n * k;
        const npy_int32* const experts = ids.row(0);
        starts.assign(n_experts + 1, 0);
        for (npy_intp slot = 0; slot < n_slots; ++slot) {
            if (experts[slot] < 0 || experts[slot] >= n_experts)
                return fail("Experts got the id of an expert that there is not.");
            ++starts[experts[slot] + 1];
        }
        for (npy_intp e = 0; e < n_experts; ++e) starts[e + 1] += starts[e];
        std::vector<npy_intp> ends(starts);
        order.resize(n_slots);
        for (npy_intp slot = 0; slot < n_slots; ++slot) order[ends[experts[slot]]++] = slot;
        return true;
    }

    const T* matrix(const Rows<T>& stack, npy_intp e, npy_intp n) const {
        return (const T*)PyArray_DATA(stack.array) + e * n;
    }
    T weight(npy_intp slot) const { return ((const T*)PyArray_DATA(weights.array))[slot]; }

    void gather(const Rows<T>& source, npy_intp start, npy_intp n, std::vector<T>& rows) const {
        for (npy_intp r = 0; r < n; ++r)
            std::copy_n(source.row(order[start + r] / k), source.width,
                        rows.data() + r * source.width);
    }
};

template <typename T>
bool run_experts(PyArrayObject* X, PyArrayObject* Ids, PyArrayObject* Weights,
                 PyArrayObject* Gate, PyArrayObject* Up, PyArrayObject* Down, PyArrayObject*& Y) {
    Experts<T> s(X, Ids, Weights, Gate, Up, Down);
    if (!s.prepare(X, Ids, Weights, Gate, Up, Down) ||
        !allocate_like(Y, X, s.out_width, PyArray_TYPE(Weights)))
        return false;
    T* const y = (T*)PyArray_DATA(Y);
    std::fill_n(y, PyArray_SIZE(Y), T(0));
    const npy_intp d = s.width, h = s.hidden, d_out = s.out_width;
    std::vector<T> tokens(BLOCK * d), inner(BLOCK * h), value(BLOCK * h), outputs(BLOCK * d_out);
    for (npy_intp e = 0; e < s.n_experts; ++e)
        for (npy_intp start = s.starts[e]; start < s.starts[e + 1]; start += BLOCK) {
            const npy_intp n = std::min(BLOCK, s.starts[e + 1] - start);
            s.gather(s.x, start, n, tokens);
            multiply<T>(n, h, d, {tokens.data(), d, false}, {s.matrix(s.gate, e, d * h), h, false},
                        T(0), inner.data(), h);
            multiply<T>(n, h, d, {tokens.data(), d, false}, {s.matrix(s.up, e, d * h), h, false},
                        T(0), value.data(), h);
            for (npy_intp i = 0; i < n * h; ++i) inner[i] *= sigmoid(inner[i]) * value[i];
            multiply<T>(n, d_out, h, {inner.data(), h, false},
                        {s.matrix(s.down, e, h * d_out), d_out, false},
                        T(0), outputs.data(), d_out);
            for (npy_intp r = 0; r < n; ++r) {
                const npy_intp slot = s.order[start + r];
                const T weight = s.weight(slot);
                T* __restrict__ out = y + slot / s.k * d_out;
                for (npy_intp j = 0; j < d_out; ++j) out[j] += weight * outputs[r * d_out + j];
            }
        }
    return true;
}

template <typename T>
bool run_experts_pullback(PyArrayObject* X, PyArrayObject* Ids, PyArrayObject* Weights,
                          PyArrayObject* Gate, PyArrayObject* Up, PyArrayObject* Down,
                          PyArrayObject* G, PyArrayObject*& DX, PyArrayObject*& DWeights,
                          PyArrayObject*& DGate, PyArrayObject*& DUp, PyArrayObject*& DDown) {
    Experts<T> s(X, Ids, Weights, Gate, Up, Down);
    const Rows<T> g(G);
    const int kind = PyArray_TYPE(Weights);
    if (!g.array || !s.prepare(X, Ids, Weights, Gate, Up, Down)) return false;
    if (!same_tokens(X, G) || g.width != s.out_width)
        return fail("Experts got a gradient whose shape differs from their output's.");
    if (!allocate_like(DX, X, s.width, kind) || !allocate_like(DWeights, Weights, s.k, kind) ||
        !allocate_like(DGate, Gate, s.hidden, kind) || !allocate_like(DUp, Up, s.hidden, kind) ||
        !allocate_like(DDown, Down, s.out_width, kind))
        return false;
    T* const dx = (T*)PyArray_DATA(DX);
    T* const dweights = (T*)PyArray_DATA(DWeights);
    const npy_intp d = s.width, h = s.hidden, d_out = s.out_width;
    std::fill_n(dx, PyArray_SIZE(DX), T(0));
    std::vector<T> tokens(BLOCK * d), dtokens(BLOCK * d), dy(BLOCK * d_out);
    std::vector<T> inner(BLOCK * h), value(BLOCK * h), hidden(BLOCK * h), dhidden(BLOCK * h);
    for (npy_intp e = 0; e < s.n_experts; ++e) {
        const T *gate = s.matrix(s.gate, e, d * h), *up = s.matrix(s.up, e, d * h);
        const T* down = s.matrix(s.down, e, h * d_out);
        T* const dgate = (T*)PyArray_DATA(DGate) + e * d * h;
        T* const dup = (T*)PyArray_DATA(DUp) + e * d * h;
        T* const ddown = (T*)PyArray_DATA(DDown) + e * h * d_out;
        if (s.starts[e] == s.starts[e + 1]) {
            std::fill_n(dgate, d * h, T(0));
            std::fill_n(dup, d * h, T(0));
            std::fill_n(ddown, h * d_out, T(0));
        }
        for (npy_intp start = s.starts[e]; start < s.starts[e + 1]; start += BLOCK) {
            const npy_intp n = std::min(BLOCK, s.starts[e + 1] - start);
            const T beta = start > s.starts[e];
            s.gather(s.x, start, n, tokens);
            s.gather(g, start, n, dy);
            multiply<T>(n, h, d, {tokens.data(), d, false}, {gate, h, false},
                        T(0), inner.data(), h);
            multiply<T>(n, h, d, {tokens.data(), d, false}, {up, h, false},
                        T(0), value.data(), h);
            multiply<T>(n, h, d_out, {dy.data(), d_out, false}, {down, d_out, true},
                        T(0), dhidden.data(), h);
            for (npy_intp r = 0; r < n; ++r) {
                const npy_intp slot = s.order[start + r];
                const T weight = s.weight(slot);
                for (npy_intp i = r * h; i < (r + 1) * h; ++i) {
                    const T share = sigmoid(inner[i]), silu = inner[i] * share;
                    const T by_hidden = dhidden[i] * weight;
                    hidden[i] = silu * value[i];
                    inner[i] = by_hidden * value[i] * (share + silu * (1 - share));
                    value[i] = by_hidden * silu;
                }
                dweights[slot] = sum_of_products(dhidden.data() + r * h, hidden.data() + r * h, h);
                for (npy_intp j = 0; j < d_out; ++j) dy[r * d_out + j] *= weight;
            }
            multiply<T>(h, d_out, n, {hidden.data(), h, true}, {dy.data(), d_out, false},
                        beta, ddown, d_out);
            multiply<T>(d, h, n, {tokens.data(), d, true}, {inner.data(), h, false},
                        beta, dgate, h);
            multiply<T>(d, h, n, {tokens.data(), d, true}, {value.data(), h, false}, beta, dup, h);
            multiply<T>(n, d, h, {inner.data(), h, false}, {gate, h, true},
                        T(0), dtokens.data(), d);
            multiply<T>(n, d, h, {value.data(), h, false}, {up, h, true}, T(1), dtokens.data(), d);
            for (npy_intp r = 0; r < n; ++r) {
                T* __restrict__ out = dx + s.order[start + r] / s.k * d;
                for (npy_intp j = 0; j < d; ++j) out[j] += dtokens[r * d + j];
            }
        }
    }
    return true;
}

}
"""
)

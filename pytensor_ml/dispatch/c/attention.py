"""C kernels of attention."""

from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.utils import hash_from_code

from pytensor_ml.dispatch.c.basic import PRODUCTS, CKernel, c_funcify
from pytensor_ml.layers.attention import AttentionLayer, AttentionPullback, CachedAttentionLayer

Attention = AttentionLayer | AttentionPullback | CachedAttentionLayer


@c_funcify.register(AttentionLayer)
def c_funcify_attention(op: AttentionLayer, node: Apply) -> list[Variable] | None:
    return _run_kernel(op, floats=node.inputs[:3], others=node.inputs[3:])


@c_funcify.register(AttentionPullback)
def c_funcify_attention_pullback(op: AttentionPullback, node: Apply) -> list[Variable] | None:
    return _run_kernel(op, floats=node.inputs[:4], others=node.inputs[4:])


@c_funcify.register(CachedAttentionLayer)
def c_funcify_cached_attention(op: CachedAttentionLayer, node: Apply) -> list[Variable] | None:
    length, start = (pt.cast(x, "int64") for x in node.inputs[5:])
    return _run_kernel(op, floats=node.inputs[:5], others=[length, start])


def _run_kernel(op: Attention, floats: list[Any], others: list[Any]) -> list[Variable] | None:
    """Apply the kernel of ``op``, or return None if it does not cover inputs of these types."""
    masks = [] if isinstance(op, CachedAttentionLayer) else others
    dtypes = {x.type.dtype for x in floats}
    batches = {x.type.shape[0] for x in floats if x.type.ndim} - {None}
    if (
        any(x.type.ndim != 4 for x in (*floats, *masks))
        or any(x.type.dtype not in ("bool", "float32", "float64") for x in masks)
        or dtypes not in ({"float32"}, {"float64"})
        or len(batches) > 1
    ):
        return None
    return AttentionKernel(op).make_node(*floats, *others).outputs


class AttentionKernel(CKernel):
    """Attention over float32 or float64, its pullback, or attention to a cache."""

    layer_op: Attention

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (hash_from_code(SUPPORT_CODE),)

    def c_support_code(self, **kwargs: Any) -> str:
        return SUPPORT_CODE

    def c_code(self, node: Apply, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        op, mask_dtype, is_causal = self.layer_op, "bool", True
        arguments = [*inputs, *outputs]
        if isinstance(op, CachedAttentionLayer):
            function = "cached"
        else:
            function = "attention" if isinstance(op, AttentionLayer) else "pullback"
            is_causal = op.is_causal
            n_floats = 3 if function == "attention" else 4
            if len(inputs) == n_floats:
                arguments.insert(n_floats, "NULL")
            else:
                mask_dtype = node.inputs[n_floats].type.dtype
            if function == "pullback":
                arguments[n_floats + 4 :] = [f"&{outputs[3]}" if len(outputs) > 3 else "NULL"]
        window = "std::numeric_limits<npy_intp>::max() / 4" if op.window is None else op.window
        settings = f"{str(is_causal).lower()}, {window}, {op.scale!r}, {op.softcap or 0.0!r}"
        return f"""
        if (!pytensor_ml_attention::{function}<npy_{node.inputs[0].type.dtype}, npy_{mask_dtype}>(
                {", ".join(arguments)}, {{{settings}}})) {{ {sub["fail"]} }}
        """


SUPPORT_CODE = (
    PRODUCTS
    + r"""
namespace pytensor_ml_attention {

using namespace pytensor_ml_products;

// As on Numba: rows of scores that are held at a time.
const npy_intp BLOCK = 128;

struct Settings {
    bool is_causal;
    npy_intp window;
    double scale, softcap;
};

// An array with four axes, any strides, and an item for every index along axes of length 1.
template <typename T>
struct Array4 {
    char* data;
    npy_intp shape[4], strides[4];

    explicit Array4(PyArrayObject* array) {
        data = array ? (char*)PyArray_DATA(array) : NULL;
        for (int axis = 0; array && axis < 4; ++axis) {
            shape[axis] = PyArray_DIM(array, axis);
            strides[axis] = shape[axis] == 1 ? 0 : PyArray_STRIDE(array, axis);
        }
    }

    T* row(npy_intp b, npy_intp h, npy_intp i) const {
        return (T*)(data + b * strides[0] + h * strides[1] + i * strides[2]);
    }

    T& at(npy_intp b, npy_intp h, npy_intp i, npy_intp j) const {
        return *(T*)((char*)row(b, h, i) + j * strides[3]);
    }

    // Rows of one head. They are copied if their items are not side by side, or to put 0 in the
    // place of those that no query sees.
    Matrix<T> head(npy_intp b, npy_intp h, npy_intp stop, const std::vector<char>& seen,
                   std::vector<T>& scratch) const {
        const npy_intp width = shape[3], item = sizeof(T);
        const npy_intp stride = stop < 2 ? width : strides[2] / item;
        if ((width == 1 || strides[3] == item) && stride >= width &&
            (stop < 2 || strides[2] % item == 0) &&
            std::find(seen.begin(), seen.end(), 0) == seen.end())
            return {row(b, h, 0), stride, false};
        scratch.assign(stop * width, T(0));
        for (npy_intp j = 0; j < stop; ++j)
            for (npy_intp d = 0; d < width && (seen.empty() || seen[j]); ++d)
                scratch[j * width + d] = at(b, h, j, d);
        return {scratch.data(), width, false};
    }
};

inline bool is_visible(npy_bool mask) { return mask; }
inline bool is_visible(double mask) { return mask > -std::numeric_limits<double>::infinity(); }
template <typename T> T masked(T score, npy_bool) { return score; }
template <typename T, typename M> T masked(T score, M mask) { return score + T(mask); }

// The rows of the heads that share keys and values, of some queries of one batch row.
struct Block {
    npy_intp b, first_head, group, first_query, n_queries, position;

    static npy_intp most_queries(npy_intp group) { return std::max(BLOCK / group, npy_intp(1)); }

    npy_intp n_rows() const { return group * n_queries; }
    npy_intp head(npy_intp r) const { return first_head + r / n_queries; }
    npy_intp query(npy_intp r) const { return first_query + r % n_queries; }
    // The position of the key that belongs to a row's query.
    npy_intp own(npy_intp r) const { return position + r % n_queries; }

    // The first and one past the last key that some row sees.
    npy_intp low(const Settings& s, npy_intp stop) const {
        return std::min(std::max(position + 1 - s.window, npy_intp(0)), stop);
    }
    npy_intp stop(const Settings& s, npy_intp n_keys) const {
        return s.is_causal ? std::max(std::min(position + n_queries, n_keys), npy_intp(0)) : n_keys;
    }

    template <typename T>
    void gather(const Array4<T>& x, T factor, std::vector<T>& rows) const {
        const npy_intp width = x.shape[3];
        rows.resize(n_rows() * width);
        for (npy_intp r = 0; r < n_rows(); ++r)
            for (npy_intp d = 0; d < width; ++d)
                rows[r * width + d] = x.at(b, head(r), query(r), d) * factor;
    }

    template <typename T>
    void scatter(const std::vector<T>& rows, const std::vector<T>& factor,
                 const Array4<T>& y) const {
        const npy_intp width = y.shape[3];
        for (npy_intp r = 0; r < n_rows(); ++r)
            for (npy_intp d = 0; d < width; ++d)
                y.at(b, head(r), query(r), d) = factor[r] ? rows[r * width + d] * factor[r] : T(0);
    }
};

template <typename T>
void cap(std::vector<T>& scores, T bound) {
    for (T& score : scores) score = bound * std::tanh(score / bound);
}

template <typename T, typename M>
void add_mask(const Block& block, const Array4<M>& mask, npy_intp low, npy_intp n,
              std::vector<T>& scores) {
    for (npy_intp r = 0; r < block.n_rows(); ++r)
        for (npy_intp j = 0; j < n; ++j) {
            const M x = mask.at(block.b, block.head(r), block.query(r), low + j);
            T& score = scores[r * n + j];
            score = is_visible(x) ? masked(score, x) : -std::numeric_limits<T>::infinity();
        }
}

// Replace scores of the n keys from `low` on by weights, and set `factor` to what normalizes them.
template <typename T>
void softmax(const Block& block, const Settings& s, npy_intp low, npy_intp n,
             std::vector<T>& scores, std::vector<T>& factor) {
    factor.resize(block.n_rows());
    for (npy_intp r = 0; r < block.n_rows(); ++r) {
        T* row = scores.data() + r * n;
        const npy_intp own = block.own(r) - low;
        const npy_intp first = std::min(std::max(own + 1 - s.window, npy_intp(0)), n);
        const npy_intp last = s.is_causal ? std::min(std::max(own + 1, first), n) : n;
        std::fill(row, row + first, T(0));
        std::fill(row + last, row + n, T(0));
        const T high = maximum(row + first, last - first);
        const T shift = std::isfinite(high) ? high : T(0);
        for (npy_intp j = first; j < last; ++j) row[j] = exponential(row[j] - shift);
        const T total = sum(row + first, last - first);
        factor[r] = total == 0 ? T(0) : 1 / total;
    }
}

template <typename T>
bool shapes_match(const Array4<T>& q, const Array4<T>& k, const Array4<T>& v) {
    return (q.shape[0] == k.shape[0] && k.shape[1] && q.shape[1] % k.shape[1] == 0 &&
            q.shape[3] == k.shape[3] && std::equal(k.shape, k.shape + 3, v.shape)) ||
           fail("Attention got queries, keys and values whose shapes do not match.");
}

template <typename T, typename M>
bool mask_matches(const Array4<M>& mask, const Array4<T>& q, const Array4<T>& k) {
    const npy_intp full[4] = {q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
    for (int axis = 0; mask.data && axis < 4; ++axis)
        if (mask.shape[axis] != 1 && mask.shape[axis] != full[axis])
            return fail("Attention got a mask whose shape does not match that of the scores.");
    return true;
}

template <typename T>
bool allocate(PyArrayObject*& out, const Array4<T>& like, npy_intp width) {
    npy_intp shape[4] = {like.shape[0], like.shape[1], like.shape[2], width};
    if (out && PyArray_IS_C_CONTIGUOUS(out) && std::equal(shape, shape + 4, PyArray_DIMS(out)))
        return true;
    Py_XDECREF(out);
    const int kind = sizeof(T) == 4 ? NPY_FLOAT32 : NPY_FLOAT64;
    out = (PyArrayObject*)PyArray_EMPTY(4, shape, kind, 0);
    return out != NULL;
}

// How many bytes could be read and written in the time of attention.
template <typename T>
npy_intp cost(const Array4<T>& q, const Array4<T>& k) {
    return q.shape[0] * q.shape[1] * q.shape[2] * q.shape[3] * k.shape[2];
}

// Which keys some query of a batch row sees; nothing without a mask.
template <typename M>
std::vector<char> seen_keys(const Array4<M>& mask, npy_intp b, npy_intp n_queries, npy_intp n_keys,
                            const Settings& s) {
    std::vector<char> seen(mask.data ? n_keys : 0, 0);
    for (npy_intp h = 0; mask.data && h < mask.shape[1]; ++h)
        for (npy_intp i = 0; i < n_queries; ++i) {
            const Block query = {b, h, 1, i, 1, n_keys - n_queries + i};
            const npy_intp stop = query.stop(s, n_keys);
            for (npy_intp j = query.low(s, stop); j < stop; ++j)
                seen[j] |= is_visible(mask.at(b, h, i, j));
        }
    return seen;
}

template <typename T, typename M>
bool attention(PyArrayObject* Q, PyArrayObject* K, PyArrayObject* V, PyArrayObject* Mask,
               PyArrayObject*& Y, const Settings& s) {
    const Array4<T> q(Q), k(K), v(V);
    const Array4<M> mask(Mask);
    if (!can_multiply<T>() || !shapes_match(q, k, v) || !mask_matches(mask, q, k) ||
        !allocate(Y, q, v.shape[3]))
        return false;
    const Array4<T> y(Y);
    const npy_intp group = q.shape[1] / k.shape[1];
    const npy_intp per_block = Block::most_queries(group);
    const npy_intp n_queries = q.shape[2], n_keys = k.shape[2], d = k.shape[3], dv = v.shape[3];
    const npy_intp n_blocks = (n_queries + per_block - 1) / per_block;
    const npy_intp n_items = k.shape[0] * k.shape[1] * n_blocks;
    const npy_intp n_parts = count_parts(n_items, cost(q, k));
    return in_threads(n_items, n_parts, [&](npy_intp first, npy_intp last) {
        std::vector<T> key_scratch, value_scratch, rows, scores, factor, mixed;
        std::vector<char> seen;
        Matrix<T> keys, values;
        for (npy_intp item = first; item < last; ++item) {
            const npy_intp b = item / n_blocks / k.shape[1], h = item / n_blocks % k.shape[1];
            const npy_intp i = item % n_blocks * per_block;
            if (item == first || (h == 0 && i == 0))
                seen = seen_keys(mask, b, n_queries, n_keys, s);
            if (item == first || i == 0) {
                keys = k.head(b, h, n_keys, seen, key_scratch);
                values = v.head(b, h, n_keys, seen, value_scratch);
            }
            const Block block = {b, h * group, group, i, std::min(per_block, n_queries - i),
                                 n_keys - n_queries + i};
            const npy_intp m = block.n_rows(), stop = block.stop(s, n_keys);
            const npy_intp low = block.low(s, stop), n = stop - low;
            block.gather(q, T(s.scale), rows);
            scores.resize(m * n);
            multiply<T>(m, n, d, {rows.data(), d, false}, keys.from(low).transpose(),
                        T(0), scores.data(), n);
            if (s.softcap) cap(scores, T(s.softcap));
            if (mask.data) add_mask(block, mask, low, n, scores);
            softmax(block, s, low, n, scores, factor);
            mixed.resize(m * dv);
            multiply<T>(m, dv, n, {scores.data(), n, false}, values.from(low),
                        T(0), mixed.data(), dv);
            block.scatter(mixed, factor, y);
        }
    });
}

template <typename T, typename M>
bool cached(PyArrayObject* Q, PyArrayObject* K, PyArrayObject* V, PyArrayObject* Keys,
            PyArrayObject* Values, PyArrayObject* Length, PyArrayObject* Start, PyArrayObject*& Y,
            const Settings& s) {
    const Array4<T> q(Q), k(K), v(V), cached_keys(Keys), cached_values(Values);
    if (!can_multiply<T>() || !shapes_match(q, k, v) || !allocate(Y, q, v.shape[3])) return false;
    const Array4<T> y(Y);
    const npy_intp n_old = *(npy_int64*)PyArray_DATA(Length), n_new = q.shape[2];
    if (n_old < 0 || n_old > cached_keys.shape[2])
        return fail("The length of an attention cache is beyond its capacity.");
    if (PyArray_DIM(Start, 0) != q.shape[0] || cached_keys.shape[0] != q.shape[0] ||
        cached_keys.shape[1] != k.shape[1] || cached_keys.shape[3] != k.shape[3] ||
        !std::equal(cached_keys.shape, cached_keys.shape + 3, cached_values.shape) ||
        cached_values.shape[3] != v.shape[3] || k.shape[2] != n_new)
        return fail("Attention got a cache whose shape does not match the new keys and values.");
    const npy_intp group = q.shape[1] / k.shape[1];
    const npy_intp per_block = Block::most_queries(group);
    const npy_intp d = k.shape[3], dv = v.shape[3];
    const npy_intp n_blocks = (n_new + per_block - 1) / per_block;
    const npy_intp n_items = k.shape[0] * k.shape[1] * n_blocks;
    const npy_intp n_bytes = q.shape[0] * q.shape[1] * n_new * d * (n_old + n_new);
    return in_threads(n_items, count_parts(n_items, n_bytes), [&](npy_intp first, npy_intp last) {
        std::vector<T> scratch[4], rows, scores, factor, mixed;
        Matrix<T> old_keys, old_values, new_keys, new_values;
        for (npy_intp item = first; item < last; ++item) {
            const npy_intp b = item / n_blocks / k.shape[1], h = item / n_blocks % k.shape[1];
            const npy_intp i = item % n_blocks * per_block;
            if (item == first || i == 0) {
                old_keys = cached_keys.head(b, h, n_old, {}, scratch[0]);
                old_values = cached_values.head(b, h, n_old, {}, scratch[1]);
                new_keys = k.head(b, h, n_new, {}, scratch[2]);
                new_values = v.head(b, h, n_new, {}, scratch[3]);
            }
            const npy_intp start = *(npy_int64*)PyArray_GETPTR1(Start, b);
            const Block block = {b, h * group, group, i, std::min(per_block, n_new - i), n_old + i};
            const npy_intp m = block.n_rows(), stop = n_old + i + block.n_queries;
            const npy_intp low = std::min(std::max(block.low(s, stop), start), stop);
            const npy_intp low_old = std::min(low, n_old), n_seen_old = n_old - low_old;
            const npy_intp low_new = std::max(low - n_old, npy_intp(0)), n = stop - low;
            const npy_intp n_seen_new = n - n_seen_old;
            block.gather(q, T(s.scale), rows);
            scores.resize(m * n);
            multiply<T>(m, n_seen_old, d, {rows.data(), d, false},
                        old_keys.from(low_old).transpose(), T(0), scores.data(), n);
            multiply<T>(m, n_seen_new, d, {rows.data(), d, false},
                        new_keys.from(low_new).transpose(), T(0), scores.data() + n_seen_old, n);
            if (s.softcap) cap(scores, T(s.softcap));
            softmax(block, s, low, n, scores, factor);
            mixed.resize(m * dv);
            multiply<T>(m, dv, n_seen_old, {scores.data(), n, false}, old_values.from(low_old),
                        T(0), mixed.data(), dv);
            multiply<T>(m, dv, n_seen_new, {scores.data() + n_seen_old, n, false},
                        new_values.from(low_new), T(1), mixed.data(), dv);
            block.scatter(mixed, factor, y);
        }
    });
}

template <typename T, typename M>
bool pullback(PyArrayObject* Q, PyArrayObject* K, PyArrayObject* V, PyArrayObject* G,
              PyArrayObject* Mask, PyArrayObject*& DQ, PyArrayObject*& DK, PyArrayObject*& DV,
              PyArrayObject** DMask, const Settings& s) {
    const Array4<T> q(Q), k(K), v(V), g(G);
    const Array4<M> mask(Mask);
    if (!can_multiply<T>() || !shapes_match(q, k, v) || !mask_matches(mask, q, k)) return false;
    if (!std::equal(q.shape, q.shape + 3, g.shape) || g.shape[3] != v.shape[3])
        return fail("Attention got a gradient whose shape differs from its output's.");
    if (!allocate(DQ, q, q.shape[3]) || !allocate(DK, k, k.shape[3]) ||
        !allocate(DV, v, v.shape[3]) || (DMask && !allocate(*DMask, mask, mask.shape[3])))
        return false;
    const Array4<T> dq(DQ);
    T* const dk = (T*)PyArray_DATA(DK);
    T* const dv = (T*)PyArray_DATA(DV);
    // Broadcast entries are long sums.
    std::vector<double> dmask(DMask ? PyArray_SIZE(*DMask) : 0);
    const npy_intp group = q.shape[1] / k.shape[1];
    const npy_intp per_block = Block::most_queries(group);
    const npy_intp n_queries = q.shape[2], n_keys = k.shape[2], d = k.shape[3], d_v = v.shape[3];
    const npy_intp n_items = k.shape[0] * k.shape[1];
    // Heads may share a mask, whose gradient is then a sum over them.
    const npy_intp n_parts = DMask ? 1 : count_parts(n_items, 2 * cost(q, k));
    const auto work = [&](npy_intp first, npy_intp last) {
        std::vector<T> key_scratch, value_scratch, rows, dy, weights, capped, dscores, factor;
        std::vector<T> drows;
        std::vector<char> seen;
        for (npy_intp item = first; item < last; ++item) {
            const npy_intp b = item / k.shape[1], h = item % k.shape[1];
            if (item == first || h == 0) seen = seen_keys(mask, b, n_queries, n_keys, s);
            const Matrix<T> keys = k.head(b, h, n_keys, seen, key_scratch);
            const Matrix<T> values = v.head(b, h, n_keys, seen, value_scratch);
            T* const dkeys = dk + item * n_keys * d;
            T* const dvalues = dv + item * n_keys * d_v;
            std::fill_n(dkeys, n_keys * d, T(0));
            std::fill_n(dvalues, n_keys * d_v, T(0));
            for (npy_intp i = 0; i < n_queries; i += per_block) {
                const Block block = {b, h * group, group, i, std::min(per_block, n_queries - i),
                                     n_keys - n_queries + i};
                const npy_intp m = block.n_rows(), stop = block.stop(s, n_keys);
                const npy_intp low = block.low(s, stop), n = stop - low;
                block.gather(q, T(s.scale), rows);
                block.gather(g, T(1), dy);
                weights.resize(m * n);
                dscores.resize(m * n);
                multiply<T>(m, n, d, {rows.data(), d, false}, keys.from(low).transpose(),
                            T(0), weights.data(), n);
                if (s.softcap) {
                    cap(weights, T(s.softcap));
                    capped = weights;
                }
                if (mask.data) add_mask(block, mask, low, n, weights);
                softmax(block, s, low, n, weights, factor);
                multiply<T>(m, n, d_v, {dy.data(), d_v, false}, values.from(low).transpose(),
                            T(0), dscores.data(), n);
                for (npy_intp r = 0; r < m; ++r) {
                    T* const weight = weights.data() + r * n;
                    T* const dscore = dscores.data() + r * n;
                    // A hidden weight is 0, but its gradient and the factor may be NaN.
                    for (npy_intp j = 0; j < n; ++j) {
                        dscore[j] = weight[j] == 0 ? T(0) : dscore[j];
                        weight[j] = weight[j] == 0 ? T(0) : weight[j] * factor[r];
                    }
                    const T mean = sum_of_products(weight, dscore, n);
                    for (npy_intp j = 0; j < n; ++j)
                        dscore[j] = weight[j] == 0 ? T(0) : weight[j] * (dscore[j] - mean);
                    for (npy_intp j = 0; DMask && j < n; ++j)
                        dmask[(((mask.strides[0] ? b : 0) * mask.shape[1] +
                                (mask.strides[1] ? block.head(r) : 0)) * mask.shape[2] +
                               (mask.strides[2] ? block.query(r) : 0)) * mask.shape[3] +
                              (mask.strides[3] ? low + j : 0)] += dscore[j];
                    for (npy_intp j = 0; s.softcap && j < n; ++j) {
                        const T ratio = capped[r * n + j] / T(s.softcap);
                        dscore[j] = weight[j] == 0 ? T(0) : dscore[j] * (1 - ratio * ratio);
                    }
                }
                drows.resize(m * d);
                multiply<T>(m, d, n, {dscores.data(), n, false}, keys.from(low),
                            T(0), drows.data(), d);
                std::fill(factor.begin(), factor.end(), T(s.scale));
                block.scatter(drows, factor, dq);
                multiply<T>(n, d, m, {dscores.data(), n, true}, {rows.data(), d, false},
                            T(1), dkeys + low * d, d);
                multiply<T>(n, d_v, m, {weights.data(), n, true}, {dy.data(), d_v, false},
                            T(1), dvalues + low * d_v, d_v);
            }
        }
    };
    if (!in_threads(n_items, n_parts, work)) return false;
    for (size_t j = 0; j < dmask.size(); ++j) ((M*)PyArray_DATA(*DMask))[j] = M(dmask[j]);
    return true;
}

}
"""
)

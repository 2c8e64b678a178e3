"""JAX kernels of mixtures of experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.layers.moe import ExpertsLayer, ExpertsPullback

# Bounds on the rows that pass through an expert at a time on a CPU: with fewer, reading its weights
# takes most of the time, and with more, most rows of the last block are computed in vain.
FEWEST_ROWS, MOST_ROWS = 32, 160


@jax_funcify.register(ExpertsLayer)
def jax_funcify_experts(op: ExpertsLayer, **kwargs: Any) -> Callable[..., jax.Array]:
    return _differentiable_blocks if jax.default_backend() == "cpu" else _run_ragged


@jax_funcify.register(ExpertsPullback)
def jax_funcify_experts_pullback(
    op: ExpertsPullback, **kwargs: Any
) -> Callable[..., tuple[jax.Array, ...]]:
    if jax.default_backend() == "cpu":
        return _pull_back_blocks

    def pull_back_ragged(
        x: jax.Array, ids: jax.Array, weights: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, ...]:
        *parameters, g = others
        _, pull_back = jax.vjp(
            lambda x, weights, *parameters: _run_ragged(x, ids, weights, *parameters),
            x,
            weights,
            *parameters,
        )
        return pull_back(g)

    return pull_back_ragged


def _run_ragged(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Run the experts by ragged products, which read all experts' weights on a CPU."""
    order, counts = _sort_slots(ids, len(gate))
    k = ids.shape[-1]
    tokens = _rows(x)[order // k]

    def multiply(rows: jax.Array, parameter: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, parameter, counts)

    hidden = jax.nn.silu(multiply(tokens, gate)) * multiply(tokens, up)
    outputs = multiply(hidden, down)
    return _join_slots(outputs, order, weights).reshape(*x.shape[:-1], down.shape[-1])


def _run_blocks(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Run the experts on blocks of sorted rows, as many as there are."""
    order, counts = _sort_slots(ids, len(gate))
    k = ids.shape[-1]
    size = _block_size(len(order), len(gate))
    n_blocks, block = _plan_blocks(counts, size)
    tokens = _padded(_rows(x)[order // k], size)

    def run(i: jax.Array, outputs: jax.Array) -> jax.Array:
        e, start, _ = block(i)
        rows = jax.lax.dynamic_slice_in_dim(tokens, start, size)
        hidden = jax.nn.silu(rows @ gate[e]) * (rows @ up[e])
        # Rows that belong to the next expert are written again by its own block.
        return jax.lax.dynamic_update_slice_in_dim(outputs, hidden @ down[e], start, axis=0)

    outputs = jnp.zeros((len(tokens), down.shape[-1]), x.dtype)
    outputs = jax.lax.fori_loop(0, n_blocks, run, outputs)
    y = _join_slots(outputs[: len(order)], order, weights)
    return y.reshape(*x.shape[:-1], down.shape[-1])


def _pull_back_blocks(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return the gradients by all but the ids, in the same blocks."""
    order, counts = _sort_slots(ids, len(gate))
    k = ids.shape[-1]
    size = _block_size(len(order), len(gate))
    n_blocks, block = _plan_blocks(counts, size)
    tokens = _padded(_rows(x)[order // k], size)
    dy = _padded(_rows(g)[order // k], size)
    sorted_weights = _padded(weights.reshape(-1)[order], size)

    def run(i: jax.Array, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dtokens, dweights, dgate, dup, ddown = gradients
        e, start, n = block(i)
        # Rows of the next expert would add to this one's gradients, and a NaN there too.
        is_own = (jnp.arange(size) < n)[:, None]
        rows, dy_rows = (
            jnp.where(is_own, jax.lax.dynamic_slice_in_dim(v, start, size), 0) for v in (tokens, dy)
        )
        weight = jax.lax.dynamic_slice_in_dim(sorted_weights, start, size)[:, None]
        weight = jnp.where(is_own, weight, 0)
        gate_e, up_e, down_e = gate[e], up[e], down[e]
        inner, value = rows @ gate_e, rows @ up_e
        sigmoid = jax.nn.sigmoid(inner)
        silu = inner * sigmoid
        hidden = silu * value
        by_output = dy_rows @ down_e.T
        dweight = jnp.sum(by_output * hidden, axis=-1)
        dhidden = by_output * weight
        dinner = dhidden * value * (sigmoid + silu * (1 - sigmoid))
        dvalue = dhidden * silu
        put = jax.lax.dynamic_update_slice_in_dim
        return (
            put(dtokens, dinner @ gate_e.T + dvalue @ up_e.T, start, axis=0),
            put(dweights, dweight, start, axis=0),
            dgate.at[e].add(rows.T @ dinner),
            dup.at[e].add(rows.T @ dvalue),
            ddown.at[e].add(hidden.T @ (dy_rows * weight)),
        )

    gradients = (
        jnp.zeros_like(tokens),
        jnp.zeros_like(sorted_weights),
        *(jnp.zeros_like(v) for v in (gate, up, down)),
    )
    gradients = jax.lax.fori_loop(0, n_blocks, run, gradients)
    dtokens, dweights, *dparameters = gradients
    slots = jnp.argsort(order)
    dx = jnp.sum(dtokens[slots].reshape(-1, k, x.shape[-1]), axis=1)
    return (
        dx.reshape(x.shape),
        dweights[slots].reshape(weights.shape),
        *dparameters,
    )


@jax.custom_vjp
def _differentiable_blocks(*inputs: jax.Array) -> jax.Array:
    """Run the experts on blocks: JAX has no gradient of loops whose length is not known before."""
    return _run_blocks(*inputs)


def _run_and_keep_inputs(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _run_blocks(*inputs), inputs


def _pull_back(inputs: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array | None, ...]:
    x, ids, weights, gate, up, down = inputs
    dx, *others = _pull_back_blocks(x, ids, weights, gate, up, down, g)
    return dx, None, *others


_differentiable_blocks.defvjp(_run_and_keep_inputs, _pull_back)


def _sort_slots(ids: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array]:
    """Return the slots (token * top_k + rank) by expert, and how many there are of each."""
    experts = ids.reshape(-1)
    return jnp.argsort(experts, stable=True), jnp.bincount(experts, length=n_experts)


def _join_slots(outputs: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Add up what the experts of each token give, times their weights."""
    by_token = outputs[jnp.argsort(order)].reshape(-1, weights.shape[-1], outputs.shape[-1])
    return jnp.sum(by_token * weights.reshape(-1, weights.shape[-1], 1), axis=1)


def _block_size(n_slots: int, n_experts: int) -> int:
    """Return a little more than the mean load, so that one block holds most experts' rows."""
    wanted = n_slots // n_experts * 5 // 4
    return min(max(wanted, FEWEST_ROWS), MOST_ROWS, max(n_slots, 1))


def _plan_blocks(
    counts: jax.Array, size: int
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]]:
    """Return the number of blocks, and what gives the expert, first row and length of each."""
    ends = jnp.cumsum((counts + size - 1) // size)
    row_ends = jnp.cumsum(counts)

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        e = jnp.searchsorted(ends, i, side="right")
        first = jnp.where(e > 0, ends[e - 1], 0)
        offset = (i - first) * size
        return e, row_ends[e] - counts[e] + offset, counts[e] - offset

    return ends[-1], block


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _padded(x: jax.Array, n: int) -> jax.Array:
    """Return ``x`` with ``n`` rows of zeros below it."""
    return jnp.pad(x, [(0, n), *[(0, 0)] * (x.ndim - 1)])

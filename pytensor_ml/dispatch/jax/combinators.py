"""How JAX runs blocks."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify, jax_funcify_OpFromGraph

from pytensor_ml.base import BlockOp, BlockPullback

# By the op, which PyTensor makes one object for all equal blocks of a graph.
_traced: WeakKeyDictionary[BlockOp, Callable[..., Any]] = WeakKeyDictionary()


@jax_funcify.register(BlockOp)
def jax_funcify_block(op: BlockOp, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    # A jitted function is traced once for all blocks that call it with the same shapes.
    if op not in _traced:
        inner = jax_funcify_OpFromGraph(op, node=node, **kwargs)
        # For JAX's own gradients; a pullback of PyTensor's is another op.
        if op.recompute:
            inner = jax.checkpoint(inner)
        # What a pullback computes anew would be merged with the forward pass, and kept for it.
        given = jax.lax.optimization_barrier if isinstance(op, BlockPullback) else tuple
        # New keys and values would be written as soon as they are known, and the cache, which the
        # block still reads, be copied for it.
        _traced[op] = jax.jit(lambda *inputs: jax.lax.optimization_barrier(inner(*given(inputs))))
    return _traced[op]

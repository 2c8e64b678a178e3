"""What PyTensor's ops that only change a gradient do to one that JAX takes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.gradient import DisconnectedGrad, GradClip, GradScale, ZeroGrad
from pytensor.link.jax.dispatch.basic import jax_funcify


@jax_funcify.register(DisconnectedGrad)
@jax_funcify.register(ZeroGrad)
def jax_funcify_stopped_gradient(
    op: DisconnectedGrad | ZeroGrad, **kwargs: Any
) -> Callable[[jax.Array], jax.Array]:
    return jax.lax.stop_gradient


@jax_funcify.register(GradScale)
def jax_funcify_grad_scale(op: GradScale, **kwargs: Any) -> Callable[[jax.Array], jax.Array]:
    return _with_gradient(lambda g: (op.multiplier * g).astype(g.dtype))


@jax_funcify.register(GradClip)
def jax_funcify_grad_clip(op: GradClip, **kwargs: Any) -> Callable[[jax.Array], jax.Array]:
    return _with_gradient(lambda g: jnp.clip(g, op.clip_lower_bound, op.clip_upper_bound))


def _with_gradient(
    change: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return identity

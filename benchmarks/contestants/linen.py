"""Layers of flax."""

import jax
from flax import linen

from benchmarks.contestants import Task

PACKAGES = ("flax", "jax")


def rms_norm(inputs, epsilon):
    x, scale = jax.device_put((inputs["x"], inputs["scale"]))
    run = jax.jit(normalize(epsilon))
    return Task(lambda: [run(x, scale).block_until_ready()])


def rms_norm_gradient(inputs, epsilon):
    x, scale, dy = jax.device_put((inputs["x"], inputs["scale"], inputs["dy"]))
    run = jax.jit(lambda x, scale, dy: jax.vjp(normalize(epsilon), x, scale)[1](dy))
    return Task(lambda: list(jax.block_until_ready(run(x, scale, dy))))


def normalize(epsilon):
    norm = linen.RMSNorm(epsilon=epsilon)
    return lambda x, scale: norm.apply({"params": {"scale": scale}}, x)

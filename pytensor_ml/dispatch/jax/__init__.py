"""Kernels in JAX."""

from pytensor_ml.dispatch.jax import attention as attention
from pytensor_ml.dispatch.jax import basic as basic
from pytensor_ml.dispatch.jax import combinators as combinators
from pytensor_ml.dispatch.jax import embedding as embedding
from pytensor_ml.dispatch.jax import generation as generation
from pytensor_ml.dispatch.jax import gradient as gradient
from pytensor_ml.dispatch.jax import half as half
from pytensor_ml.dispatch.jax import linear as linear
from pytensor_ml.dispatch.jax import moe as moe
from pytensor_ml.dispatch.jax import norm as norm
from pytensor_ml.dispatch.jax import positional as positional

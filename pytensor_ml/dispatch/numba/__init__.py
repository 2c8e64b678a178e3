"""Kernels in Numba."""

from pytensor_ml.dispatch.numba import attention as attention
from pytensor_ml.dispatch.numba import basic as basic
from pytensor_ml.dispatch.numba import embedding as embedding
from pytensor_ml.dispatch.numba import feedforward as feedforward
from pytensor_ml.dispatch.numba import linear as linear
from pytensor_ml.dispatch.numba import loss as loss
from pytensor_ml.dispatch.numba import moe as moe
from pytensor_ml.dispatch.numba import norm as norm
from pytensor_ml.dispatch.numba import positional as positional

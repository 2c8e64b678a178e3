"""Kernels in C."""

from pytensor_ml.dispatch.c import attention as attention
from pytensor_ml.dispatch.c import embedding as embedding
from pytensor_ml.dispatch.c import feedforward as feedforward
from pytensor_ml.dispatch.c import linear as linear
from pytensor_ml.dispatch.c import moe as moe
from pytensor_ml.dispatch.c import norm as norm
from pytensor_ml.dispatch.c import positional as positional

"""Kernels in MLX."""

from pytensor_ml.dispatch.mlx import attention as attention
from pytensor_ml.dispatch.mlx import basic as basic
from pytensor_ml.dispatch.mlx import embedding as embedding
from pytensor_ml.dispatch.mlx import generation as generation
from pytensor_ml.dispatch.mlx import half as half
from pytensor_ml.dispatch.mlx import moe as moe
from pytensor_ml.dispatch.mlx import norm as norm

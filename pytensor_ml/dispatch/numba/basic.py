"""What holds for every op on Numba."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key
from pytensor.link.numba.dispatch.compile_ops import numba_funcify_OpFromGraph

from pytensor_ml.base import LayerOp


def refuse_float16(op: LayerOp, node: Apply) -> None:
    """Raise if ``node`` has a float16 variable, also inside, which Numba cannot compile."""
    inner = [variable for inner_node in op.fgraph.apply_nodes for variable in inner_node.outputs]
    for variable in [*node.inputs, *node.outputs, *inner]:
        if getattr(variable.type, "dtype", None) == "float16":
            raise NotImplementedError(
                f"{type(op).__name__} has the float16 variable {variable}, and PyTensor's Numba "
                "backend has no float16. Compile for C, JAX or MLX (mode='CVM', 'JAX' or 'MLX'), "
                "or cast to float32 first."
            )


def register_kernel[F: Callable[..., Any]](op_type: type[LayerOp]) -> Callable[[F], F]:
    """Register what makes the kernel of ``op_type`` and the kernel's cache key."""

    def register(make: F) -> F:
        def funcify(op: LayerOp, node: Apply, **kwargs: Any) -> Any:
            refuse_float16(op, node)
            return make(op, node=node, **kwargs)

        register_funcify_and_cache_key(op_type)(funcify)
        return make

    return register


def kernel_key(*read: Any) -> str:
    """Return what tells a kernel from others in Numba's cache, made of all that it reads."""
    return sha256(str(read).encode()).hexdigest()


register_kernel(LayerOp)(numba_funcify_OpFromGraph)

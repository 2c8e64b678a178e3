"""Networks as functions of JAX."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from pytensor_ml.pytensorf.collect import as_output_list, collect_data_inputs
from pytensor_ml.pytensorf.compile import backend_mode
from pytensor_ml.pytensorf.rewrite import rewrite_for_prediction

if TYPE_CHECKING:
    import jax


def to_jax(
    outputs: Variable | Sequence[Variable],
    *,
    inputs: Sequence[Variable] | None = None,
    for_prediction: bool = False,
) -> tuple[Callable[..., Any], dict[str, "jax.Array"]]:
    """Turn a network into a pure function of JAX and the parameters to call it with.

    The function can be differentiated, jitted and mapped by JAX, with the kernels that PyTensor's
    JAX mode uses. It reads nothing but its arguments and writes nothing back: new values that
    layers give to parameters, such as the selection bias of a mixture of experts, are outputs like
    others (:func:`~pytensor_ml.pytensorf.collect_non_trainable_updates` finds them).

    Parameters
    ----------
    outputs : Variable or sequence of Variable
        Outputs of the network.
    inputs : sequence of Variable, optional
        Data inputs in calling order. Default is those the graph has.
    for_prediction : bool
        Whether to leave out what only acts in training.

    Returns
    -------
    f : callable
        ``f(params, *inputs, key=None)`` gives an array, or a list of them where ``outputs`` is a
        sequence. The key is one of ``jax.random``, needed where the network draws random numbers:
        equal keys draw equally.
    params : dict from str to jax.Array
        A copy of every shared variable that the graph reads, generators aside, by the name it also
        has in files.

    Raises
    ------
    ModuleNotFoundError
        If JAX is not installed.
    ValueError
        If the graph needs an input that is not given, or a parameter has no name of its own.
    TypeError
        If something is no tensor, or holds float64 where JAX is not set to keep it.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from pytensor_ml import to_jax
    >>> from pytensor_ml.layers import Input, Linear
    >>> f, params = to_jax(Linear("fc", n_in=2, n_out=3)(Input("x", shape=(None, 2))))
    >>> sorted(params)
    ['fc_W', 'fc_b']
    >>> gradients = jax.grad(lambda params, x: f(params, x).sum())(params, jnp.ones((4, 2)))
    >>> gradients["fc_b"].tolist()
    [4.0, 4.0, 4.0]
    """
    # What stops gradients is a view, which PyTensor drops where it does the differentiating.
    mode = backend_mode("jax").excluding("local_view_op")
    import jax
    import jax.numpy as jnp

    keeps_float64 = jax.config.jax_enable_x64
    from pytensor.link.jax.dispatch import jax_funcify

    # The first import of it sets this by floatX.
    jax.config.update("jax_enable_x64", keeps_float64 or jax.config.jax_enable_x64)

    graph = as_output_list(outputs)
    data = collect_data_inputs(graph) if inputs is None else list(inputs)
    if for_prediction:
        graph = rewrite_for_prediction(graph)
    roots = [
        v
        for v in dict.fromkeys(graph_inputs(graph, data))
        if not (isinstance(v, Constant) or v in data)
    ]
    read = [v for v in roots if isinstance(v, SharedVariable)]
    generators = [v for v in read if isinstance(v.type, RandomType)]
    shared = [v for v in read if v not in generators]
    if missing := [str(v) for v in roots if v not in read]:
        raise ValueError(
            f"The network needs {', '.join(missing)}, which inputs does not name, so its function "
            f"would have no value for it. Name it beside {', '.join(map(str, data)) or 'others'}."
        )
    _check_types([*data, *shared, *graph], jax.config.jax_enable_x64)
    names = [_name_of(v) for v in shared]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"Several parameters are called {', '.join(twice)}, so a dictionary would hold one of "
            "them for all. Give the layers names that differ."
        )
    params = {
        name: jnp.array(v.get_value(borrow=True)) for name, v in zip(names, shared, strict=True)
    }

    fgraph = FunctionGraph([*data, *shared, *generators], graph, clone=True)
    mode.optimizer.rewrite(fgraph)
    run = jax_funcify(fgraph)

    def f(params: Mapping[str, Any], *inputs: Any, key: Any = None) -> Any:
        if len(inputs) != len(data):
            raise TypeError(
                f"The network takes {len(data)} inputs after its parameters "
                f"({', '.join(map(str, data)) or 'none'}), but got {len(inputs)}."
            )
        if absent := [name for name in names if name not in params]:
            raise ValueError(
                f"The dictionary of parameters lacks {', '.join(absent)}. Pass all that to_jax "
                "returned, or what training made of them."
            )
        if generators and key is None:
            raise ValueError(
                f"The network draws random numbers ({', '.join(map(str, generators))}), which "
                "would be the same at every call. Pass key=, a new one of jax.random at each, or "
                "build the function with for_prediction=True."
            )
        arrays = [
            _as_array(value, v)
            for v, value in zip(
                [*data, *shared], [*inputs, *(params[name] for name in names)], strict=True
            )
        ]
        states = [{"jax_state": jax.random.fold_in(key, i)} for i in range(len(generators))]
        results = run(*arrays, *states)
        return results[0] if isinstance(outputs, Variable) else list(results)

    return f, params


def _check_types(variables: Sequence[Variable], keeps_float64: bool) -> None:
    for v in dict.fromkeys(variables):
        if not isinstance(v.type, TensorType):
            raise TypeError(
                f"{v} is of type {v.type}, which JAX has no array for. Let inputs, parameters and "
                "outputs be tensors."
            )
        if v.type.dtype in ("float64", "complex128") and not keeps_float64:
            raise TypeError(
                f"{v} is of dtype {v.type.dtype}, which JAX would round to half its width. Build "
                'the network with floatX="float32", or set jax_enable_x64 by jax.config.update '
                "first."
            )


def _name_of(variable: Any) -> str:
    if not variable.name:
        raise ValueError(
            f"A parameter of type {variable.type} has no name, by which the dictionary of "
            "parameters would know it. Name it when it is made."
        )
    return variable.name


def _as_array(value: Any, variable: Any) -> "jax.Array":
    """Return ``value`` in the dtype of ``variable``, after checking that it fits there."""
    import jax
    import jax.numpy as jnp

    kind = variable.type
    dtype = jax.dtypes.canonicalize_dtype(kind.dtype)
    # JAX would let integers that do not fit wrap around.
    if not isinstance(value, jax.Array) and np.issubdtype(dtype, np.integer):
        given = np.asarray(value)
        if np.issubdtype(given.dtype, np.integer) and given.size:
            low, high = int(given.min()), int(given.max())
            if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
                raise TypeError(
                    f"{variable} is computed in {dtype}, which cannot hold {low} to {high}: these "
                    "would wrap around. Pass smaller numbers, or enable JAX's x64 for int64."
                )
            value = given.astype(dtype)
    array = jnp.asarray(value)
    if array.ndim != kind.ndim or any(
        n not in (None, m) for n, m in zip(kind.shape, array.shape, strict=True)
    ):
        raise ValueError(
            f"{variable} takes an array of shape {kind.shape}, but got one of shape "
            f"{array.shape}. Pass what the network was built for."
        )
    are_integers = np.issubdtype(array.dtype, np.integer) and np.issubdtype(dtype, np.integer)
    if not np.can_cast(array.dtype, kind.dtype, "safe" if are_integers else "same_kind"):
        raise TypeError(
            f"{variable} is of dtype {kind.dtype}, to which {array.dtype} would be truncated. Pass "
            f"an array of {kind.dtype}."
        )
    return array.astype(dtype)

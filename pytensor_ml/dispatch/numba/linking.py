"""Calling compiled functions by their symbol.

Numba copies all that a function calls into its library and optimizes the copy again, at every level
of calls: with blocks inside of stacks, most of the time of compiling.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import compiler, types
from numba.core.environment import Environment
from numba.core.registry import cpu_target
from numba.extending import intrinsic


def call_by_symbol(dispatcher: Any) -> Callable[..., Any]:
    """Return what compiled code calls in place of ``dispatcher``, without a copy of its code.

    Parameters
    ----------
    dispatcher : Dispatcher
        Function of ``numba.njit`` that Numba caches; if it takes ``*args`` it takes nothing else.

    Returns
    -------
    callable
        Takes the same positional arguments, within compiled code only.
    """

    def called(typing_context: Any, *args: Any) -> Any:
        _, _, folded, _ = dispatcher.get_call_template(args, {})
        result = dispatcher.overloads[tuple(folded)]
        starred = types.StarArgTuple.from_types(args)

        def call(context: Any, builder: Any, _: Any, values: Any) -> Any:
            if result.signature.args != (starred,):
                [packed] = values
                values = [builder.extract_value(packed, i) for i in range(len(args))]
                # Parameters left to their defaults are passed as nothing.
                values += [None] * (len(folded) - len(args))
            bring_along(context, builder, dispatcher, result)
            return context.call_internal(builder, result.fndesc, result.signature, values)

        return result.signature.return_type(starred), call

    called.__name__ = dispatcher.py_func.__name__
    return intrinsic(called)


def bring_along(context: Any, builder: Any, dispatcher: Any, result: Any) -> None:
    """Have the code that is being built load ``result`` of ``dispatcher`` wherever it is loaded."""
    if result.library.has_dynamic_globals:
        # It holds an address of this process, such as a large constant's, so Numba does not
        # cache it. By a variable of such a name it does not cache the caller either.
        name = f"numba.dynamic.globals.{result.fndesc.mangled_name}"
        if name not in builder.module.globals:
            mark = ir.GlobalVariable(builder.module, ir.IntType(8), name)
            mark.initializer, mark.linkage = ir.IntType(8)(0), "weak"
    environment = _environment_of(dispatcher, result)
    context.declare_env_global(builder.module, environment.env_name)


class Loader:
    """Unpickled, it has loaded a compiled function, if the process does not have it."""

    def __init__(self, symbol: str, payload: Any):
        self.symbol = symbol
        self.payload = payload

    def __reduce__(self) -> Any:
        return _load, (self.symbol, self.payload)


def _load(symbol: str, payload: Any) -> Loader:
    if payload is None:
        # For Numba as if its file were gone: it compiles the caller again.
        raise FileNotFoundError(f"Numba's cache had lost {symbol} when a caller was put into it.")
    context = cpu_target.target_context
    if not context.codegen()._engine.is_symbol_defined(symbol):
        compiler.CompileResult._rebuild(context, *payload)
    return Loader(symbol, payload)


def _environment_of(dispatcher: Any, result: Any) -> Environment:
    """Return what brings a compiled function along with whatever calls it.

    Numba finds the environments of code by names inside of it, even in code that was linked from
    its cache, and puts them into the cache with it.
    """
    symbol = result.fndesc.mangled_name
    name = f"_ZN08NumbaEnv{symbol.removeprefix('_Z')}"
    if name not in _environments:
        library = result.library
        if library._compiled_object is None:
            cache = dispatcher._cache
            payload = cache._cache_file.load(
                cache._index_key(result.signature.args, library.codegen)
            )
            if payload is not None and payload[1].mangled_name != symbol:
                # Another process has put its own there since.
                payload = None
        else:
            payload = result._reduce()
        environment = Environment(globals())
        environment.env_name = name
        environment.consts.append(Loader(symbol, payload))
        _environments[name] = Environment._memo[name] = environment
    return _environments[name]


# For as long as the process lives, as the code itself: Numba never unloads any.
_environments: dict[str, Environment] = {}

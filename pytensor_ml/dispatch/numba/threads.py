"""Threads of compiled code.

They end with the call that made them. Those of Numba's own layers stay, and a process that was
forked from one that has any ends or hangs as soon as it uses them; PyMC forks one for each chain.
"""

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import config
from numba.core.cgutils import (
    alloca_once,
    alloca_once_value,
    for_range,
    gep_inbounds,
    get_or_insert_function,
)
from numba.extending import intrinsic
from pytensor.link.numba.dispatch.basic import numba_njit

HAS_THREADS = sys.platform != "win32"

# By the environment variable NUMBA_NUM_THREADS, or as many as there are cores.
N_THREADS = int(vars(config)["NUMBA_NUM_THREADS"]) if HAS_THREADS else 1

# What is read in twice the time that it takes to make and end a thread.
LEAST_BYTES = 2**19

MAX_THREADS = 64


@numba_njit
def count_threads(n_items: int, n_bytes: int) -> int:
    """Return how many threads are worth it for items that read and write so many bytes in all."""
    return max(min(N_THREADS, MAX_THREADS, n_items, n_bytes // LEAST_BYTES), 1)


def in_threads(work: Any) -> Callable[..., None]:
    """Return what compiled code calls to do ``work`` in several threads.

    Parameters
    ----------
    work : Dispatcher
        Function of ``numba.njit`` that takes the first item, one past the last and any arguments,
        and returns nothing. What it raises is taken for a lack of memory.

    Returns
    -------
    callable
        Takes the number of items, the number of threads, at most ``MAX_THREADS``, and the
        arguments. Items are shared out evenly; the caller's thread takes the first. Within compiled
        code only.
    """
    share = _sharing(work)

    @numba_njit
    def run(n_items: int, n_threads: int, *args: Any) -> None:
        if not share(n_items, n_threads, *args):
            raise MemoryError("A kernel found no memory for what it computes on the way.")

    return run


def _sharing(work: Any) -> Callable[..., bool]:
    """Return an intrinsic that does ``work`` in threads and tells whether nothing was raised."""

    def share(typing_context: Any, n_items: Any, n_threads: Any, *args: Any) -> Any:
        _, _, folded, _ = work.get_call_template((types.intp, types.intp, *args), {})
        result = work.overloads[tuple(folded)]
        signature = types.boolean(types.intp, types.intp, types.StarArgTuple.from_types(args))

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            n_items, n_threads, packed = values
            kinds = result.signature.args[2:]
            arguments = [
                context.cast(builder, builder.extract_value(packed, i), args[i], kind)
                for i, kind in enumerate(kinds)
            ]
            context.active_code_library.add_linking_library(result.library)
            index = n_items.type
            # First item, one past the last, whether nothing was raised, arguments.
            part_type = ir.LiteralStructType(
                [index, index, ir.IntType(1), *(v.type for v in arguments)]
            )

            def do_part(builder: Any, at: Any) -> None:
                part = builder.load(at)
                first, stop, _, *rest = (
                    builder.extract_value(part, i) for i in range(len(part_type.elements))
                )
                status, _ = context.call_internal_no_propagate(
                    builder, result.fndesc, result.signature, [first, stop, *rest]
                )
                builder.store(status.is_ok, gep_inbounds(builder, at, 0, 2))

            parts = alloca_once(builder, part_type, index(MAX_THREADS))
            is_done = alloca_once_value(builder, ir.IntType(1)(1))
            one = index(1)
            with for_range(builder, n_threads) as loop:
                part = ir.Constant(part_type, ir.Undefined)
                for place, i in enumerate((loop.index, builder.add(loop.index, one))):
                    bound = builder.sdiv(builder.mul(n_items, i), n_threads)
                    part = builder.insert_value(part, bound, place)
                for place, value in enumerate(arguments, start=3):
                    part = builder.insert_value(part, value, place)
                builder.store(part, builder.gep(parts, [loop.index]))
            if HAS_THREADS:
                run_in_threads(builder, n_threads, parts, do_part)
            else:
                with for_range(builder, n_threads) as loop:
                    do_part(builder, builder.gep(parts, [loop.index]))
            with for_range(builder, n_threads) as loop:
                was_done = builder.load(gep_inbounds(builder, parts, loop.index, 2))
                builder.store(builder.and_(builder.load(is_done), was_done), is_done)
            return builder.load(is_done)

        return signature, generate

    return intrinsic(share)


def run_in_threads(builder: Any, n_threads: Any, parts: Any, do_part: Callable) -> None:
    """Add code that does the first part itself and each other one in a thread, if it gets one."""
    module, index, pointer = builder.module, n_threads.type, ir.IntType(8).as_pointer()
    status_type = ir.IntType(32)
    thread = ir.Function(
        module,
        ir.FunctionType(pointer, [pointer]),
        module.get_unique_name(f"{builder.function.name}_thread"),
    )
    thread.linkage = "internal"
    inside = ir.IRBuilder(thread.append_basic_block())
    do_part(inside, inside.bitcast(thread.args[0], parts.type))
    inside.ret(pointer(None))

    create_type = ir.FunctionType(status_type, [pointer, pointer, thread.type, pointer])
    create = get_or_insert_function(module, create_type, "pthread_create")
    join_type = ir.FunctionType(status_type, [index, pointer])
    join = get_or_insert_function(module, join_type, "pthread_join")
    handles = alloca_once(builder, index, index(MAX_THREADS))
    statuses = alloca_once(builder, status_type, index(MAX_THREADS))
    with for_range(builder, n_threads, start=index(1)) as loop:
        handle = builder.bitcast(builder.gep(handles, [loop.index]), pointer)
        part = builder.bitcast(builder.gep(parts, [loop.index]), pointer)
        status = builder.call(create, [handle, pointer(None), thread, part])
        builder.store(status, builder.gep(statuses, [loop.index]))
    do_part(builder, parts)
    with for_range(builder, n_threads, start=index(1)) as loop:
        status = builder.load(builder.gep(statuses, [loop.index]))
        with builder.if_else(builder.icmp_signed("==", status, status_type(0))) as (
            then,
            otherwise,
        ):
            with then:
                handle = builder.load(builder.gep(handles, [loop.index]))
                builder.call(join, [handle, pointer(None)])
            with otherwise:
                do_part(builder, builder.gep(parts, [loop.index]))

"""Numba kernels in threads."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once, gep_inbounds, get_or_insert_function
from numba.core.typing import signature
from numba.extending import intrinsic
from pytensor.link.numba.dispatch.basic import numba_njit

import pytensor_ml.dispatch.threads  # noqa: F401  It names what compiled code calls.
from pytensor_ml.dispatch.numba.basic import cached_by_source
from pytensor_ml.dispatch.numba.linking import bring_along

# What one thread reads and writes in the time that another needs to begin.
LEAST_BYTES = 2**16

# A processor may be taken from a thread, whose parts the others do then.
PARTS_OF_A_THREAD = 4

count_threads: Any = types.ExternalFunction("pytensor_ml_count_threads", signature(types.intp))


@numba_njit
def count_parts(n_items: int, n_bytes: int) -> int:
    """Return in how many parts to do items that read and write so many bytes in all."""
    n_threads = count_threads()
    if n_threads == 1:
        return 1
    return max(min(n_threads * PARTS_OF_A_THREAD, n_items, n_bytes // LEAST_BYTES), 1)


def in_threads(work: Any) -> Callable[..., None]:
    """Return what compiled code calls to do ``work`` in several threads.

    Parameters
    ----------
    work : Dispatcher
        Function of ``numba.njit`` that takes the first item, one past the last and any arguments,
        and returns nothing. What it raises is taken for a lack of memory. It must not take Python's
        lock, which the caller has. Not a closure, as it is compiled once for all that call it.

    Returns
    -------
    callable
        Takes the number of items, that of parts, and the arguments. The parts are as even as they
        can be, and done in any order. Within compiled code only.
    """
    share = _sharing(cached_by_source(work))

    @numba_njit
    def run(n_items: int, n_parts: int, *args: Any) -> None:
        if not share(n_items, n_parts, *args):
            raise MemoryError("A kernel found no memory for what it computes on the way.")

    return run


def _sharing(work: Any) -> Callable[..., bool]:
    """Return an intrinsic that does ``work`` in threads and tells whether nothing was raised."""

    def share(typing_context: Any, n_items: Any, n_parts: Any, *args: Any) -> Any:
        _, _, folded, _ = work.get_call_template((types.intp, types.intp, *args), {})
        result = work.overloads[tuple(folded)]

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            n_items, n_parts, packed = values
            kinds = result.signature.args[2:]
            arguments = [
                context.cast(builder, builder.extract_value(packed, i), args[i], kind)
                for i, kind in enumerate(kinds)
            ]
            bring_along(context, builder, work, result)
            word, byte, nothing = n_items.type, ir.IntType(8), ir.VoidType()
            pointer = byte.as_pointer()
            # Items, parts, whether something was raised, arguments.
            job_type = ir.LiteralStructType([word, word, byte, *(v.type for v in arguments)])
            work_type = ir.FunctionType(nothing, [pointer, word])

            module = builder.module
            part = ir.Function(
                module, work_type, module.get_unique_name(f"{builder.function.name}_part")
            )
            part.linkage = "internal"
            inside = ir.IRBuilder(part.append_basic_block())
            job = inside.bitcast(part.args[0], job_type.as_pointer())
            n_items_inside, n_parts_inside, _, *rest = (
                inside.load(gep_inbounds(inside, job, 0, i)) for i in range(len(job_type.elements))
            )
            bounds = [
                inside.sdiv(inside.mul(n_items_inside, i), n_parts_inside)
                for i in (part.args[1], inside.add(part.args[1], word(1)))
            ]
            status, _ = context.call_internal_no_propagate(
                inside, result.fndesc, result.signature, [*bounds, *rest]
            )
            with inside.if_then(status.is_error):
                inside.store(byte(1), gep_inbounds(inside, job, 0, 2))
            inside.ret_void()

            job = alloca_once(builder, job_type)
            for i, value in enumerate((n_items, n_parts, byte(0), *arguments)):
                builder.store(value, gep_inbounds(builder, job, 0, i))
            run_type = ir.FunctionType(nothing, [word, word, word])
            run = get_or_insert_function(module, run_type, "pytensor_ml_run")
            addresses = [builder.ptrtoint(x, word) for x in (part, job)]
            builder.call(run, [*addresses, n_parts])
            raised = builder.load(gep_inbounds(builder, job, 0, 2))
            return builder.icmp_unsigned("==", raised, byte(0))

        signature = types.boolean(types.intp, types.intp, types.StarArgTuple.from_types(args))
        return signature, generate

    return intrinsic(share)

"""Threads for compiled code, the same ones for all kernels of a process.

There are as many as SciPy's OpenBLAS has, in whose place they work: its own are told to rest while
these run, as two sets would wait for each other's processors. Where SciPy has another BLAS, there
are none. A forked process starts its own; PyMC forks one for each chain.

Compiled code calls ``pytensor_ml_run(work, argument, n_parts)``, which calls
``work(argument, part)`` once for each part below ``n_parts``, in any order, and returns when all
have returned, and ``pytensor_ml_count_threads()``. Both are symbols for LLVM; C takes their
addresses from here.
"""

import ctypes
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.typing import signature
from numba.extending import intrinsic, register_jitable
from pytensor.configdefaults import config
from pytensor.link.numba.cache import compile_numba_function_src
from scipy.linalg import cython_blas

# What the threads have in common, as places in STATE; what changes often has a line of the
# processor's cache, 8 words, to itself. A ticket is 2^32 times the number of a job, plus 2^16 times
# how many parts were taken from the end, plus how many from the beginning: a part is taken only of
# the very job whose work was read. From both ends, so that a thread mostly gets the same part of
# the same arrays, which its cache may hold.
TICKET, N_DONE, N_ASLEEP, IS_BUSY = 0, 8, 16, 24
WORK, ARGUMENT, N_PARTS, N_THREADS, N_STARTED, HANDLE = range(32, 38)
LOCK, WAKE = 40, 56
_memory = np.zeros(80, np.int64)
STATE = _memory[-_memory.ctypes.data // 8 % 8 :][:72]
# Threads read it until the process ends.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(STATE))

NEXT_JOB = 2**32
FROM_END = 2**16
NO_PART = NEXT_JOB - 1

# How often a thread looks for work, or lets another run, before it sleeps: for 0.6 ms or so. Linux
# wakes many a thread on the processor of the thread that woke it, and leaves both there.
PATIENCE = 2000


def _blas_function(name: str) -> int | None:
    """Return the address of a function of the OpenBLAS that SciPy has, if it has one."""
    library = ctypes.CDLL(cython_blas.__file__)
    for prefix in ("scipy_openblas_", "openblas_"):
        function = getattr(library, prefix + name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _has_threads() -> bool:
    """Return whether SciPy's BLAS is an OpenBLAS with threads of its own, not of OpenMP."""
    address = _blas_function("get_parallel") if sys.platform != "win32" else None
    return address is not None and ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 1


HAS_THREADS = _has_threads()


def _external(name: str, n_arguments: int, kind: Any = types.intp) -> Any:
    """Return a function of the system or of BLAS for compiled code."""
    return types.ExternalFunction(name, signature(types.int32, *[kind] * n_arguments))


pthread_create = _external("pthread_create", 4)
pthread_mutex_init = _external("pthread_mutex_init", 2)
pthread_mutex_lock = _external("pthread_mutex_lock", 1)
pthread_mutex_unlock = _external("pthread_mutex_unlock", 1)
pthread_cond_init = _external("pthread_cond_init", 2)
pthread_cond_wait = _external("pthread_cond_wait", 2)
pthread_cond_broadcast = _external("pthread_cond_broadcast", 1)
sched_yield = _external("sched_yield", 0)
get_blas_threads = _external("pytensor_ml_get_blas_threads", 0)
set_blas_threads = _external("pytensor_ml_set_blas_threads", 1, types.int32)

WORD = ir.IntType(64)
POINTER = ir.IntType(8).as_pointer()


def _symbol(builder: Any, name: str) -> Any:
    """Return the address of what has a name."""
    found = builder.module.globals.get(name)
    if found is None:
        found = ir.GlobalVariable(builder.module, ir.IntType(8), name)
    return builder.ptrtoint(found, WORD)


def _place(builder: Any, place: Any) -> Any:
    address = builder.add(_symbol(builder, "pytensor_ml_thread_state"), builder.mul(place, WORD(8)))
    return builder.inttoptr(address, WORD.as_pointer())


def _address_of(typing_context: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        return builder.ptrtoint(_place(builder, values[0]), WORD)

    return types.intp(types.intp), generate


def _address_of_serve(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        return _symbol(builder, "pytensor_ml_serve")

    return types.intp(), generate


def _get(typing_context: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        return builder.load_atomic(_place(builder, values[0]), "seq_cst", 8)

    return types.int64(types.intp), generate


def _put(typing_context: Any, place: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        builder.store_atomic(values[1], _place(builder, values[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


def _increase(typing_context: Any, place: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _place(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


def _replace(typing_context: Any, place: Any, expected: Any, value: Any) -> Any:
    """Put a value where the expected one is, and tell whether it was."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        place, expected, value = values
        result = builder.cmpxchg(_place(builder, place), expected, value, "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.intp, types.int64, types.int64), generate


def _call(typing_context: Any, work: Any, argument: Any, part: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        work, argument, part = values
        kind = ir.FunctionType(ir.VoidType(), [POINTER, WORD]).as_pointer()
        builder.call(builder.inttoptr(work, kind), [builder.inttoptr(argument, POINTER), part])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


address_of: Any = intrinsic(_address_of)
address_of_serve: Any = intrinsic(_address_of_serve)
get: Any = intrinsic(_get)
put: Any = intrinsic(_put)
increase: Any = intrinsic(_increase)
replace: Any = intrinsic(_replace)
call: Any = intrinsic(_call)


@register_jitable
def count_taken(ticket: int) -> int:
    return ticket % FROM_END + ticket % NEXT_JOB // FROM_END


@register_jitable
def has_part(own: int) -> Any:
    return own < get(N_THREADS) and count_taken(get(TICKET)) < get(N_PARTS)


@register_jitable
def take_parts(own: int) -> None:
    """Do parts of the job at hand until none is left."""
    while own < get(N_THREADS):
        ticket = get(TICKET)
        work, argument, n_parts = get(WORK), get(ARGUMENT), get(N_PARTS)
        if count_taken(ticket) >= n_parts:
            break
        if own % 2 == 0:
            part, taken = ticket % FROM_END, 1
        else:
            part, taken = n_parts - 1 - ticket % NEXT_JOB // FROM_END, FROM_END
        if replace(TICKET, ticket, ticket + taken):
            call(work, argument, part)
            increase(N_DONE, 1)


def serve(own: int) -> int:
    """Take parts of jobs for as long as the process lives: what a thread does."""
    while True:
        turn = 0
        while turn < PATIENCE:
            if has_part(own):
                take_parts(own)
                turn = 0
            sched_yield()
            turn += 1
        pthread_mutex_lock(address_of(LOCK))
        increase(N_ASLEEP, 1)
        while not has_part(own):
            pthread_cond_wait(address_of(WAKE), address_of(LOCK))
        increase(N_ASLEEP, -1)
        pthread_mutex_unlock(address_of(LOCK))
    return 0


@register_jitable
def start_threads(n_threads: int) -> None:
    """Start what is missing; the caller's is one of them."""
    if get(N_STARTED) == 0:
        pthread_mutex_init(address_of(LOCK), 0)
        pthread_cond_init(address_of(WAKE), 0)
        put(N_STARTED, 1)
    while get(N_STARTED) < n_threads:
        if pthread_create(address_of(HANDLE), 0, address_of_serve(), get(N_STARTED)) != 0:
            break
        increase(N_STARTED, 1)


@register_jitable
def share(work: int, argument: int, n_parts: int, n_threads: int) -> None:
    """Do a job together with the other threads."""
    start_threads(n_threads)
    job = (get(TICKET) // NEXT_JOB + 1) % (NEXT_JOB // 2) * NEXT_JOB
    put(TICKET, job + NO_PART)
    put(WORK, work)
    put(ARGUMENT, argument)
    put(N_PARTS, n_parts)
    put(N_DONE, 0)
    put(TICKET, job)
    if get(N_ASLEEP) > 0:
        pthread_mutex_lock(address_of(LOCK))
        pthread_cond_broadcast(address_of(WAKE))
        pthread_mutex_unlock(address_of(LOCK))
    take_parts(0)
    while get(N_DONE) < n_parts:
        sched_yield()


def run(work: int, argument: int, n_parts: int) -> None:
    n_threads = get_blas_threads() if HAS_THREADS else 1
    if HAS_THREADS and n_threads > 1 and replace(IS_BUSY, 0, 1):
        put(N_THREADS, n_threads)
        # Also for a single part: OpenBLAS's threads, once used, keep a processor busy for some
        # hundredths of a second, looking for more.
        set_blas_threads(1)
        if 1 < n_parts < FROM_END:
            share(work, argument, n_parts, n_threads)
        else:
            for part in range(n_parts):
                call(work, argument, part)
        set_blas_threads(n_threads)
        put(IS_BUSY, 0)
    else:
        # Alone, in a part of a job, or beside another thread of Python's.
        for part in range(n_parts):
            call(work, argument, part)


def count_threads() -> Any:
    return get_blas_threads() if HAS_THREADS else 1


def _compiled(function: Any, kind: Any) -> Any:
    """Return the address of a function for C, cached with PyTensor's."""
    made: Any = CFunc(function, (kind.args, kind.return_type), {}, {})
    if config.numba__cache:
        name = function.__name__
        key = sha256(Path(__file__).read_bytes() + str(HAS_THREADS).encode()).hexdigest()
        made._cache = FunctionCache(
            compile_numba_function_src(
                f"def {name}(): pass", name, {"__name__": __name__}, cache_key=f"{key}_{name}"
            )
        )
    made.compile()
    # For as long as the process lives, as its code.
    _functions.append(made)
    return made.address


_functions: list[Any] = []

binding.add_symbol("pytensor_ml_thread_state", STATE.ctypes.data)
if HAS_THREADS:
    binding.add_symbol("pytensor_ml_get_blas_threads", _blas_function("get_num_threads"))
    binding.add_symbol("pytensor_ml_set_blas_threads", _blas_function("set_num_threads"))
    binding.add_symbol("pytensor_ml_serve", _compiled(serve, types.intp(types.intp)))
RUN = _compiled(run, types.void(types.intp, types.intp, types.intp))
COUNT_THREADS = _compiled(count_threads, types.intp())
binding.add_symbol("pytensor_ml_run", RUN)
binding.add_symbol("pytensor_ml_count_threads", COUNT_THREADS)


def _forget_threads() -> None:
    """Begin anew in a forked process, which has the state of the other's threads, without them."""
    if STATE[IS_BUSY]:
        # Forked beside a job: by a thread that lets others have Python's lock meanwhile.
        set_threads: Any = _blas_function("set_num_threads")
        ctypes.CFUNCTYPE(None, ctypes.c_int)(set_threads)(int(STATE[N_THREADS]))
    STATE[[N_ASLEEP, IS_BUSY, N_STARTED]] = 0
    # Whatever parts the other's job had left.
    STATE[TICKET] |= NO_PART


if HAS_THREADS:
    os.register_at_fork(after_in_child=_forget_threads)

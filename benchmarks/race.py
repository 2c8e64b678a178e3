"""Running the contestants of a row in turns, each in a process of its own."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import BACKENDS, PEER, Contestant, Inputs, Row

HERE = Path(__file__).parent
THREAD_VARIABLES = (
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NPROC",  # What XLA reads.
)
# Long enough for the threads of the contestant before to stop spinning.
PAUSE = 0.05


class WrongResult(RuntimeError):
    """A contestant computes something else than it should."""


class Absent(RuntimeError):
    """A contestant cannot run here."""


@dataclass(frozen=True)
class Setting:
    """Where and how contestants run.

    Attributes
    ----------
    threads : int
        Number of threads of each.
    pythons : dict
        Interpreters by environment: "here", and others as far as there are any.
    rounds : int, optional
        How often each has its turn. Default is the row's.
    turn : float
        Seconds that a turn takes at least.
    folder : Path
        Scratch space.
    caches : dict
        Caches that compilers filled in it, by what was compiled.
    """

    threads: int
    pythons: dict[str, str]
    folder: Path
    rounds: int | None = None
    turn: float = 0.05
    caches: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Entry:
    """A contestant on one backend, or without one."""

    contestant: Contestant
    backend: str | None

    @property
    def label(self) -> str:
        return " on ".join(filter(None, [self.contestant.name, self.backend]))


@dataclass
class Outcome:
    """What a row gave: seconds of each round, why others are absent, and who took part."""

    row: Row
    seconds: dict[Entry, list[float]] = field(default_factory=dict)
    absent: dict[Entry, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)


def race(
    row: Row,
    backends: Sequence[str],
    setting: Setting,
    report: Callable[[str], None] = lambda message: None,
) -> Outcome:
    """Run a row on some backends.

    Raises
    ------
    WrongResult
        If any result is wrong, and none has been timed in turns yet.
    RuntimeError
        If one of ours does not run.
    """
    inputs = row.inputs()
    np.savez(setting.folder / "inputs.npz", **inputs)
    outcome = Outcome(row)
    workers: dict[Entry, Worker] = {}

    def start(entry: Entry) -> "Worker":
        report(f"{row.name}: setting up {entry.label}")
        worker = Worker(row, entry, setting)
        try:
            check(row, entry, inputs, worker)
        except WrongResult:
            worker.close()
            raise
        return worker

    try:
        for entry in entries(row, backends):
            try:
                workers[entry] = start(entry)
            except Absent as reason:
                outcome.absent[entry] = str(reason)
                continue
            outcome.packages.update(workers[entry].packages)
            if row.in_new_processes:
                workers[entry].close()
        n_rounds = setting.rounds or row.rounds
        if row.in_new_processes:
            outcome.seconds = {entry: [worker.first] for entry, worker in workers.items()}
            for _ in range(1, n_rounds):
                for entry, seconds in outcome.seconds.items():
                    workers[entry] = start(entry)
                    workers[entry].close()
                    seconds.append(workers[entry].first)
            return outcome
        n_runs = {}
        for entry, worker in workers.items():
            worker.seconds(1)
            n_runs[entry] = max(1, round(setting.turn / worker.seconds(1)))
        outcome.seconds = {entry: [] for entry in workers}
        for i in range(n_rounds):
            report(f"{row.name}: round {i + 1} of {n_rounds}")
            for entry, worker in workers.items():
                time.sleep(PAUSE)
                outcome.seconds[entry].append(worker.seconds(n_runs[entry]))
        return outcome
    finally:
        for worker in workers.values():
            worker.close()


def entries(row: Row, backends: Sequence[str]) -> list[Entry]:
    made = []
    for contestant in row.contestants:
        shared = [backend for backend in backends if backend in contestant.backends]
        if contestant.a_backend_each:
            made += [Entry(contestant, backend) for backend in shared]
        elif shared:
            made.append(Entry(contestant, None))
    # Those that are compared have their turns one after the other.
    return sorted(made, key=lambda entry: BACKENDS.index(entry.backend) if entry.backend else -1)


def check(row: Row, entry: Entry, inputs: Inputs, worker: "Worker") -> None:
    """Raise if what the worker computed first is not what it should be."""
    contestant = entry.contestant
    if not contestant.checked:
        return
    tolerance = row.tolerance if contestant.is_ours else PEER
    error = row.error(inputs, task_settings(row, contestant), worker.outputs)
    if not error <= tolerance:
        raise WrongResult(
            f"{row.name}: the result of {entry.label} is wrong, with an error of {error:.3g} where "
            f"{tolerance:.3g} is allowed. Its times would mean nothing."
        )


def task_settings(row: Row, contestant: Contestant) -> dict[str, Any]:
    return row.settings if contestant.settings is None else contestant.settings


class Worker:
    """A process that has set up a task and waits for its turns.

    Attributes
    ----------
    first : float
        Seconds of the first run.
    outputs : list of ndarray
        What it gave.
    packages : list of str
        Packages that took part.

    Raises
    ------
    Absent
        If what it needs is not installed, or it is not ours and fails.
    RuntimeError
        If it is ours and fails.
    """

    def __init__(self, row: Row, entry: Entry, setting: Setting):
        contestant, self._entry = entry.contestant, entry
        if contestant.python not in setting.pythons:
            raise Absent(f"--{contestant.python}-python was not given")
        if contestant.needs is not None and find_spec(contestant.needs) is None:
            raise Absent(f"{contestant.needs} is not installed")
        settings = dict(task_settings(row, contestant))
        if entry.backend is not None:
            settings["backend"] = entry.backend
        outputs = setting.folder / "outputs.npz"
        order = {
            "module": contestant.module,
            "task": contestant.task or row.task,
            "settings": settings,
            "inputs": str(setting.folder / "inputs.npz"),
            "outputs": str(outputs),
            "threads": setting.threads,
        }
        environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(setting.threads))
        flags = [environment.get("PYTENSOR_FLAGS"), "floatX=float32"]
        if contestant.python == "here":
            path = [str(HERE.parent), environment.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        else:
            environment.pop("PYTHONPATH", None)
            # In a common cache, packages of one name would take each other's code for theirs.
            flags.append(f"base_compiledir={setting.folder / contestant.python}")
        if contestant.cache is not None:
            cache = compile_cache(row, entry, setting)
            flags.append(f"base_compiledir={cache}")
            # Where MLX keeps what it compiled.
            environment["TMPDIR"] = str(cache)
        environment["PYTENSOR_FLAGS"] = ",".join(filter(None, flags))
        with tempfile.TemporaryFile("w+", dir=setting.folder) as errors:
            self._process = subprocess.Popen(
                [setting.pythons[contestant.python], HERE / "worker.py", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                bufsize=1,
            )
            answer = self._read()
            if not answer:
                self.close()
                errors.seek(0)
                self._refuse(errors.read().strip().splitlines()[-20:])
        self.first = answer["first"]
        self.packages = answer["packages"]
        with np.load(outputs) as saved:
            self.outputs = list(saved.values())

    def seconds(self, n: int) -> float:
        """Return the seconds of one of ``n`` runs in a row."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(n, file=self._process.stdin)
        answer = self._read()
        if not answer:
            raise RuntimeError(f"{self._entry.label} died in its turn.")
        return float(answer)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _refuse(self, errors: list[str]) -> None:
        if self._entry.contestant.is_ours:
            raise RuntimeError("\n".join([f"{self._entry.label} does not run:", *errors]))
        raise Absent(errors[-1] if errors else "it died without a word")


def compile_cache(row: Row, entry: Entry, setting: Setting) -> Path:
    """Return the folder that a compiler is to find empty or filled."""
    contestant = entry.contestant
    what = f"{entry.backend} {contestant.python} {row.task} {task_settings(row, contestant)}"
    if contestant.cache == "empty":
        setting.caches[what] = Path(tempfile.mkdtemp(dir=setting.folder))
    elif what not in setting.caches:
        filling = replace(entry, contestant=replace(contestant, cache="empty"))
        Worker(row, filling, setting).close()
    return setting.caches[what]

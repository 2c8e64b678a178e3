"""One contestant: a process that runs a task as often as it is asked to.

Its argument is JSON. It sets the task up, saves the outputs of the first run, answers with a line
of JSON, and then answers each line ``N`` with the seconds a step took in N runs.

It is run by its path, not as a module: the repository must not be on the path of a process that is
to import another ``pytensor_ml``. It has to work on older versions of Python than the package.
"""

import importlib.util
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

# A run shorter than this is made once, untimed, before the timed ones: it wakes threads and caches.
SHORT = 0.1


def main():
    order = json.loads(sys.argv[1])
    # Whatever else is printed goes elsewhere.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["threads"]])
    import_benchmarks()
    import numpy as np

    contestant = importlib.import_module(f"benchmarks.contestants.{order['module']}")
    task = getattr(contestant, order["task"])(dict(np.load(order["inputs"])), **order["settings"])
    task.prepare()
    first, outputs = seconds(task.run)
    np.savez(order["outputs"], *map(np.asarray, outputs))
    del outputs
    packages = [f"{name} {version(name)}" for name in contestant.PACKAGES]
    print(json.dumps({"first": first / task.steps, "packages": packages}), file=answers)
    last = first
    for line in sys.stdin:
        if last < SHORT:
            task.run()
        total, n = 0.0, int(line)
        if task.steps == 1:
            total, _ = seconds(task.run, n)
        else:
            for _ in range(n):
                task.prepare()
                total += seconds(task.run)[0]
        last = total / n
        print(last / task.steps, file=answers)


def seconds(run, n=1):
    """Return how long ``n`` runs take, and the outputs of the last."""
    started = time.perf_counter()
    for _ in range(n):
        outputs = run()
    return time.perf_counter() - started, outputs


def import_benchmarks():
    """Make the package that holds this file importable, without what lies beside it."""
    folder = Path(__file__).parent
    del sys.path[0]
    spec = importlib.util.spec_from_file_location("benchmarks", folder / "__init__.py")
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["benchmarks"])


if __name__ == "__main__":
    main()

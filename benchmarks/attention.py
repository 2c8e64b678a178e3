"""Time and memory of attention, by backend: ``python -m benchmarks.attention``.

A causal prefill of 9 heads on 3, its gradient, and one query to a long sequence. Memory is what a
call adds to the peak of its process (Linux).
"""

import argparse
import subprocess
import sys
import time

import numpy as np

CASES = {
    "prefill 2048": (2048, 2048, False),
    "prefill 2048, gradient": (2048, 2048, True),
    "1 query, 8192 keys": (1, 8192, False),
}


def measure(backend: str, case: str) -> str:
    """Return seconds a call and megabytes at its peak, of one case in this process."""
    import pytensor.tensor as pt

    from pytensor_ml.layers import scaled_dot_product_attention
    from pytensor_ml.pytensorf import backend_mode, function

    n_queries, n_keys, with_gradient = CASES[case]
    lengths = {"q": (9, n_queries), "k": (3, n_keys), "v": (3, n_keys)}
    inputs = [
        pt.tensor(n, shape=(1, h, None, 64), dtype="float32") for n, (h, _) in lengths.items()
    ]
    y = scaled_dot_product_attention(*inputs, is_causal=True)
    outputs = pt.grad(None, inputs, known_grads={y: y}) if with_gradient else [y]
    run = function(inputs, outputs, mode=backend_mode(backend))
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(1, h, t, 64)).astype("float32") for h, t in lengths.values()]

    def call() -> float:
        start = time.perf_counter()
        for result in run(*values):
            np.asarray(result)
        return time.perf_counter() - start

    small = [value[:, :, :64] for value in values]
    run(*small)
    before = peak_megabytes()
    call()
    added = peak_megabytes() - before
    seconds = np.median([call() for _ in range(7)])
    megabytes_of_keys = values[1].nbytes * 2 / 2**20
    return f"{seconds * 1e3:.1f} ms | {added:.0f} MB (keys and values: {megabytes_of_keys:.0f} MB)"


def peak_megabytes() -> float:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["c", "numba", "jax", "mlx"])
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(*options.one))
        return
    for case in CASES:
        for backend in options.backends:
            command = [sys.executable, __file__, "--one", backend, case]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(case, backend, result.stdout.splitlines()[-1], sep=" | ", flush=True)


if __name__ == "__main__":
    main()

"""How long a Praxis trunk takes to its first output, by its depth.

Run as ``python -m benchmarks.compile_depth``. Each measurement is a process of its own with an
empty compile cache.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import numpy as np


def first_output(backend: str, depth: int) -> float:
    """Return the seconds from the graph to the first output of a trunk of ``depth`` blocks."""
    from pytensor_ml.layers import Input, IntegerRotaryEmbedding, build_moe_config, praxis_stack
    from pytensor_ml.pytensorf import backend_mode, function

    dim, tokens = 64, 32
    stack = praxis_stack(
        depth=depth,
        dense_blocks=(0, depth - 1),
        dim=dim,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qk_norm_eps=1e-6,
        norm_eps=1e-6,
        dense_hidden=128,
        rotary=IntegerRotaryEmbedding(16, 16, 10_000, 1024),
        moe=build_moe_config(
            dim=dim,
            expert_hidden=32,
            num_routed_experts=8,
            top_k_routed=2,
            routed_scaling_factor=2.5,
            gate_bias_update_factor=1e-3,
        ),
        modulation_dim=8,
    )
    x = Input("x", shape=(None, None, dim), dtype="float32")
    positions = Input("positions", shape=(None, None), dtype="int64")
    mask = Input("mask", shape=(None, None), dtype="bool")
    x_mod = Input("x_mod", shape=(None, None, 8), dtype="float32")
    start = time.perf_counter()
    y, _ = stack(x, positions, mask, x_mod)
    run = function([x, positions, mask, x_mod], y, mode=backend_mode(backend))
    np.asarray(
        run(
            np.ones((1, tokens, dim), "float32"),
            np.arange(tokens)[None] + 2_000_000,
            np.tri(tokens, dtype=bool),
            np.ones((1, tokens, 8), "float32"),
        )
    )
    return time.perf_counter() - start


def in_a_new_process(backend: str, depth: int) -> float:
    with tempfile.TemporaryDirectory() as cache:
        flags = f"floatX=float32,base_compiledir={cache}"
        command = [sys.executable, __file__, "--one", backend, str(depth)]
        environment = os.environ | {"PYTENSOR_FLAGS": flags}
        result = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    return float(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["c", "numba", "jax", "mlx"])
    parser.add_argument("--depths", nargs="+", type=int, default=[4, 24])
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "DEPTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(first_output(options.one[0], int(options.one[1])))
        return
    print(
        "seconds to the first output", *(f"{d} blocks" for d in options.depths), "ratio", sep=" | "
    )
    for backend in options.backends:
        seconds = [in_a_new_process(backend, depth) for depth in options.depths]
        ratio = seconds[-1] / seconds[0]
        print(backend, *(f"{s:.1f}" for s in seconds), f"{ratio:.2f}", sep=" | ", flush=True)


if __name__ == "__main__":
    main()

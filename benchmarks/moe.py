"""Time of a mixture of experts as its number of experts grows while each token keeps its top two.

    python -m benchmarks.moe --backends c numba jax mlx --tokens 4096 512

Width 256, hidden width 512, float32. All functions of one backend and number of tokens take turns,
and medians are printed in ms, with their ratio to the first number of experts.
"""

import argparse
import os
import time

os.environ["PYTENSOR_FLAGS"] = os.environ.get("PYTENSOR_FLAGS", "") + ",floatX=float32"

import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor_ml.layers import MoE
from pytensor_ml.pytensorf import backend_mode, function


def mixture(n_experts, n_tokens, backend):
    """Return functions that run a mixture forward, and forward with all gradients."""
    moe = MoE("moe", d_model=256, hidden_dim=512, n_experts=n_experts, top_k=2)
    draws = np.random.default_rng(0).normal(size=(2, n_tokens, 256)).astype("float32")
    x, g = (pytensor.shared(v, shape=(None, 256)) for v in draws)
    y = moe(x)
    parameters = [moe.router.W, moe.gate, moe.up, moe.down]
    if backend == "jax":
        # As a training step leaves them. NumPy arrays would be copied in each call.
        import jax

        for variable in (x, g, *parameters):
            variable.container.storage[0] = jax.device_put(variable.get_value())
    gradients = pt.grad(None, [x, *parameters], known_grads={y: g})
    # What stays on the device need not be copied to be returned.
    sums = [v.ravel()[0] for v in gradients]
    return [function([], outputs, mode=backend_mode(backend)) for outputs in ([y], [y, *sums])]


def seconds(run):
    started = time.perf_counter()
    for output in run():
        np.asarray(output)
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", default=["c", "numba", "jax", "mlx"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 512])
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    passes = ["forward", "with gradients"]
    print(f"{'backend':8} {'tokens':>6} {'pass':15}", *(f"{n:>10}" for n in arguments.experts))
    for backend in arguments.backends:
        for n_tokens in arguments.tokens:
            compiled = {
                (n, name): run
                for n in arguments.experts
                for name, run in zip(passes, mixture(n, n_tokens, backend), strict=True)
            }
            for run in compiled.values():
                run()
            times = {key: [] for key in compiled}
            for _ in range(arguments.rounds):
                for key, run in compiled.items():
                    times[key].append(1000 * seconds(run))
            for name in passes:
                medians = [np.median(times[n, name]) for n in arguments.experts]
                ratios = [f"{m:.1f} ms" for m in medians[:1]]
                ratios += [f"{m:.1f} {m / medians[0]:.2f}x" for m in medians[1:]]
                print(f"{backend:8} {n_tokens:6} {name:15}", *(f"{r:>10}" for r in ratios))


if __name__ == "__main__":
    main()

"""A PyMC model with a network inside, sampled with NUTS.

A network of layers is the mean of a regression. It is an ordinary graph, so ``graph_replace`` puts
random variables of PyMC in the place of its parameters, and the gradient that NUTS needs goes
through the layers' ops. Hidden units can be swapped, so R-hat is taken of the mean at the points
and not of weights. The picture shows the posterior of the mean and the posterior predictive band,
which widen where there are no points. This needs the extra ``pymc``. Run it with
``python docs/examples/pymc_network.py``.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import pymc as pm
import pytensor
from arviz_stats import rhat
from matplotlib.figure import Figure
from pytensor.graph.replace import graph_replace

from pytensor_ml.activations import Tanh
from pytensor_ml.layers import Linear, Sequential
from pytensor_ml.pytensorf import BACKENDS, backend_mode, collect_trainable_params

NOISE = 0.25

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", choices=[b for b in BACKENDS if b != "mlx"], default="numba")
parser.add_argument("--quick", action="store_true", help="few draws of a smaller network")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)


def truth(x):
    return np.sin(2 * x) + 0.3 * x


def main(options):
    hidden, tune, draws = (2, 60, 40) if options.quick else (6, 500, 500)
    compile_kwargs = {"mode": backend_mode(options.backend)}
    rng = np.random.default_rng(options.seed)
    x = np.sort(np.concatenate([rng.uniform(-2, -0.5, 30), rng.uniform(0.7, 2, 30)]))
    y = truth(x) + rng.normal(0, NOISE, x.size)
    network = Sequential(
        Linear("hidden", n_in=1, n_out=hidden), Tanh(), Linear("out", n_in=hidden, n_out=1)
    )

    with pm.Model():
        points = pm.Data("points", x[:, None])
        mean = network(points)[:, 0]
        priors = {
            parameter: pm.Normal(parameter.name, 0, 1, shape=parameter.type.shape)
            for parameter in collect_trainable_params(mean)
        }
        mean = pm.Deterministic("mean", graph_replace(mean, priors))
        noise = pm.HalfNormal("noise", 0.5)
        pm.Normal("y", mean, noise, observed=y, shape=mean.shape)

        started = time.perf_counter()
        trace = pm.sample(
            draws=draws,
            tune=tune,
            chains=2,
            cores=1,
            target_accept=0.9,
            random_seed=options.seed,
            progressbar=False,
            compute_convergence_checks=False,
            compile_kwargs=compile_kwargs,
        )
        seconds = time.perf_counter() - started
        grid = np.linspace(-3, 3, 121)
        pm.set_data({"points": grid[:, None]})
        predicted = pm.sample_posterior_predictive(
            trace,
            var_names=["mean", "y"],
            random_seed=options.seed,
            progressbar=False,
            compile_kwargs=compile_kwargs,
        ).posterior_predictive

    def quantiles(name):
        return np.quantile(predicted[name], [0.05, 0.5, 0.95], axis=(0, 1))

    low, _, high = quantiles("y")
    inside = (np.interp(x, grid, low) < y) & (y < np.interp(x, grid, high))
    diverging = int(trace.sample_stats["diverging"].sum())
    worst = float(rhat(trace, var_names=["mean"])["mean"].max())
    print(f"{2 * draws} draws in {seconds:.0f} s with compilation, {diverging} of them diverging")
    print(f"R-hat of the mean at the points is at most {worst:.3f}")
    print(f"the noise is {float(trace.posterior['noise'].mean()):.3f}, where the data have {NOISE}")
    print(f"{inside.mean():.0%} of the points lie in the 90% band of the posterior predictive")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label, alpha in (("y", "90% of new points", 0.15), ("mean", "90% of the mean", 0.4)):
        low, middle, high = quantiles(name)
        axes.fill_between(grid, low, high, color="C0", alpha=alpha, linewidth=0, label=label)
    axes.plot(grid, middle, color="C0", label="median of the mean")
    axes.plot(grid, truth(grid), color="black", linestyle="--", label="truth")
    axes.plot(x, y, ".", color="C1", label="data")
    axes.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    axes.legend(fontsize=8)
    path = options.folder / "pymc_network.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"wrote {path}")


if __name__ == "__main__":
    # In float32 the energy, a sum over all points, is too coarse for small steps.
    pytensor.config.floatX = "float64"
    logging.getLogger("pymc").setLevel(logging.ERROR)
    # NUTS turns back where a trajectory runs away in its first steps.
    warnings.filterwarnings("ignore", message="overflow encountered in dot")
    warnings.filterwarnings("ignore", message="The RandomType SharedVariables")
    # The linker's advice about BLAS is repeated in the README.
    warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
    main(parser.parse_args())

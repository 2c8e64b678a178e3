"""A layer of one's own, with a Numba kernel for its op.

The layer averages each feature over the tokens so far, the older the less: y = (1 - a) h with
h[t] = a h[t - 1] + x[t] and a decay a between 0 and 1 for each feature. Its op defines h by a sum
over all pairs of tokens, which every backend runs as it is. For Numba a kernel takes one pass over
the tokens instead. The op's pullback is the same op on reversed tokens, so the kernel computes
gradients too. Values and gradients are compared with those of the definition on other backends;
the picture shows how long both take by the number of tokens. Run it with
``python docs/examples/custom_layer.py``.
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
from matplotlib.figure import Figure
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.base import Layer, UnaryLayerOp
from pytensor_ml.dispatch.numba.basic import kernel_key, register_kernel
from pytensor_ml.layers import Input
from pytensor_ml.params import trainable_parameter
from pytensor_ml.pytensorf import BACKENDS, backend_mode, function
from pytensor_ml.state import NormalInitializer

BATCH, FEATURES = 4, 16


class MovingAverage(Layer):
    """Average each feature over the tokens so far; ``logit`` is the decay before a sigmoid."""

    def __init__(self, name, *, n_in):
        law = NormalInitializer(mean=2.0, std=1.0)
        self.logit = trainable_parameter(f"{name}_logit", (n_in,), law, layer_name=name)

    def __call__(self, x):
        decay = pt.sigmoid(self.logit)
        return (1 - decay) * DecayedSum()(x, decay)


class DecayedSum(UnaryLayerOp):
    """h[t] = a h[t - 1] + x[t], of x (batch, tokens, features) and the decay a (features,)."""

    __props__ = ()

    def build_inner_graph(self, x, decay):
        return [decayed_sum(x, decay)]

    def pullback(self, inputs, outputs, cotangents):
        x, decay = inputs
        x_bar = self(cotangents[0][:, ::-1], decay)[:, ::-1]
        before = pt.concatenate([pt.zeros_like(x[:, :1]), outputs[0][:, :-1]], axis=1)
        return [x_bar, (x_bar * before).sum(axis=(0, 1), acc_dtype=x.type.dtype)]


def decayed_sum(x, decay):
    """Sum over all pairs of tokens, each weighed by a power of the decay."""
    # JAX counts no further than what it knows when it compiles.
    token = pt.cumsum(pt.ones_like(x[0, :, 0], dtype="int32"))
    lag = (token[:, None] - token[None, :])[:, :, None]
    weights = pt.where(lag >= 0, decay ** pt.maximum(lag, 0).astype(decay.type.dtype), 0)
    return (weights * x[:, None]).sum(axis=2, acc_dtype=x.type.dtype)


@register_kernel(DecayedSum)
def numba_funcify_decayed_sum(op, node, **kwargs):
    @numba_njit
    def decayed_sum_kernel(x, decay):
        h = np.empty(x.shape, x.dtype)
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                for i in range(x.shape[2]):
                    h[b, t, i] = x[b, t, i] + (decay[i] * h[b, t - 1, i] if t else 0)
        return h

    # What Numba has cached is found by this key, which is of all that the kernel reads besides its
    # arguments, and by their types.
    return decayed_sum_kernel, kernel_key(type(op))


def compile_for(backend, y):
    """Compile a function to y and to the gradients of a loss of it."""
    loss = (y**2).mean()
    gradients = pytensor.grad(loss, [x, layer.logit])
    return function([x], [y, *gradients], mode=backend_mode(backend))


def seconds_of(run, batch):
    """Return the least time of a few calls."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        [np.asarray(result) for result in run(batch)]
        times.append(time.perf_counter() - started)
    return min(times)


pytensor.config.floatX = "float32"
# JAX is asked for sums in float64, which it has only if floatX is, and takes float32.
warnings.filterwarnings("ignore", message="Explicitly requested dtype")
# The linker's advice about BLAS is repeated in the README.
warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="to compare on"
)
parser.add_argument("--quick", action="store_true", help="few tokens")
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)
options = parser.parse_args()
lengths = [32, 64] if options.quick else [32, 64, 128, 256, 512]

layer = MovingAverage("average", n_in=FEATURES)
layer.logit.initializer(layer.logit, 0)
x = Input("x", shape=(None, None, FEATURES))
decay = pt.sigmoid(layer.logit)
definition = (1 - decay) * decayed_sum(x, decay)
rng = np.random.default_rng(0)
batches = [rng.normal(size=(BATCH, n, FEATURES)).astype("float32") for n in lengths]

with_kernel = compile_for("numba", layer(x))
expected = [with_kernel(batch) for batch in batches]
seconds = {"kernel, numba": [seconds_of(with_kernel, batch) for batch in batches]}
for backend in options.backends:
    run = compile_for(backend, definition)
    difference = max(
        np.abs(np.asarray(a) - b).max() / np.abs(b).max()
        for batch, results in zip(batches, expected, strict=True)
        for a, b in zip(run(batch), results, strict=True)
    )
    seconds[f"definition, {backend}"] = [seconds_of(run, batch) for batch in batches]
    ratio = seconds[f"definition, {backend}"][-1] / seconds["kernel, numba"][-1]
    print(
        f"{backend}: definition and kernel differ by {difference:.1e}; for {lengths[-1]} tokens "
        f"the definition takes {ratio:.0f} times as long"
    )

figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
for label, taken in seconds.items():
    axes.loglog(lengths, 1e3 * np.array(taken), marker="o", label=label)
axes.set_xticks(lengths, labels=lengths, minor=False)
axes.minorticks_off()
axes.set(xlabel="tokens", ylabel="value and gradients (ms)")
axes.legend()

path = options.folder / "custom_layer.png"
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=90)
print(f"wrote {path}")

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, in_python, normal
from pytensor_ml.loss import CrossEntropyLayer

CLASSES = 19


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


@pytest.fixture(scope="module")
def functions():
    """Losses, sums and gradients, of kernels and of inner graphs."""
    logits = pt.tensor("logits", shape=(None, None, CLASSES), dtype="float32")
    ids = pt.tensor("ids", shape=(None, None), dtype="int32")
    g = pt.tensor("g", shape=(None, None), dtype="float32")
    outputs = []
    for settings in ((None, 0.0), (2, 0.25)):
        op = CrossEntropyLayer(ignore_index=settings[0], label_smoothing=settings[1])
        losses, log_sums = op(logits, ids)
        outputs += [losses, log_sums, pt.grad(None, logits, known_grads={losses: g})]
    inputs = [logits, ids, g]
    return pytensor.function(inputs, emptied(outputs)), in_python(inputs, outputs)


def test_kernels_stand_in_for_inner_graphs(functions):
    run, run_inner_graphs = functions
    logits, g = normal(3, 11, CLASSES) * 5, normal(3, 11)
    ids = np.arange(33, dtype="int32").reshape(3, 11) % CLASSES
    spoiled, wrong = logits.copy(), ids.copy()
    spoiled[0, 0, 4] = np.nan
    spoiled[0, 1, :9] = -np.inf
    spoiled[0, 2] = -np.inf
    spoiled[0, 3, 5] = np.inf
    wrong[1, :4] = [-1, CLASSES, -CLASSES, 2**31 - 1]
    scattered = [x.swapaxes(0, 1)[::-1] for x in (normal(11, 3, CLASSES), ids.T, normal(11, 3))]
    # Of several parts.
    many = normal(19, 79, CLASSES), np.arange(1501, dtype="int32").reshape(19, 79) % CLASSES
    cases = [
        (logits, ids, g),
        (*many, normal(19, 79)),
        (1000 * logits, ids, g),
        (spoiled, ids, g),
        (logits, wrong, g),
        scattered,
        (logits[:0], ids[:0], g[:0]),
    ]
    for case in cases:
        for result, right in zip(run(*case), run_inner_graphs(*case), strict=True):
            np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
            assert_close(np.nan_to_num(result), np.nan_to_num(right), 2e-6)


def test_kernels_refuse_unequal_shapes(functions):
    run, _ = functions
    logits, ids, g = normal(2, 3, CLASSES), np.zeros((2, 3), "int32"), normal(2, 3)
    with pytest.raises(ValueError, match="targets whose shape"):
        run(logits, ids[:, :2], g)
    with pytest.raises(ValueError, match="gradient of another shape"):
        run(logits, ids, g[:, :2])

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Constant
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors, applys_between
from references.loss import cross_entropy, distributions, smoothed

from pytensor_ml.loss import CrossEntropy, CrossEntropyPullback, SquaredError, supervised_loss
from pytensor_ml.pytensorf import function

CLASSES = 5
MANY = 2000
SMOOTHING = 0.2
IGNORED = -7


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(2, 4, MANY))).astype("float32")
    logits[0, 0, 1] = 90  # Its exponential overflows.
    ids = np.array([[1, 4, IGNORED, 0], [2, 3, IGNORED, 2]])
    return logits, ids


@pytest.fixture(scope="module")
def of_logits():
    """Losses of logits, with their gradients, compiled once."""
    logits = pt.tensor("logits", shape=(None, None, MANY), dtype="float32")
    ids = pt.tensor("ids", shape=(None, None), dtype="int64")
    q = pt.tensor("q", shape=(None, None, MANY), dtype="float32")
    losses = [
        CrossEntropy(expect_logits=True, ignore_index=IGNORED, label_smoothing=SMOOTHING)(
            ids, logits
        ),
        CrossEntropy("sum", expect_logits=True, expect_onehot_labels=True)(q, logits),
    ]
    outputs = [*losses, *(pt.grad(loss, logits) for loss in losses)]
    return outputs, function([ids, q, logits], outputs)


def test_cross_entropy_of_logits_and_ids_matches_numpy(data, of_logits):
    logits, ids = data
    counted = ids != IGNORED
    q = smoothed(distributions(np.where(counted, ids, 0), MANY), SMOOTHING)
    losses, gradient = cross_entropy(q, logits.astype("float64"))
    mean, _, dmean, _ = of_logits[1](ids, q.astype("float32"), logits)
    assert_close(mean, losses[counted].mean())
    assert_close(dmean, gradient * counted[..., None] / counted.sum())


def test_cross_entropy_of_logits_and_distributions_matches_numpy(data, of_logits):
    """A logit of -inf is a class that cannot be."""
    logits, ids = data
    q = np.random.default_rng(1).dirichlet(np.ones(MANY), size=ids.shape).astype("float32")
    logits = logits.copy()
    logits[1, 1, 0] = -np.inf
    q[1, 1] = distributions(2, MANY)
    losses, gradient = cross_entropy(
        q.astype("float64"), np.where(np.isinf(logits), -1e4, logits.astype("float64"))
    )
    _, total, _, dtotal = of_logits[1](ids, q, logits)
    assert_close(total, losses.sum())
    assert_close(dtotal, gradient)


def test_small_losses_are_exact(data, of_logits):
    """Beside a probability of almost 1, a serial float32 sum loses the others."""
    logits, ids = data
    logits = np.random.default_rng(2).uniform(-18, -17, size=logits.shape).astype("float32")
    logits[..., 0] = 0
    q = distributions(np.zeros_like(ids), MANY)
    losses, _ = cross_entropy(q, logits.astype("float64"))
    assert losses.mean() > 4e-5
    _, total, _, _ = of_logits[1](ids, q.astype("float32"), logits)
    assert abs(float(total) - losses.sum()) < 1e-6
    losses, _ = cross_entropy(smoothed(q, SMOOTHING), logits.astype("float64"))
    mean, _, _, _ = of_logits[1](np.zeros_like(ids), q.astype("float32"), logits)
    assert abs(float(mean) - losses.mean()) < 5e-6


@pytest.mark.compiles_nothing
def test_second_derivatives_match_differences_of_first_ones():
    """The sums of exponentials, which the gradient reads, depend on the logits."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(4, CLASSES)).astype("float32")
    along = rng.normal(size=logits.shape).astype("float32")
    ids = np.array([1, 4, IGNORED, 0])
    z, v = (pt.tensor(name, shape=(None, CLASSES), dtype="float32") for name in ("z", "v"))
    loss = CrossEntropy(expect_logits=True, ignore_index=IGNORED, label_smoothing=SMOOTHING)(ids, z)
    # No backend has a kernel for it, so that interpreting the graph is enough.
    with pytensor.config.change_flags(mode=Mode(linker="py", optimizer=None), cxx=""):
        product = function([z, v], pt.grad((pt.grad(loss, z) * v).sum(), z))(logits, along)

    counted = ids != IGNORED
    q = smoothed(distributions(np.where(counted, ids, 0), CLASSES), SMOOTHING)
    step = 1e-4 * along.astype("float64")
    _, after = cross_entropy(q, logits + step)
    _, before = cross_entropy(q, logits - step)
    assert_close(product, (after - before) / 2e-4 * counted[:, None] / 3, 5e-6)


@pytest.mark.compiles_nothing
def test_no_constant_is_too_large_to_be_cached():
    """Numba caches no function with a constant above 1e6 bytes, as ids of Gemma's classes are."""
    logits = pt.tensor("logits", shape=(None, 262_144), dtype="float32")
    ids = pt.tensor("ids", shape=(None,), dtype="int64")
    loss = CrossEntropy(expect_logits=True)(ids, logits)
    nodes = applys_between([], [loss, pt.grad(loss, logits)])
    graphs = [node.op.fgraph.unfreeze().outputs for node in nodes if hasattr(node.op, "fgraph")]
    rewritten = [
        rewrite_graph(outputs, include=("fast_run",), exclude=("inplace",)) for outputs in graphs
    ]
    constants = [v for outputs in rewritten for v in ancestors(outputs) if isinstance(v, Constant)]
    assert 262_144 in {np.max(v.data) for v in constants}
    assert max(np.asarray(v.data).nbytes for v in constants) < 1e6


def test_an_id_of_no_class_gives_nan(data, of_logits):
    logits, ids = data
    for wrong in (MANY, -1):
        changed = ids.copy()
        changed[0, 0] = wrong
        assert np.isnan(of_logits[1](changed, np.zeros_like(logits), logits)[0])


def test_a_batch_without_targets_has_a_loss_of_0(data, of_logits):
    logits, ids = data
    q = np.zeros_like(logits)
    loss, _, gradient, _ = of_logits[1](np.full_like(ids, IGNORED), q, logits)
    assert loss == 0
    assert not np.asarray(gradient).any()


def test_shapes_that_differ_when_run_are_refused(data, of_logits):
    logits, _ = data
    for wrong in ((2, 1), (1, 4), (2, 3)):
        with pytest.raises((AssertionError, ValueError), match="shape"):
            of_logits[1](np.zeros(wrong, "int64"), np.zeros_like(logits), logits)


def test_the_graph_is_float32_and_the_gradient_one_op(of_logits):
    """Kernels may sum in float64; the graph may not."""
    outputs, _ = of_logits
    nodes = list(applys_between([], outputs))
    assert "float64" not in {v.type.dtype for node in nodes for v in node.outputs}
    assert "float64" not in {getattr(node.op, "acc_dtype", None) for node in nodes}
    nodes = applys_between([], outputs[2:3])
    assert sum(isinstance(node.op, CrossEntropyPullback) for node in nodes) == 1


@pytest.fixture(scope="module")
def of_probabilities():
    p = pt.tensor("p", shape=(None, CLASSES), dtype="float32")
    q = pt.tensor("q", shape=(None, CLASSES), dtype="float32")
    ids = pt.tensor("ids", shape=(None,), dtype="int8")
    losses = [
        CrossEntropy(label_smoothing=SMOOTHING, ignore_index=IGNORED)(ids, p),
        CrossEntropy(expect_onehot_labels=True)(q, p),
        SquaredError()(q, p),
    ]
    return function([ids, q, p], [*losses, *(pt.grad(loss, p) for loss in losses[:2])])


def test_losses_of_probabilities_match_numpy(of_probabilities):
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(CLASSES), size=4).astype("float32")
    ids = np.array([1, 4, IGNORED, 0], "int8")
    counted = ids != IGNORED
    q = distributions(np.where(counted, ids, 0), CLASSES)
    wide, share = p.astype("float64"), counted[:, None] / 3
    results = of_probabilities(ids, q.astype("float32"), p)
    target = smoothed(q, SMOOTHING)
    assert_close(results[0], -(share * target * np.log(wide)).sum())
    assert_close(results[3], -share * target / wide)
    assert_close(results[1], -(q * np.log(wide)).sum(axis=-1).mean())
    assert_close(results[4], -q / wide / 4)
    assert_close(results[2], ((q - wide) ** 2).mean())


def test_impossible_classes_that_are_not_wanted_cost_nothing(of_probabilities):
    p = np.array([[0.5, 0.5, 0, 0, 0]], "float32")
    q = np.array([[1, 0, 0, 0, 0]], "float32")
    results = of_probabilities(np.array([0], "int8"), q, p)
    assert_close(results[1], np.log(2), 1e-6)
    assert_close(results[4], [[-2, 0, 0, 0, 0]])


def test_an_impossible_class_of_an_ignored_target_has_no_gradient(of_probabilities):
    p = np.array([[0, 0.5, 0.5, 0, 0], [0.2] * 5], "float32")
    results = of_probabilities(np.array([IGNORED, 1], "int8"), np.ones_like(p), p)
    target = smoothed(distributions(np.array([1]), CLASSES), SMOOTHING)
    assert_close(results[3], np.vstack([np.zeros((1, CLASSES)), -target / 0.2]))


def test_logits_taken_for_probabilities_give_nan(of_probabilities):
    """Their loss could fall without a bound, and nobody would notice."""
    ids, q = np.array([0], "int8"), np.eye(1, CLASSES, dtype="float32")
    for p in ([0.2, 0.2, 0.3, 0.3, -0.1], [0.9, 0.9, 0, 0, 0]):
        assert np.isnan(of_probabilities(ids, q, np.array([p], "float32"))[:2]).all()
    p = np.full((1, CLASSES), 0.1, "float32")
    assert np.isfinite(of_probabilities(ids, q, p)[:2]).all()


@pytest.mark.compiles_nothing
def test_a_callable_reduction_gets_every_loss():
    shapes = []

    def keep(losses):
        shapes.append(losses.type.shape)
        return losses.sum()

    logits = pt.tensor("logits", shape=(3, CLASSES), dtype="float32")
    CrossEntropy(keep, expect_logits=True)(np.array([0, 1, 2]), logits)
    SquaredError(keep)(logits, logits)
    assert shapes == [(3,), (3, CLASSES)]


@pytest.mark.compiles_nothing
def test_targets_follow_the_prediction():
    logits = pt.tensor("logits", shape=(None, 3, CLASSES), dtype="float32")
    _, ids = supervised_loss(logits, CrossEntropy(expect_logits=True))
    assert (ids.name, ids.type.shape, ids.type.dtype) == ("target", (None, 3), "int64")
    _, q = supervised_loss(logits, CrossEntropy(expect_onehot_labels=True))
    assert (q.type.shape, q.type.dtype) == ((None, 3, CLASSES), "float32")


@pytest.mark.compiles_nothing
def test_errors_name_what_does_not_fit():
    p = pt.tensor("p", shape=(4, CLASSES), dtype="float32")
    ids = pt.tensor("ids", shape=(3,), dtype="int64")
    loss = CrossEntropy(expect_logits=True)
    with pytest.raises(ValueError, match=r"targets of shape \(3,\) for predictions of .*\(4, 5\)"):
        loss(ids, p)
    with pytest.raises(ValueError, match=r"targets of shape \(4, 1\)"):
        loss(pt.tensor("ids", shape=(4, 1), dtype="int64"), p)
    with pytest.raises(ValueError, match=r"targets of shape \(4, 1\)"):
        SquaredError()(pt.tensor("y", shape=(4, 1), dtype="float32"), p)
    with pytest.raises(TypeError, match="targets have dtype float32"):
        loss(p[:, 0], p)
    with pytest.raises(TypeError, match="targets have dtype int64"):
        CrossEntropy(expect_onehot_labels=True)(p.astype("int64"), p)
    with pytest.raises(ValueError, match="number of classes"):
        loss(ids, pt.tensor("p", shape=(3, None), dtype="float32"))
    with pytest.raises(ValueError, match="no reduction 'median'"):
        SquaredError("median")
    with pytest.raises(ValueError, match="label_smoothing=1"):
        CrossEntropy(label_smoothing=1)
    with pytest.raises(ValueError, match=r"ignore_index=0.* every row would count"):
        CrossEntropy(expect_onehot_labels=True, ignore_index=0)

import pickle

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from dispatch import norm_checks
from pytensor_ml.dispatch.c.norm import NormKernel
from pytensor_ml.layers.norm import RMSNorm


@pytest.fixture(autouse=True)
def _only_on_c(backend):
    if backend != "c":
        pytest.skip("about C")


def test_kernels_stand_in_for_inner_graphs():
    norm_checks.check_kernels_stand_in_for_inner_graphs()


def test_kernels_take_rows_of_any_magnitude():
    norm_checks.check_rows_of_any_magnitude()


def test_kernels_refuse_unequal_shapes():
    norm_checks.check_kernels_refuse_unequal_shapes()


def test_precise_sum_runs_as_a_kernel():
    norm_checks.check_precise_sum_runs_as_a_kernel()


def test_a_kernel_computes_its_layer_op_in_python_too():
    x = pt.tensor("x", shape=(None, 5), dtype="float32")
    run = pytensor.function([x], RMSNorm(affine=False)(x))
    (node,) = run.maker.fgraph.apply_nodes
    assert isinstance(node.op, NormKernel)
    value = np.random.default_rng(14).normal(size=(3, 5)).astype("float32")
    storage = [[None]]
    node.op.perform(node, [value, np.ones(5, "float32")], storage)
    np.testing.assert_allclose(storage[0][0], run(value), rtol=1e-6)
    assert node.op.infer_shape(node, [(7, 5), (5,)])[0][0] == 7


def test_a_kernel_leaves_little_in_the_key_of_its_module():
    x = pt.tensor("x", shape=(None, 5), dtype="float32")
    run = pytensor.function([x], RMSNorm(affine=False)(x))
    run(np.ones((2, 5), "float32"))
    (node,) = run.maker.fgraph.apply_nodes
    node.op.perform(node, [np.ones((2, 5), "float32"), np.ones(5, "float32")], [[None]])
    pickled = pickle.dumps(node.op)
    assert pickle.loads(pickled) == node.op
    assert len(pickled) < 500

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.compile.mode import get_mode

from pytensor_ml.base import BlockOp
from pytensor_ml.dispatch.numba.linker import NodeByNode, _function_of
from pytensor_ml.layers import Input, Linear, call_as_block
from pytensor_ml.pytensorf import backend_mode, function


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


@pytest.fixture(scope="module")
def chain():
    """Blocks one after another, of more arrays than one function takes."""
    linears = [Linear(f"fc_{i}", n_in=4, n_out=4) for i in range(40)]
    x, other = Input("x", shape=(None, 4)), Input("other", shape=(None, 4))
    y = x
    for linear in linears:
        y = call_as_block(linear, y)
    total = pytensor.shared(np.zeros((), "float32"), name="total")
    filled = [pt.alloc(value, x.shape[0]) for value in (pt.argmax(x[0]), x[0, 0])]
    run = function([x, other], [y, other + y, *filled], updates={total: total + y.sum()})
    return linears, total, run


def test_graphs_of_many_arrays_run_node_by_node_with_one_function_an_op(chain):
    linears, total, run = chain
    blocks = [step for step in run.vm.steps if isinstance(step.node.op, BlockOp)]
    assert len(blocks) == 40
    assert len({step.function for step in blocks}) == 1

    rng = np.random.default_rng(0)
    value, other = rng.normal(size=(2, 3, 4)).astype("float32")
    expected = value.astype("float64")
    for linear in linears:
        linear.W.set_value(np.linalg.qr(rng.normal(size=(4, 4)))[0].astype("float32"))
        linear.b.set_value(rng.normal(size=4).astype("float32"))
        expected = expected @ linear.W.get_value() + linear.b.get_value()
    for i in range(1, 3):
        y, shifted, *filled = run(value, other)
        assert_close(y, expected, 1e-5)
        assert_close(shifted, expected + other, 1e-5)
        assert_close(total.get_value(), i * expected.sum(), 1e-4)
        # Ops of one kind for two dtypes are two functions.
        np.testing.assert_array_equal(filled, [[value[0].argmax()] * 3, [value[0, 0]] * 3])
        assert [v.dtype for v in filled] == ["int64", "float32"]

    kept = [id(cell) for cell in run.vm.outputs]
    cells = [cell for step in run.vm.steps for cell in step.outputs if id(cell) not in kept]
    assert all(cell[0] is None for cell in cells)


def test_errors_name_the_node(chain):
    *_, run = chain
    with (
        pytensor.config.change_flags(exception_verbosity="medium"),
        pytest.raises(ValueError, match=r"incompatible shape[^$]*Apply node.*: Add\(other,"),
    ):
        run(np.zeros((2, 4), "float32"), np.zeros((3, 4), "float32"))


def test_small_graphs_and_other_modes_keep_their_linker():
    x = Input("x", shape=(None,))
    assert not isinstance(function([x], 2 * x).vm, NodeByNode)
    assert backend_mode("c").linker is get_mode("CVM").linker


def test_nodes_are_compiled_without_a_cache_if_it_is_off():
    """Numba refuses to cache what no file holds."""
    node = (2 * Input("x", shape=(3,), dtype="float32")).owner
    with pytensor.config.change_flags(numba__cache=False):
        run = _function_of(node, {}, {})
        two, value = np.ones(1, "float32") * 2, np.arange(3, dtype="float32")
        np.testing.assert_array_equal(run(two, value), 2 * value)

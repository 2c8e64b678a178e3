import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply
from pytensor.link.c.op import COp
from pytensor.utils import hash_from_code

from dispatch import thread_checks
from pytensor_ml.dispatch.c.threads import THREADS


@pytest.fixture(autouse=True)
def _only_on_c(backend):
    if backend != "c":
        pytest.skip("about C")


class CountItems(COp):
    """How often each item is done, in so many parts; 13 are too many for the memory."""

    __props__ = ()

    def make_node(self, n_items, n_parts):
        return Apply(self, [n_items, n_parts], [pt.lvector()])

    def perform(self, node, inputs, outputs):
        raise NotImplementedError

    def c_code_cache_version(self):
        return (hash_from_code(THREADS),)

    def c_support_code(self, **kwargs):
        return THREADS

    def c_code(self, node, name, inputs, outputs, sub):
        n_items, n_parts = (f"*(npy_int64*)PyArray_DATA({x})" for x in inputs)
        (out,) = outputs
        return f"""
        npy_intp n_items = {n_items};
        Py_XDECREF({out});
        {out} = (PyArrayObject*)PyArray_ZEROS(1, &n_items, NPY_INT64, 0);
        npy_int64* const counts = (npy_int64*)PyArray_DATA({out});
        const auto work = [=](npy_intp first, npy_intp stop) {{
            for (npy_intp i = first; i < stop; ++i) ++counts[i];
            if (n_items == 13 && stop == n_items) throw std::bad_alloc();
        }};
        if (!pytensor_ml_threads::find_threads() ||
            !pytensor_ml_threads::in_threads(n_items, {n_parts}, work)) {{ {sub["fail"]} }}
        """


def test_parts_do_every_item_once_and_an_error_in_one_is_not_lost():
    n_items, n_parts = pt.lscalars("n_items", "n_parts")
    run = pytensor.function([n_items, n_parts], CountItems()(n_items, n_parts))
    for items in (0, 1, 5, 1000):
        for parts in (1, 2, 7, 64):
            np.testing.assert_array_equal(run(items, parts), np.ones(items))
    for parts in (1, 3):
        with pytest.raises(MemoryError, match="no memory"):
            run(13, parts)


def test_products():
    thread_checks.check_products()


def test_norms():
    thread_checks.check_norms()


def test_attention():
    thread_checks.check_attention()


def test_rotations():
    thread_checks.check_rotations()


def test_gated_activations():
    thread_checks.check_gated_activations()

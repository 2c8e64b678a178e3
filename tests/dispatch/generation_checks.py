"""What the kernels of generation must do on every backend that has them."""

import numpy as np
import pytensor
import pytensor.tensor as pt

from dispatch.attention_checks import emptied, normal
from pytensor_ml.generation import CacheWrite


def check_cache_write():
    cache = pt.tensor("cache", shape=(2, 3, 8, 4), dtype="float32")
    new = pt.tensor("new", shape=(2, 3, None, 4), dtype="float32")
    slot = pt.lscalar("slot")
    run = pytensor.function([cache, new, slot], emptied([CacheWrite()(cache, new, slot)]))
    for first, n_new in ((0, 8), (5, 1), (3, 4)):
        held, fresh = normal(2, 3, 8, 4), normal(2, 3, n_new, 4)
        [written] = run(held, fresh, first)
        expected = held.copy()
        expected[:, :, first : first + n_new] = fresh
        np.testing.assert_array_equal(np.asarray(written), expected)

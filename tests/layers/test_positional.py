import json
from pathlib import Path

import mpmath as mp
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.gradient import DisconnectedInputError
from pytensor.graph.rewriting.utils import rewrite_graph
from references import positional as reference

from pytensor_ml.layers.attention import KVCache, cached_attention
from pytensor_ml.layers.positional import (
    ApplyRotary,
    IntegerRotaryEmbedding,
    RotaryEmbedding,
    RotaryTable,
    apply_rotary,
    rotary_embedding,
    rotary_table,
)
from pytensor_ml.layers.rotary_scaling import rotary_frequencies

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rope_scaling.json").read_text())
KINDS = {
    "none": {},
    "linear": {"scaling": "linear", "scaling_factor": 4.0},
    "ntk": {"scaling": "ntk", "scaling_factor": 4.0},
    "yarn": {
        "scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
    "llama3": {
        "scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "proportional": {
        "scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    },
}
TABLE_KINDS = list(KINDS)
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXACT_POSITIONS = [0, 1, 40, 131071, 1_000_000, 2_000_000, 3_999_999, 16_777_215, -1, -16_777_215]
FAR_POSITIONS = [16_777_216, 16_777_217, 2**31 - 1, -(2**31) + 1, 1_234_567_890, -987_654_321]


def reference_frequencies(scaling, rotary_dim, base, length=1):
    numbers = {key: value for key, value in scaling.items() if key != "rope_type"}
    return reference.frequencies(scaling["rope_type"], rotary_dim, base, length, **numbers)


def as_mapping(scaling="none", scaling_factor=1.0):
    """Return a layer's scaling options in the form that the reference reads."""
    if isinstance(scaling, str):
        kind = "default" if scaling == "none" else scaling
        return {"rope_type": kind, "factor": scaling_factor}
    return scaling


# Frequencies and attention factors of 4 of 6 pairs, and of all.
PARTIAL = reference_frequencies(KINDS["yarn"]["scaling"], 8, 10_000)
WHOLE = reference.frequencies("default", 12, 10_000)


@pytest.fixture(scope="module")
def tables(floatX):
    """A function from positions to one table of each kind, compiled once for the module."""
    p = pt.lvector("p")
    outputs = {
        "wide": rotary_table(p, rotary_dim=128, dtype=floatX),
        "batched": rotary_table(p[None], rotary_dim=128, dtype=floatX)[0],
        "longrope": rotary_table(p, rotary_dim=8, scaling=LONGROPE, dtype=floatX),
        "integer": IntegerRotaryEmbedding(12, 8, 10_000, 1024)(p),
        "int8": rotary_table(p.astype("int8"), rotary_dim=8, dtype=floatX),
        "uint8": rotary_table(p.astype("uint8"), rotary_dim=8, dtype=floatX),
        "uint64": rotary_table(p.astype("uint64"), rotary_dim=8, dtype=floatX),
    }
    for kind in TABLE_KINDS:
        outputs[kind] = rotary_table(p, rotary_dim=8, dtype=floatX, **KINDS[kind])
    compiled = pytensor.function([p], list(outputs.values()))

    def evaluate(positions):
        positions = np.asarray(positions, "int64")
        # One length, which JAX compiles for once.
        values = compiled(np.append(positions, np.zeros(10 - len(positions), "int64")))
        return {
            name: np.asarray(value)[: len(positions)]
            for name, value in zip(outputs, values, strict=True)
        }

    return evaluate


@pytest.fixture(scope="module")
def rotate(floatX):
    """A function from x, a cotangent and positions to rotations by exact tables, and pullbacks."""
    x, g = (pt.tensor(name, shape=(None, 3, None, 12), dtype=floatX) for name in "xg")
    partial = pt.tensor("partial", shape=(None, 4, 2), dtype=floatX)
    batched = pt.tensor("batched", shape=(None, None, 6, 2), dtype=floatX)
    outputs = {}
    for pairing in ("half", "adjacent"):
        for table in (partial, batched):
            rotated = apply_rotary(x, table, pairing=pairing)
            outputs[pairing, table.name] = rotated
            outputs[pairing, table.name, "pullback"] = pt.grad(None, x, known_grads={rotated: g})
    compiled = pytensor.function([x, g, partial, batched], list(outputs.values()))

    def evaluate(x, positions, g=None):
        positions = np.broadcast_to(positions, (len(x), x.shape[2]))
        tables = [
            reference.table(positions[0], *PARTIAL).astype(floatX),
            reference.table(positions, *WHOLE).astype(floatX),
        ]
        values = compiled(x, x if g is None else g, *tables)
        return dict(zip(outputs, map(np.asarray, values), strict=True))

    return evaluate


@pytest.fixture(scope="module")
def x(floatX):
    return np.random.default_rng(0).normal(size=(2, 3, 5, 12)).astype(floatX)


def test_table_is_exact_at_every_position(tables, backend, floatX):
    near, far = (3e-7, 4e-7) if floatX == "float32" else (2e-12, 2e-12)
    theta, _ = reference.frequencies("default", 128, 10_000)
    for name, positions, bound in (
        ("|p| < 2**24", EXACT_POSITIONS, near),
        ("|p| < 2**31", FAR_POSITIONS, far),
    ):
        actual = tables(positions)["wide"]
        error = np.abs(actual - reference.table(positions, theta)).max()
        print(f"\n{backend}, {floatX} table, {name}: worst error {error:.3g}")
        assert error <= bound
        np.testing.assert_allclose((actual.astype("float64") ** 2).sum(-1), 1, atol=1e-6)
    assert (tables([16_777_216])["wide"] != tables([16_777_217])["wide"]).any()


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_scaled_table_equals_reference(tables, floatX, kind):
    positions = [0, 3, 100, -7, 70_000, 5_000_000]
    theta, attention = reference_frequencies(as_mapping(**KINDS[kind]), 8, 10_000)
    expected = reference.table(positions, theta, attention)
    bound = (3e-7 if floatX == "float32" else 2e-12) * float(attention)
    np.testing.assert_allclose(tables(positions)[kind], expected, rtol=0, atol=bound)


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_goes_by_the_length_at_hand(tables, floatX, length):
    positions = [7, length - 1, 0, -100, 33]
    theta, attention = reference_frequencies(LONGROPE, 8, 10_000, length)
    expected = reference.table(positions, theta, attention)
    bound = (3e-7 if floatX == "float32" else 2e-12) * float(attention)
    np.testing.assert_allclose(tables(positions)["longrope"], expected, rtol=0, atol=bound)


def test_positions_of_a_batch_give_the_same_rows(tables):
    rows = tables([3_999_999, -1, 40])
    np.testing.assert_array_equal(rows["batched"], rows["wide"])


def test_linear_factor_divides_positions(tables):
    np.testing.assert_allclose(tables([400])["linear"], tables([100])["none"], rtol=0, atol=3e-7)
    np.testing.assert_allclose(tables([8])["linear"], tables([2])["none"], rtol=0, atol=3e-7)


def test_every_integer_type_gives_the_same_rows(tables):
    rows = tables([0, 1, 100, 127])
    for dtype in ("int8", "uint8", "uint64"):
        np.testing.assert_array_equal(rows[dtype], rows["none"])
    rows = tables([-128, -1])
    np.testing.assert_array_equal(rows["int8"], rows["none"])
    np.testing.assert_array_equal(tables([255, 200])["uint8"], tables([255, 200])["none"])


def test_table_goes_by_the_values_of_positions(tables):
    positions = np.array([5, 9, 6, 8, 7])
    rows = tables(positions)["none"]
    np.testing.assert_array_equal(rows[np.argsort(positions)], tables(range(5, 10))["none"])
    assert (rows != tables(range(5))["none"]).any()


def test_positions_beyond_31_bits_are_nan(tables, backend, floatX):
    if backend == "jax" and floatX == "float32":
        pytest.skip("JAX without x64 has no such positions")
    results = tables([2**33, -(2**40), 3, -5])
    for name in ("none", "uint64"):
        assert np.isnan(results[name][:2]).all()
        assert np.isfinite(results[name][2]).all()
    # As an unsigned number -5 is 2**64 - 5.
    assert np.isnan(results["uint64"][3]).all()


def test_integer_rotary_embedding_equals_reference(tables):
    layer = IntegerRotaryEmbedding(12, 8, 10_000, 1024)
    assert layer.theta.dtype == "float32"
    np.testing.assert_allclose(layer.theta, [1, 0.1, 0.01, 0.001, 0, 0], rtol=6e-8)
    positions = [0, 1023, 1024, -5, 3_999_999, 2_000_000_000]
    theta = [mp.mpf(float(t)) for t in layer.theta]
    np.testing.assert_allclose(
        tables(positions)["integer"], reference.table(positions, theta), rtol=0, atol=4e-7
    )


def test_dynamic_goes_by_the_length_at_hand(floatX):
    if floatX == "float64":
        pytest.skip("a table is float32 whatever floatX is")
    p = pt.lvector("p")
    compiled = pytensor.function([p], rotary_table(p, rotary_dim=128, scaling=DYNAMIC))
    for length, base in (
        (2048, 10_000),
        (2049, "10009.92071178585742"),
        (4096, None),
        (8192, None),
        (1_500_000_000, None),
        (2048, 10_000),
    ):
        positions = [length - 1, length // 3, 7, 0, -length]
        theta, _ = reference_frequencies(DYNAMIC, 128, 10_000, length)
        if base is not None:
            plain, _ = reference.frequencies("default", 128, mp.mpf(base))
            assert max(abs(a - b) for a, b in zip(theta, plain, strict=True)) < 1e-15
        expected = reference.table(positions, theta)
        bound = 3e-7 if length < 2**24 else 4e-7
        np.testing.assert_allclose(compiled(np.array(positions)), expected, rtol=0, atol=bound)
    assert compiled(np.zeros(0, "int64")).shape == (0, 64, 2)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_reference(kind):
    theta, attention = reference_frequencies(as_mapping(**KINDS[kind]), 16, 10_000)
    actual, attention_factor = rotary_frequencies(rotary_dim=16, **KINDS[kind])
    np.testing.assert_allclose(actual, [float(t) for t in theta], rtol=1e-15)
    np.testing.assert_allclose(attention_factor, float(attention), rtol=1e-15)


@pytest.mark.compiles_nothing
def test_frequencies_equal_those_of_transformers():
    for entry in GOLDEN["entries"]:
        scaling = dict(entry["scaling"])
        if scaling["rope_type"] == "dynamic":
            scaling["max_position_embeddings"] = GOLDEN["max_position_embeddings"]
        frequencies, attention_factor = rotary_frequencies(
            rotary_dim=GOLDEN["rotary_dim"],
            base=entry["base"],
            scaling=scaling,
            length=entry["length"],
        )
        np.testing.assert_allclose(frequencies, entry["frequencies"], rtol=3e-6)
        np.testing.assert_allclose(attention_factor, entry["attention_factor"], rtol=1e-12)


@pytest.mark.compiles_nothing
def test_frequencies_equal_published_numbers():
    def frequencies(rotary_dim, base, **scaling):
        return rotary_frequencies(rotary_dim=rotary_dim, base=base, scaling=scaling)[0]

    llama3 = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = frequencies(64, 5e5)
    divisors = plain / frequencies(64, 5e5, factor=32.0, **llama3)
    np.testing.assert_allclose(divisors[:15], 1)
    np.testing.assert_allclose(divisors[15:18], [1.65132925, 3.29226210, 9.66672898], rtol=1e-8)
    np.testing.assert_allclose(divisors[18:], 32)

    yarn = frequencies(
        128, 1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096
    )
    expected = [5.6234133e-2, 5.4122770e-3, 3.3338036e-4, 2.8869550e-5]
    np.testing.assert_allclose(yarn[[20, 33, 46, 63]], expected, rtol=1e-7)

    base = frequencies(128, 1e4, rope_type="ntk", factor=4.0)[1] ** (-128 / 2)
    np.testing.assert_allclose(base, 40889.9424, rtol=1e-8)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"factor": 64.0}, 1.4158883),
        ({"factor": 64.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 128.0}, 1.485203),
        ({"max_position_embeddings": 64 * 4096}, 1.4158883),
    ],
)
def test_yarn_attention_factor(numbers, expected):
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **numbers}
    _, actual = rotary_frequencies(rotary_dim=64, scaling=scaling)
    np.testing.assert_allclose(actual, expected, rtol=1e-7)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_rotation_equals_reference(rotate, x, pairing):
    positions = np.array([[3, 1, 40_000, -1, 5], [9, 2, 6, 5, 3]])
    expected = reference.rotate(x, positions, WHOLE[0], pairing)
    assert_close(rotate(x, positions)[pairing, "batched"], expected)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_partial_rotation_leaves_the_other_channels(rotate, x, pairing):
    positions = [3, 0, 70_000, -2, 11]
    theta, attention = PARTIAL
    actual = rotate(x, positions)[pairing, "partial"]
    assert_close(actual, reference.rotate(x, positions, theta, pairing, attention))
    np.testing.assert_array_equal(actual[..., 8:], x[..., 8:])


def test_pairings_give_published_numbers(floatX):
    x, p = pt.tensor("x", shape=(1, 4), dtype=floatX), pt.lvector("p")
    outputs = [rotary_embedding(x, p, pairing=pairing) for pairing in ("half", "adjacent")]
    half, adjacent = pytensor.function([x, p], outputs)(np.array([[1, 2, 3, 4]], floatX), [3])
    tolerance = 2e-6 if floatX == "float32" else 1e-8  # As many digits as are published.
    assert_close(half[0], [-1.41335252, 1.87911807, -2.82885748, 4.05819114], tolerance)
    assert_close(adjacent[0], [-1.27223251, -1.83886500, 2.87866810, 4.08818664], tolerance)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("which", ["partial", "batched"])
def test_pullback_is_the_transposed_rotation(rotate, x, floatX, pairing, which):
    """The pullback of a rotation by p times a is the rotation by -p times a."""
    positions = np.array([3, 0, 70_000, -2, 11])
    g = np.random.default_rng(1).normal(size=x.shape).astype(floatX)
    theta, attention = PARTIAL if which == "partial" else WHOLE
    expected = reference.rotate(g, -positions, theta, pairing, attention)
    expected[..., 2 * len(theta) :] = g[..., 2 * len(theta) :]
    assert_close(rotate(x, positions, g=g)[pairing, which, "pullback"], expected)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_rotation_keeps_norms_and_starts_at_the_identity(rotate, x, pairing):
    rotated = rotate(x, [0, 5, 1_000_000, -3, 0])[pairing, "batched"]
    np.testing.assert_array_equal(rotated[:, :, [0, 4]], x[:, :, [0, 4]])
    norms = np.linalg.norm(rotated.astype("float64"), axis=-1)
    assert_close(norms, np.linalg.norm(x.astype("float64"), axis=-1), 1e-6)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_scores_depend_on_relative_position_only(rotate, x, floatX, pairing):
    same = np.tile(x[:, :, :1], (1, 1, 5, 1))
    scores = []
    for offset in (0, 100_000):
        rotated = rotate(same, np.array([5, 2, 0, 0, 0]) + offset)[pairing, "batched"]
        scores.append(np.prod(rotated[:, :, :2].astype("float64"), axis=2).sum(-1))
    assert_close(*scores, 1e-6 if floatX == "float32" else 1e-9)


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_turns_of_table_rows_add_up(tables, floatX, kind):
    """Rows as complex numbers: the turn from 2 to 5 is that from 100002 to 100005."""
    rows = tables([5, 2, 100_005, 100_002])[kind].astype("float64")
    z = rows[..., 0] + 1j * rows[..., 1]
    atol = 1e-6 if floatX == "float32" else 1e-11
    np.testing.assert_allclose(z[0] * z[1].conj(), z[2] * z[3].conj(), rtol=0, atol=atol)


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_one_table_row_equals_that_of_the_whole_sequence(tables, kind):
    positions = np.arange(60, 70)
    whole = tables(positions)[kind]
    for step in (0, 5, 9):
        np.testing.assert_array_equal(tables(positions[step : step + 1])[kind][0], whole[step])


def test_single_steps_with_a_cache_equal_all_tokens_at_once(tables, floatX):
    """Attention to rotated keys, for every kind that does not go by the length at hand."""
    n_tokens, shape = 5, (1, 2, None, 8)
    q, k, v, keys, values = (
        pt.tensor(name, shape=shape, dtype=floatX) for name in ("q", "k", "v", "keys", "values")
    )
    table, length = pt.tensor("table", shape=(None, 4, 2), dtype=floatX), pt.lscalar("length")
    rotated = apply_rotary(k, table)
    cache = KVCache(keys, values, length, pt.zeros((1,), dtype="int64"))
    y = cached_attention(apply_rotary(q, table), rotated, v, cache)
    run = pytensor.function([q, k, v, table, length, keys, values], [y, rotated])

    rng = np.random.default_rng(8)
    tokens = [rng.normal(size=(1, 2, n_tokens, 8)).astype(floatX) for _ in range(3)]
    positions = np.arange(1_000_000, 1_000_000 + n_tokens)
    empty = np.zeros_like(tokens[0])
    for kind in TABLE_KINDS:
        whole, _ = run(*tokens, tables(positions)[kind], 0, empty, empty)
        keys, values = empty.copy(), empty.copy()
        for step in range(n_tokens):
            here = slice(step, step + 1)
            row = tables(positions[here])[kind]
            y, rotated = run(*(x[:, :, here] for x in tokens), row, step, keys, values)
            keys[:, :, here], values[:, :, here] = rotated, tokens[2][:, :, here]
            assert_close(y, np.asarray(whole)[:, :, here], 1e-5)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_unknown_feature_axis(x, floatX, pairing):
    unknown = pt.tensor("x", shape=(None, None, None, None), dtype=floatX)
    options = {"scaling": "ntk", "scaling_factor": 4.0}
    p = pt.lvector("p")
    rotated = rotary_embedding(unknown, p, pairing=pairing, **options)
    partial = rotary_embedding(unknown, p, pairing=pairing, rotary_dim=8)
    run = pytensor.function([unknown, p], [rotated, partial])
    both = run(x, np.arange(5))
    with pytest.raises((ValueError, TypeError, AssertionError)):
        run(x[..., :6], np.arange(5))
    for actual, (theta, _) in zip(
        both,
        [
            reference_frequencies(as_mapping(**options), 12, 10_000),
            reference_frequencies(as_mapping(), 8, 10_000),
        ],
        strict=True,
    ):
        expected = reference.rotate(x, range(5), theta, pairing)
        assert_close(np.asarray(actual), expected)


def test_symbolic_rotary_dim(backend, floatX):
    if backend in ("jax", "mlx"):
        pytest.skip("JAX and MLX need the width when they trace")
    d, p = pt.lscalar("d"), pt.lvector("p")
    table = rotary_table(p, rotary_dim=d, scaling="linear", scaling_factor=2.0, dtype=floatX)
    theta, _ = reference.frequencies("linear", 10, 10_000, factor=2)
    actual = pytensor.function([d, p], table)(10, np.arange(6))
    np.testing.assert_allclose(actual, reference.table(range(6), theta), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_float16_is_rotated_in_float32_and_cast_once(backend, x, pairing):
    half_x = pt.tensor("x", shape=(None, 3, None, 12), dtype="float16")
    p = pt.lvector("p")
    rotated = rotary_embedding(half_x, p, pairing=pairing)
    assert rotated.type.dtype == "float16"
    if backend == "numba":
        with pytest.raises(NotImplementedError, match=r"float16.*C, JAX or MLX"):
            pytensor.function([half_x, p], rotated)
        return
    x = x.astype("float16")
    theta, _ = reference.frequencies("default", 12, 10_000)
    expected = reference.rotate(x, range(1000, 1005), theta, pairing)
    actual = np.asarray(pytensor.function([half_x, p], rotated)(x, np.arange(1000, 1005)))
    ulp = np.spacing(np.abs(expected).astype("float16")).astype("float64")
    assert (np.abs(actual.astype("float64") - expected) <= ulp).all()


def test_equal_tables_are_computed_once():
    q = pt.tensor("q", shape=(2, 4, 5, 8), dtype="float32")
    p = pt.lvector("p")
    outputs, y = [], q
    for _ in range(3):
        y = RotaryEmbedding()(y, p) + RotaryEmbedding()(2 * y, p)
        outputs.append(y)
    compiled = pytensor.function([q, p], outputs)
    ops = [node.op for node in compiled.maker.fgraph.apply_nodes]
    assert sum(isinstance(op, RotaryTable) for op in ops) == 1
    assert sum("ApplyRotary" in str(type(op)) for op in ops) == 6


@pytest.mark.compiles_nothing
def test_a_table_of_constant_positions_is_made_when_it_runs():
    table = rewrite_graph(rotary_table(pt.constant(range(5)), rotary_dim=8))
    assert isinstance(table.owner.op, RotaryTable)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_pullback_is_one_op(pairing):
    x = pt.tensor("x", shape=(2, 3, 5, 8))
    table = pt.tensor("table", shape=(5, 4, 2))
    rotated = apply_rotary(x, table, pairing=pairing)
    gradient = pt.grad(None, x, known_grads={rotated: x})
    assert gradient.owner.op == ApplyRotary(pairing=pairing, inverse=True)(x, table).owner.op
    assert gradient.owner.inputs == [x, table]
    with pytest.raises(DisconnectedInputError):
        pt.grad(rotated.sum(), table)


@pytest.mark.compiles_nothing
def test_float32_graph_has_no_float64():
    x = pt.tensor("x", shape=(None, 3, None, 12), dtype="float32")
    for scaling in ("none", DYNAMIC, LONGROPE, KINDS["yarn"]["scaling"]):
        rotated = rotary_embedding(x, pt.lvector("p"), scaling=scaling, rotary_dim=8)
        assert rotated.type.dtype == "float32"
        for node in (rotated.owner, rotated.owner.inputs[1].owner):
            for inner in node.op.fgraph.apply_nodes:
                for variable in [*inner.inputs, *inner.outputs]:
                    assert variable.type.dtype not in ("float64", "complex128")
                    data = getattr(variable, "data", np.empty(0))
                    assert data.nbytes < 1_000_000


@pytest.mark.compiles_nothing
def test_static_shapes_and_names():
    x = pt.tensor("x", shape=(2, None, 5, 16))
    layer = RotaryEmbedding("rotary", rotary_dim=8)
    table = layer.table(pt.lmatrix("p"))
    assert table.type.shape == (None, None, 4, 2)
    assert table.name == "rotary_table"
    rotated = layer(x, pt.arange(5))
    assert rotated.type.shape == (2, None, 5, 16)
    assert rotated.name == "rotary_output"
    assert rotary_table(pt.arange(5), rotary_dim=8, scaling=DYNAMIC).type.shape == (5, 4, 2)
    assert IntegerRotaryEmbedding(12, 8, 10_000, 64)(pt.arange(5)[None]).type.shape == (1, 5, 6, 2)


@pytest.mark.compiles_nothing
def test_partial_rotary_factor_of_a_mapping():
    x, p = pt.tensor("x", shape=(3, 5, 256), dtype="float32"), pt.arange(5)
    scaling = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rotated = RotaryEmbedding(scaling=scaling)(x, p)
    table_op = rotated.owner.inputs[1].owner.op
    assert (table_op.rotary_dim, table_op.base) == (64, 1e7)
    frequencies, _ = rotary_frequencies(rotary_dim=64, scaling=scaling)
    np.testing.assert_allclose(frequencies[-1], 1.6548e-7, rtol=1e-4)
    whole = {**scaling, "rope_type": "proportional"}
    assert RotaryEmbedding(scaling=whole)(x, p).owner.inputs[1].owner.op.rotary_dim == 256


X = pt.tensor("x", shape=(2, 3, 5, 8))
P = pt.lvector("p")


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "9", lambda: RotaryEmbedding(rotary_dim=9)),
        (ValueError, "9", lambda: rotary_table(P, rotary_dim=9)),
        (ValueError, "7", lambda: rotary_embedding(X[..., :7], P)),
        (ValueError, "10 channels, but x has 8", lambda: rotary_embedding(X, P, rotary_dim=10)),
        (ValueError, r"shape \(5, 4, 3\)", lambda: apply_rotary(X, pt.zeros((5, 4, 3)))),
        (ValueError, r"shape \(5, 8\)", lambda: apply_rotary(X, pt.zeros((5, 8)))),
        (ValueError, "6 would meet one of 5", lambda: apply_rotary(X, pt.zeros((6, 4, 2)))),
        (ValueError, "3 would meet one of 2", lambda: apply_rotary(X, pt.zeros((3, 1, 5, 4, 2)))),
        (ValueError, "more dimensions", lambda: apply_rotary(X, pt.zeros((2, 2, 2, 5, 4, 2)))),
        (ValueError, "4 dimensions", lambda: rotary_embedding(X, pt.ltensor4("p"))),
        (ValueError, "scalar", lambda: rotary_table(pt.lscalar("p"), rotary_dim=8)),
        (TypeError, "16777216", lambda: rotary_table(pt.fvector("p"), rotary_dim=8)),
        (
            TypeError,
            "bool",
            lambda: rotary_table(pt.tensor(dtype="bool", shape=(3,)), rotary_dim=8),
        ),
        (TypeError, "int64", lambda: apply_rotary(pt.lmatrix("x"), pt.zeros((5, 4, 2)))),
        (TypeError, "scaling=None", lambda: rotary_table(P, rotary_dim=8, scaling=None)),
        (
            TypeError,
            "short_factor=2.0 is no list",
            lambda: RotaryEmbedding(scaling={**LONGROPE, "short_factor": 2.0}),
        ),
        (
            TypeError,
            "factor=.*is no number",
            lambda: RotaryEmbedding(scaling={**YARN, "factor": [2]}),
        ),
        (
            TypeError,
            "max_position_embeddings='64'",
            lambda: RotaryEmbedding(scaling={**YARN, "max_position_embeddings": "64"}),
        ),
        (ValueError, "rotary_dim 7", lambda: rotary_frequencies(rotary_dim=7)),
        (
            ValueError,
            "partial_rotary_factor",
            lambda: rotary_embedding(
                pt.tensor("x", shape=(2, 5, None)),
                P,
                scaling={"rope_type": "default", "partial_rotary_factor": 0.5},
            ),
        ),
        (ValueError, "float16", lambda: rotary_table(P, rotary_dim=8, dtype="float16")),
        (ValueError, "'both'.*'half'.*'adjacent'", lambda: RotaryEmbedding(pairing="both")),
        (ValueError, "rotary_dim=64", lambda: RotaryEmbedding("rope").table(P)),
        (ValueError, "5", lambda: IntegerRotaryEmbedding(8, 5, 10_000, 64)),
        (ValueError, "10", lambda: IntegerRotaryEmbedding(8, 10, 10_000, 64)),
        (ValueError, "table_size=1", lambda: IntegerRotaryEmbedding(8, 8, 10_000, 1)),
    ],
)
def test_wrong_arguments_raise_at_the_call(error, match, call):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("'cubic'.*linear.*yarn", {"scaling": "cubic"}),
        ("'cubic'.*linear.*yarn", {"scaling": {"rope_type": "cubic"}}),
        ("'linear' and 'yarn'", {"scaling": {"rope_type": "yarn", "type": "linear"}}),
        ("'beta_fast'.*factor", {"scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}),
        ("'factor'", {"scaling": {"rope_type": "linear"}}),
        ("'factor'", {"scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8}}),
        ("'original_max", {"scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("no effect", {"scaling_factor": 2.0}),
        ("beside a mapping", {"scaling": {"rope_type": "default"}, "scaling_factor": 2.0}),
        ("rope_theta=2", {"scaling": {"rope_type": "default", "rope_theta": 2}, "base": 3.0}),
        ("factor=-1", {"scaling": {"rope_type": "linear", "factor": -1}}),
        ("3 entries", {"scaling": {**LONGROPE, "long_factor": [1.0, 2.0, 3.0]}}),
        ("no band", {"scaling": {**LLAMA3, "low_freq_factor": 4.0}}),
        ("beta_fast", {"scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}),
        ("[Bb]ase 1", {"scaling": YARN, "base": 1.0}),
        ("no positive logarithm", {"scaling": {**LONGROPE, "original_max_position_embeddings": 1}}),
        (r"\['yarn'\]", {"scaling": {"rope_type": ["yarn"]}}),
        ("known width", {"scaling": DYNAMIC, "rotary_dim": pt.lscalar("d")}),
    ],
)
def test_wrong_scaling_raises_at_the_call(match, options):
    with pytest.raises(ValueError, match=match):
        rotary_table(P, **{"rotary_dim": 8, **options})

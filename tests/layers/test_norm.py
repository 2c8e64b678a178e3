import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close, relative_error
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.traversal import applys_between
from pytensor.scalar import Cast
from references import norm as reference

from pytensor_ml.layers.norm import (
    LayerNorm,
    LayerNormLayer,
    LayerNormPullback,
    RMSNorm,
    RMSNormLayer,
    RMSNormPullback,
    ZeroCenteredRMSNorm,
    ZeroCenteredRMSNormLayer,
)

WIDTH = 39
# Large enough that an epsilon outside the root, or left out, is seen.
EPSILON = 0.3
NORMS = {
    "rms": (RMSNorm, {}, reference.rms_norm),
    "rms, not affine": (RMSNorm, {"affine": False}, reference.rms_norm),
    "zero-centered": (ZeroCenteredRMSNorm, {}, reference.zero_centered_rms_norm),
    "layer": (LayerNorm, {}, reference.layer_norm),
    "layer, not affine": (LayerNorm, {"affine": False}, reference.layer_norm),
}
OPS = {
    RMSNorm: (RMSNormLayer, RMSNormPullback),
    ZeroCenteredRMSNorm: (ZeroCenteredRMSNormLayer, RMSNormPullback),
    LayerNorm: (LayerNormLayer, LayerNormPullback),
}


@pytest.fixture(scope="module")
def dtypes(backend, floatX):
    return {
        "c": ["float16", "float32", "float64"],
        "numba": ["float32", "float64"],
        "jax": ["float16", "float32", *(["float64"] if floatX == "float64" else [])],
        "mlx": ["float16", "float32"],
    }[backend]


def parameters_of(layer):
    found = [getattr(layer, name, None) for name in ("loc", "scale", "weight")]
    return [parameter for parameter in found if parameter is not None]


def randomize(layer, rng):
    for parameter in parameters_of(layer):
        shape = parameter.get_value().shape
        parameter.set_value(rng.uniform(0.5, 2, shape).astype(parameter.type.dtype))
    return [parameter.get_value() for parameter in parameters_of(layer)]


def with_gradients(layer, x, dy):
    y = layer(x)
    return [y, *pt.grad(None, [x, *parameters_of(layer)], known_grads={y: dy})]


def compiled(inputs, outputs):
    return pytensor.function(inputs, outputs, on_unused_input="ignore")


def draw(rng, shape, dtype):
    return rng.normal(0.3, 1, shape).astype(dtype)


def nodes_within(outputs):
    """Every node of the graph and of the graphs inside its ops."""
    for node in applys_between([], outputs):
        yield node
        if isinstance(node.op, OpFromGraph):
            yield from nodes_within(node.op.fgraph.outputs)


def test_values_and_gradients_of_every_dtype(dtypes):
    rng = np.random.default_rng(1)
    for dtype in dtypes:
        norms = [norm for norm in NORMS.values() if dtype == "float32" or "affine" not in norm[1]]
        x, dy = (pt.tensor(name, shape=(None, 3, WIDTH), dtype=dtype) for name in ("x", "dy"))
        layers = [layer(n_in=WIDTH, epsilon=EPSILON, **options) for layer, options, _ in norms]
        values = [randomize(layer, rng) for layer in layers]
        graphs = [with_gradients(layer, x, dy) for layer in layers]
        run = compiled([x, dy], [variable for graph in graphs for variable in graph])
        x_value, dy_value = draw(rng, (2, 3, WIDTH), dtype), draw(rng, (2, 3, WIDTH), dtype)
        # Rows that lie far from zero, where a rounded mean is not good enough.
        x_value[1] += {"float16": 0, "float32": 1000, "float64": 10**7}[dtype]
        results = iter([np.asarray(result) for result in run(x_value, dy_value)])
        for (_, _, norm), parameters in zip(norms, values, strict=True):
            expected = [
                reference.forward(norm, x_value, *parameters, epsilon=EPSILON),
                *reference.gradients(norm, x_value, dy_value, *parameters, epsilon=EPSILON),
            ]
            for held, right in zip([x_value, x_value, *parameters], expected, strict=True):
                result = next(results)
                assert result.dtype == held.dtype
                if result.dtype == "float16":
                    assert (abs(result - right) <= np.spacing(abs(right).astype("float16"))).all()
                else:
                    assert_close(result, right, None if dtype == "float64" else 2e-6)


@pytest.fixture(scope="module")
def by_rank():
    """Compiled norms of inputs of several ranks, and their parameter values."""
    rng = np.random.default_rng(2)
    rms, layer = RMSNorm(n_in=WIDTH), LayerNorm(n_in=WIDTH)
    values = [randomize(rms, rng), randomize(layer, rng)]
    runs = {}
    for rank in (1, 2, 5):
        x, dy = (pt.tensor(name, shape=(None,) * rank, dtype="float32") for name in ("x", "dy"))
        graph = with_gradients(rms, x, dy)
        runs[rank] = compiled(
            [x, dy], [*graph, *with_gradients(layer, x, dy)] if rank == 2 else graph
        )
    return runs, values


def test_every_rank(by_rank):
    rng = np.random.default_rng(3)
    runs, (rms_values, layer_values) = by_rank
    for rank, run in runs.items():
        shape = (2, 3, 1, 2, WIDTH)[-rank:]
        x, dy = draw(rng, shape, "float32"), draw(rng, shape, "float32")
        expected = [
            reference.forward(reference.rms_norm, x, *rms_values, epsilon=1e-6),
            *reference.gradients(reference.rms_norm, x, dy, *rms_values, epsilon=1e-6),
        ]
        if rank == 2:
            expected += [
                reference.forward(reference.layer_norm, x, *layer_values, epsilon=1e-5),
                *reference.gradients(reference.layer_norm, x, dy, *layer_values, epsilon=1e-5),
            ]
        for result, right in zip(run(x, dy), expected, strict=True):
            assert_close(result, right, 2e-6)


def test_empty_leading_axes(by_rank):
    runs, _ = by_rank
    x = np.zeros((0, WIDTH), "float32")
    y, dx, dscale, *_ = runs[2](x, x)
    assert y.shape == dx.shape == x.shape
    np.testing.assert_array_equal(dscale, np.zeros(WIDTH))


def test_nan_spoils_its_row_only(by_rank):
    rng = np.random.default_rng(5)
    runs, _ = by_rank
    x = draw(rng, (3, WIDTH), "float32")
    x[1, 7] = np.nan
    y, dx, dscale, layer_y, layer_dx, *_ = (np.asarray(v) for v in runs[2](x, np.ones_like(x)))
    for result in (y, dx, layer_y, layer_dx):
        np.testing.assert_array_equal(np.isnan(result).all(1), [False, True, False])
        assert np.isfinite(result[[0, 2]]).all()
    assert np.isnan(dscale).all()


def test_a_row_of_zeros_gives_zeros_and_a_finite_gradient(by_rank):
    runs, (_, (loc, _)) = by_rank
    x, dy = np.zeros((2, WIDTH), "float32"), np.ones((2, WIDTH), "float32")
    results = [np.asarray(result) for result in runs[2](x, dy)]
    np.testing.assert_array_equal(results[0], x)
    np.testing.assert_array_equal(results[3], x + loc.astype("float32"))
    assert all(np.isfinite(result).all() for result in results)


def test_epsilon_is_inside_the_root(by_rank):
    runs, ((scale,), _) = by_rank
    y = np.asarray(runs[1](np.full(WIDTH, 1e-3, "float32"), np.ones(WIDTH, "float32"))[0])
    np.testing.assert_allclose(y / scale, 0.70710678, rtol=1e-6)


def test_sums_keep_small_terms_beside_a_large_one():
    """A serial float32 sum of squares or of gradients loses every term below half an ulp."""
    rng = np.random.default_rng(6)
    width, rows = 4096, 2
    small = np.float32(0.999 * 2.0**-12)
    spiky = np.full((rows, width), small) * rng.choice([-1, 1], width).astype("float32")
    spiky[:, 0] = 1
    tall = np.tile(draw(rng, (1, 5), "float32"), (width, 1))
    tall_dy = np.full(tall.shape, small * small)
    tall_dy[0] = 1
    spiky_dy = draw(rng, spiky.shape, "float32")

    cases = [(spiky, spiky_dy, [0, 1, 1000, 4095]), (tall, tall_dy, [0, 1, 2, 3, 4])]
    inputs, outputs, expected = [], [], []
    for x_value, dy_value, columns in cases:
        x, dy = (pt.tensor(name, shape=(None, None), dtype="float32") for name in ("x", "dy"))
        inputs += [x, dy]
        for layer_type, _, norm in (NORMS["rms"], NORMS["layer"]):
            layer = layer_type(n_in=x_value.shape[1])
            values = randomize(layer, rng)
            outputs += with_gradients(layer, x, dy)
            right = reference.forward(norm, x_value, *values, epsilon=layer.epsilon)
            expected.append((right[..., columns], columns))
            expected += [
                (right, columns)
                for right in reference.gradients(
                    norm, x_value, dy_value, *values, epsilon=layer.epsilon, columns=columns
                )
            ]
    results = compiled(inputs, outputs)(spiky, spiky_dy, tall, tall_dy)
    for result, (right, columns) in zip(results, expected, strict=True):
        assert_close(np.asarray(result)[..., columns], right, 2e-6)


def test_float16_squares_do_not_overflow(backend, floatX):
    if backend == "numba" or floatX == "float64":
        pytest.skip("Numba has no float16, and one run on others is enough")
    x = pt.matrix("x", dtype="float16")
    norms = [
        layer(n_in=4096, epsilon=1e-12) for layer in (RMSNorm, ZeroCenteredRMSNorm, LayerNorm)
    ] + [ZeroCenteredRMSNorm(n_in=4096, epsilon=1e-12, compute_dtype=None)]
    run = compiled([x], [norm(x) for norm in norms])
    signs = np.resize([1, -1], 4096)
    rows = np.array([300, 6e4, 1e-4])[:, None] * signs
    for y in run(rows.astype("float16")):
        np.testing.assert_allclose(np.asarray(y), np.tile(signs, (3, 1)), atol=1e-3)


def test_float16_is_refused_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")
    x = pt.matrix("x", dtype="float16")
    for layer in (RMSNorm, ZeroCenteredRMSNorm, LayerNorm):
        y = layer(n_in=4)(x)
        for graph in (y, pt.grad(y.astype("float32").sum(), x)):
            with pytest.raises(NotImplementedError, match=r"float16.*C, JAX or MLX"):
                pytensor.function([x], graph)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("layer_type", OPS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("parameter_dtype", ["float32", "float64"])
def test_dtypes_and_static_shapes(layer_type, dtype, parameter_dtype):
    with pytensor.config.change_flags(floatX=parameter_dtype):
        layer = layer_type(n_in=WIDTH)
        x = pt.tensor("x", shape=(7, None), dtype=dtype)
        dy = pt.tensor("dy", shape=(7, WIDTH), dtype=dtype)
        y, dx, *dparameters = with_gradients(layer, x, dy)
    assert y.type.dtype == dx.type.dtype == dtype
    assert y.type.shape == dx.type.shape == (7, WIDTH)
    for parameter, gradient in zip(parameters_of(layer), dparameters, strict=True):
        assert gradient.type == parameter.type.clone(shape=(WIDTH,))


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("layer_type", OPS)
@pytest.mark.parametrize("parameter_dtype", ["float32", "float64"])
def test_float32_graphs_have_no_float64(layer_type, parameter_dtype):
    """Except for casts of float64 parameters and to their gradients."""
    with pytensor.config.change_flags(floatX=parameter_dtype):
        layer = layer_type(n_in=WIDTH)
    graph = with_gradients(layer, pt.matrix("x", dtype="float32"), pt.matrix("dy", dtype="float32"))
    for node in nodes_within(graph):
        is_cast = isinstance(getattr(node.op, "scalar_op", None), Cast)
        if parameter_dtype == "float64" and (is_cast or isinstance(node.op, OpFromGraph)):
            continue
        for variable in [*node.inputs, *node.outputs]:
            assert getattr(variable.type, "dtype", "") != "float64", node
        assert getattr(node.op, "acc_dtype", None) != "float64", node


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("layer_type", OPS)
def test_a_norm_is_one_op_and_so_is_its_gradient(layer_type):
    x, dy = (pt.tensor(name, shape=(None, WIDTH), dtype="float32") for name in ("x", "dy"))
    graph = with_gradients(layer_type(), x, dy)
    gradients = [node.op for node in applys_between([], graph[1:])]
    forward, pullback = OPS[layer_type]
    assert [type(op) for op in gradients] == [pullback]
    assert [type(node.op) for node in applys_between([], graph[:1])] == [forward]
    assert graph[0].name == f"{layer_type.__name__}_output"


@pytest.mark.compiles_nothing
def test_parameters_start_as_the_plain_norm():
    rms, zero_centered, layer = RMSNorm(n_in=3), ZeroCenteredRMSNorm(n_in=3), LayerNorm(n_in=3)
    for parameter, name, value in [
        (rms.scale, "RMSNorm_scale", 1),
        (zero_centered.weight, "ZeroCenteredRMSNorm_weight", 0),
        (layer.scale, "LayerNorm_scale", 1),
        (layer.loc, "LayerNorm_loc", 0),
    ]:
        assert parameter.name == name
        np.testing.assert_array_equal(parameter.get_value(), np.full(3, value))


@pytest.mark.compiles_nothing
def test_layer_norm_op_takes_loc_before_scale():
    layer = LayerNorm(n_in=3)
    y = layer(pt.tensor("x", shape=(None, 3), dtype="float32"))
    assert y.owner.inputs[1:] == [layer.loc, layer.scale]


def test_gradient_of_a_gradient(backend, floatX):
    if backend == "numba" or floatX == "float64":
        pytest.skip("takes Numba a minute to compile, and has no kernel; one run is enough")
    rng = np.random.default_rng(7)
    x = pt.tensor("x", shape=(2, 5), dtype="float32")
    dy, direction = (draw(rng, (2, 5), "float32") for _ in range(2))
    point = draw(rng, (2, 5), "float32").astype("float64")
    layers = {RMSNorm: reference.rms_norm, LayerNorm: reference.layer_norm}
    run = compiled(
        [x],
        [
            pt.grad((pt.grad((layer(epsilon=EPSILON)(x) * dy).sum(), x) * direction).sum(), x)
            for layer in layers
        ],
    )
    for result, norm in zip(run(point.astype("float32")), layers.values(), strict=True):
        ahead, behind = (
            reference.gradients(norm, point + step * direction, dy, epsilon=EPSILON)[0]
            for step in (1e-4, -1e-4)
        )
        assert relative_error(result, (ahead - behind) / 2e-4) < 1e-4


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("layer_type", OPS)
def test_width_is_that_of_the_first_input(layer_type):
    layer = layer_type("norm")
    with pytest.raises(ValueError, match=r"norm cannot tell .* Pass n_in"):
        layer(pt.matrix("x"))
    layer(pt.tensor("x", shape=(None, 6)))
    assert [parameter.type.shape for parameter in parameters_of(layer)] == [(6,)] * len(
        parameters_of(layer)
    )
    with pytest.raises(ValueError, match=r"width 6.*\(None, 7\)"):
        layer(pt.tensor("x", shape=(None, 7)))


def test_a_width_unknown_when_compiled_is_checked_when_run(by_rank):
    runs, _ = by_rank
    for shape in [(2, WIDTH + 1), (2, 1)]:
        with pytest.raises((AssertionError, ValueError)):
            runs[2](np.ones(shape, "float32"), np.ones(shape, "float32"))


@pytest.mark.compiles_nothing
def test_unfit_arguments_are_refused():
    with pytest.raises(TypeError, match=r"int64.*Cast"):
        RMSNorm(n_in=3)(pt.lmatrix("x"))
    with pytest.raises(ValueError, match=r"'float64'.*'float32', or None"):
        ZeroCenteredRMSNorm(n_in=3, compute_dtype="float64")
    for epsilon in (-1e-6, float("nan")):
        with pytest.raises(ValueError, match=f"norm got epsilon={epsilon}"):
            RMSNorm("norm", n_in=3, epsilon=epsilon)


@pytest.mark.compiles_nothing
def test_importing_a_layer_imports_no_backend():
    code = "import sys, pytensor_ml.layers.norm; print({'jax', 'mlx', 'numba'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"

"""The fused functions of MLX, called by hand."""

import mlx.core as mx

from benchmarks.contestants import Task

PACKAGES = ("mlx",)


def rms_norm(inputs, epsilon):
    return evaluated(normalize(epsilon), [inputs["x"], inputs["scale"]])


def rms_norm_gradient(inputs, epsilon):
    return gradient(normalize(epsilon), [inputs["x"], inputs["scale"]], inputs["dy"])


def rotary(inputs, pairing):
    return evaluated(rotate(inputs, pairing), [inputs["x"]])


def rotary_gradient(inputs, pairing):
    return gradient(rotate(inputs, pairing), [inputs["x"]], inputs["dy"])


def normalize(epsilon):
    return lambda x, scale: mx.fast.rms_norm(x, scale, epsilon)


def rotate(inputs, pairing):
    width = inputs["x"].shape[-1]
    adjacent = pairing == "adjacent"
    return lambda x: mx.fast.rope(
        x, width, traditional=adjacent, base=10_000.0, scale=1.0, offset=0
    )


def evaluated(function, values):
    arrays = [mx.array(value) for value in values]
    function = mx.compile(function)

    def run():
        outputs = function(*arrays)
        mx.eval(outputs)
        return outputs if isinstance(outputs, list) else [outputs]

    return Task(run)


def gradient(function, values, dy):
    def pull_back(*arguments):
        *primals, cotangent = arguments
        return mx.vjp(function, primals, [cotangent])[1]

    return evaluated(pull_back, [*values, dy])

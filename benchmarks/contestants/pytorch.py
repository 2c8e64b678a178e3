"""Torch as it comes, without its compiler."""

import torch

from benchmarks.contestants import Task

PACKAGES = ("torch",)


def rms_norm(inputs, epsilon):
    x, scale = torch.from_numpy(inputs["x"]), torch.from_numpy(inputs["scale"])
    return forward(lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], scale, epsilon))


def rms_norm_gradient(inputs, epsilon):
    x, scale = (torch.from_numpy(inputs[name]).requires_grad_() for name in ("x", "scale"))
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], scale, epsilon)
    return backward(y, [x, scale], inputs)


def rotary(inputs, pairing):
    x, table = torch.from_numpy(inputs["x"]), torch.from_numpy(inputs["table"])
    rotate = make_rotate(table, pairing)
    return forward(lambda: rotate(x))


def rotary_gradient(inputs, pairing):
    x = torch.from_numpy(inputs["x"]).requires_grad_()
    y = make_rotate(torch.from_numpy(inputs["table"]), pairing)(x)
    return backward(y, [x], inputs)


def forward(call):
    def run():
        with torch.inference_mode():
            return [call()]

    return Task(run)


def backward(y, arguments, inputs):
    """Only go back: what was saved on the way forward may be read as often as one likes."""
    dy = torch.from_numpy(inputs["dy"])
    return Task(lambda: list(torch.autograd.grad(y, arguments, dy, retain_graph=True)))


def make_rotate(table, pairing):
    if pairing == "adjacent":
        turns = torch.view_as_complex(table)

        def rotate(x):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * turns).flatten(-2)

        return rotate
    cos, sin = (table[..., i].repeat(1, 2) for i in (0, 1))

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    return rotate

"""Optimizers in float64 NumPy, from their papers."""

import numpy as np


def sgd(w, gradients, *, rates, momentum=0.0, nesterov=False):
    velocity = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + g
        w = w - rate * (g + momentum * velocity if nesterov else velocity)
    return w


def adam(w, gradients, *, rates, betas, epsilon, weight_decay=0.0, amsgrad=False):
    m = v = largest = np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        largest = np.maximum(largest, v) if amsgrad else v
        m_hat = m / (1 - betas[0] ** t)
        v_hat = largest / (1 - betas[1] ** t)
        w = w * (1 - rate * weight_decay)
        w = w - rate * m_hat / (np.sqrt(v_hat) + epsilon)
    return w


def lion(w, gradients, *, rates, betas, weight_decay=0.0):
    m = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        w = w - rate * (np.sign(betas[0] * m + (1 - betas[0]) * g) + weight_decay * w)
        m = betas[1] * m + (1 - betas[1]) * g
    return w


def clipped(gradients, max_norm):
    """Shorten the arrays of one step together."""
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    return [g * min(1.0, max_norm / norm) for g in gradients]


def warmed_up(i, warmup_steps, rate, after):
    """Return the rate of step i, which ``after`` gives once the climb to ``rate`` has ended."""
    return rate * (i + 1) / (warmup_steps + 1) if i < warmup_steps else after(i - warmup_steps)


def linear(i, first, last, n, begin=0):
    return np.interp(i, [begin, begin + n], [first, last])


def cosine(i, first, last, n):
    return last + (first - last) * (1 + np.cos(np.pi * min(i, n) / n)) / 2

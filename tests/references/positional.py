"""Rotary embeddings, one scalar at a time, in 50 digits.

Each scaling kind follows its paper's formulas: Su et al. (arXiv:2104.09864), Chen et al.
(arXiv:2306.15595), Peng et al. (arXiv:2309.00071), Grattafiori et al. (arXiv:2407.21783), Ding et
al. (arXiv:2402.13753).
"""

import itertools

import mpmath as mp
import numpy as np

mp.mp.dps = 50


def wavelength(i, d, base):
    return 2 * mp.pi * mp.mpf(base) ** (mp.mpf(2 * i) / d)


def frequencies(kind, d, base, length=1, **numbers):
    """Return d // 2 frequencies in radians a position, and the attention factor."""
    theta = [2 * mp.pi / wavelength(i, d, base) for i in range(d // 2)]
    factor = mp.mpf(numbers.get("factor", 1))
    original = mp.mpf(numbers.get("original_max_position_embeddings", 1))
    attention = mp.mpf(1)
    if kind == "linear":
        theta = [t / factor for t in theta]
    elif kind == "ntk":
        theta = [t * factor ** (-mp.mpf(2 * i) / (d - 2)) for i, t in enumerate(theta)]
    elif kind == "dynamic":
        if length > original:
            stretch = factor * length / original - (factor - 1)
            theta = [t * stretch ** (-mp.mpf(2 * i) / (d - 2)) for i, t in enumerate(theta)]
    elif kind == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        for i, t in enumerate(theta):
            turns = original / wavelength(i, d, base)
            if turns < low:
                theta[i] = t / factor
            elif turns <= high:
                share = (turns - low) / (high - low)
                theta[i] = (1 - share) * t / factor + share * t
    elif kind == "yarn":
        ends = []
        for turns in (numbers.get("beta_fast", 32), numbers.get("beta_slow", 1)):
            ends.append(d * mp.log(original / (2 * mp.pi * turns)) / (2 * mp.log(base)))
        if numbers.get("truncate", True):
            ends = [mp.floor(ends[0]), mp.ceil(ends[1])]
        start, stop = max(ends[0], 0), min(ends[1], d - 1)
        for i, t in enumerate(theta):
            kept = 1 - min(max((i - start) / (stop - start), 0), 1)
            theta[i] = kept * t + (1 - kept) * t / factor
        attention = 1 + mp.log(factor) / 10
        if "mscale" in numbers:
            attention = (1 + numbers["mscale"] * mp.log(factor) / 10) / (
                1 + numbers["mscale_all_dim"] * mp.log(factor) / 10
            )
        attention = mp.mpf(numbers.get("attention_factor", attention))
    elif kind == "longrope":
        divisors = numbers["long_factor" if length > original else "short_factor"]
        theta = [t / mp.mpf(divisor) for t, divisor in zip(theta, divisors, strict=True)]
        attention = mp.sqrt(1 + mp.log(factor) / mp.log(original))
        attention = mp.mpf(numbers.get("attention_factor", attention))
    elif kind == "proportional":
        n_rotating = int(numbers.get("partial_rotary_factor", 1) * d // 2)
        theta = [t / factor if i < n_rotating else mp.mpf(0) for i, t in enumerate(theta)]
    else:
        assert kind == "default"
    return theta, attention


def table(positions, theta, attention=1):
    """Return attention * (cos, sin) of every position and frequency, rounded once to float64."""
    rows = [
        [
            (float(attention * mp.cos(int(p) * t)), float(attention * mp.sin(int(p) * t)))
            for t in theta
        ]
        for p in np.ravel(positions)
    ]
    return np.array(rows).reshape((*np.shape(positions), len(theta), 2))


def channels(pair, n_pairs, pairing):
    """Return the two channels that pair number ``pair`` rotates."""
    return (pair, pair + n_pairs) if pairing == "half" else (2 * pair, 2 * pair + 1)


def rotate(x, positions, theta, pairing, attention=1):
    """Rotate float64 ``x`` (batch, heads, seq, head_dim) by positions (seq,) or (batch, seq)."""
    y = np.array(x, "float64")
    n_batch, n_heads, n_steps, _ = y.shape
    for batch, head, step in itertools.product(range(n_batch), range(n_heads), range(n_steps)):
        p = int(positions[step] if np.ndim(positions) == 1 else positions[batch][step])
        for pair, t in enumerate(theta):
            first, second = channels(pair, len(theta), pairing)
            a, b = (mp.mpf(float(x[batch, head, step, c])) for c in (first, second))
            cos, sin = attention * mp.cos(p * t), attention * mp.sin(p * t)
            y[batch, head, step, first] = float(a * cos - b * sin)
            y[batch, head, step, second] = float(a * sin + b * cos)
    return y

r"""Rotary frequencies under each scaling kind.

A kind is a pure function from its numbers to (frequencies, attention factor). Frequencies are made
in decimal arithmetic of 60 digits: at position :math:`2^{31}` one rounding of a frequency to
float64 turns the angle by up to 1e-7.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from numbers import Real
from typing import Any

import numpy as np

DIGITS = 60
TWO_PI = Decimal("6.283185307179586476925286766559005768394338798750211641949889184616")

type ScalingProp = tuple[tuple[str, Any], ...]
type Frequencies = tuple[tuple[Decimal, ...], Decimal]

DEFAULT_BASE = 10_000.0


def rotary_frequencies(
    *,
    rotary_dim: int,
    base: float = DEFAULT_BASE,
    scaling: str | Mapping[str, Any] = "none",
    scaling_factor: float = 1.0,
    length: int = 1,
) -> tuple[np.ndarray, float]:
    r"""Return the frequencies of a rotary embedding and the factor on its cosines and sines.

    .. math:: \theta_i = b^{-2i/d}, \quad i = 0, \dots, d/2 - 1

    before scaling, for base b and rotary_dim d.

    Parameters
    ----------
    rotary_dim : int
        Number of rotated channels, even.
    base, scaling, scaling_factor
        As for :func:`~pytensor_ml.layers.positional.rotary_table`.
    length : int
        Largest position plus one, which "dynamic" and "longrope" depend on.

    Returns
    -------
    frequencies : ndarray
        Radians a position, shape (rotary_dim // 2,), float64.
    attention_factor : float
        Factor on every cosine and sine.

    Examples
    --------
    >>> from pytensor_ml.layers.rotary_scaling import rotary_frequencies
    >>> frequencies, attention_factor = rotary_frequencies(
    ...     rotary_dim=4, scaling={"rope_type": "linear", "factor": 4.0}
    ... )
    >>> frequencies.tolist(), attention_factor
    ([0.25, 0.0025], 1.0)
    """
    base, resolved = resolve_scaling(base, scaling, scaling_factor)
    frequencies, attention_factor = scaled_frequencies(
        rotary_dim=check_rotary_dim(rotary_dim), base=base, scaling=resolved, length=length
    )
    return np.array([float(f) for f in frequencies]), float(attention_factor)


def resolve_scaling(
    base: float, scaling: str | Mapping[str, Any], scaling_factor: float
) -> tuple[float, ScalingProp]:
    """Return the base and the numbers of a scaling kind as sorted pairs, or raise.

    A mapping may hold what checkpoint configs put beside the kind: ``rope_theta`` is the base, and
    ``partial_rotary_factor`` concerns the width, which only "proportional" needs here.
    """
    if isinstance(scaling, str):
        if scaling not in ("none", "linear", "ntk"):
            raise ValueError(
                f"Unknown scaling {scaling!r}: no frequencies are defined for it. Choose 'none', "
                "'linear' or 'ntk', or pass a mapping whose rope_type is one of "
                f"{', '.join(KINDS)}."
            )
        if scaling == "none" and scaling_factor != 1.0:
            raise ValueError(
                f"scaling_factor={scaling_factor!r} has no effect with scaling='none'. "
                "Choose scaling='linear' or 'ntk', or leave the factor out."
            )
        numbers = {} if scaling == "none" else {"factor": scaling_factor}
        scaling = {"rope_type": "default" if scaling == "none" else scaling, **numbers}
    elif not isinstance(scaling, Mapping):
        raise TypeError(
            f"scaling={scaling!r} is neither the name of a kind nor a mapping, so no frequencies "
            "are defined. Pass 'none' for plain ones, or the mapping of the checkpoint's config."
        )
    elif scaling_factor != 1.0:
        raise ValueError(
            f"scaling_factor={scaling_factor!r} was given beside a mapping, so one of two factors "
            "would be ignored. Put it into the mapping, under 'factor'."
        )

    given = {key: value for key, value in scaling.items() if value is not None}
    names = [given.pop(key) for key in ("rope_type", "type") if key in given] or ["default"]
    if any(name != names[0] for name in names) or names[0] not in list(KINDS):
        raise ValueError(
            f"rope_type {' and '.join(sorted(map(repr, names)))} does not name one scaling kind, "
            f"so no frequencies are defined. Choose one of {', '.join(KINDS)}."
        )
    name = names[0]
    kind = KINDS[name]
    allowed = {*kind.required, *kind.optional, "rope_theta", "partial_rotary_factor"}
    unknown, missing = given.keys() - allowed, set(kind.required) - given.keys()
    if unknown:
        raise ValueError(
            f"Scaling kind {name!r} does not read {', '.join(sorted(map(repr, unknown)))}, so "
            f"its meaning would be lost. Keys of this kind: {', '.join(sorted(allowed))}."
        )
    if missing:
        raise ValueError(
            f"Scaling kind {name!r} lacks {', '.join(sorted(map(repr, missing)))}, without which "
            "its frequencies are undefined. Add it to the mapping."
        )
    given = {key: _plain(key, value) for key, value in given.items()}
    theta = given.pop("rope_theta") if "rope_theta" in given else _plain("base", base)
    if base not in (theta, DEFAULT_BASE):
        raise ValueError(
            f"base={base!r} differs from rope_theta={theta!r} in the mapping, so one of them would "
            "be ignored. Pass one of the two."
        )
    if "partial_rotary_factor" not in kind.optional:
        given.pop("partial_rotary_factor", None)
    if "max_position_embeddings" in kind.optional:
        _replace_max_position_embeddings(name, given)
    return theta, tuple(sorted({"rope_type": name, **given}.items()))


def scaled_frequencies(
    *, rotary_dim: int, base: float, scaling: Iterable[tuple[str, Any]], length: int = 1
) -> Frequencies:
    """Return the frequencies and the attention factor of a resolved scaling kind."""
    numbers = {key: v if isinstance(v, str | bool) else _decimal(v) for key, v in scaling}
    kind = KINDS[str(numbers.pop("rope_type"))]
    if kind.by_length:
        numbers["length"] = Decimal(length)
    with localcontext(prec=DIGITS):
        return kind.compute(rotary_dim, Decimal(base), **numbers)


def rotated_channels(head_dim: int, scaling: str | Mapping[str, Any]) -> int:
    """Return how many of ``head_dim`` channels rotate: the ``partial_rotary_factor`` of them."""
    given = {} if isinstance(scaling, str) else scaling
    if given.get("rope_type", given.get("type")) == "proportional":
        return head_dim
    share = given.get("partial_rotary_factor")
    return head_dim if share is None else int(head_dim * _plain("partial_rotary_factor", share))


def plain(rotary_dim: int, base: Decimal) -> Frequencies:
    r"""Return :math:`\theta_i = b^{-2i/d}` [1]_.

    References
    ----------
    .. [1] Su et al. (2021). RoFormer: Enhanced Transformer with Rotary Position Embedding.
       arXiv:2104.09864.
    """
    return (
        tuple(base ** (Decimal(-2 * i) / rotary_dim) for i in range(rotary_dim // 2)),
        Decimal(1),
    )


def linear(rotary_dim: int, base: Decimal, *, factor: Decimal) -> Frequencies:
    r"""Return :math:`\theta_i / s`, position interpolation by the factor s [1]_.

    References
    ----------
    .. [1] Chen et al. (2023). Extending Context Window of Large Language Models via Positional
       Interpolation. arXiv:2306.15595.
    """
    frequencies, attention_factor = plain(rotary_dim, base)
    return tuple(f / factor for f in frequencies), attention_factor


def ntk(rotary_dim: int, base: Decimal, *, factor: Decimal) -> Frequencies:
    r"""Return the plain frequencies of base :math:`b \, s^{d/(d-2)}` [1]_.

    The lowest frequency is divided by s and the highest is kept.

    References
    ----------
    .. [1] Peng et al. (2023). YaRN: Efficient Context Window Extension of Large Language Models,
       section 3.1. arXiv:2309.00071.
    """
    if rotary_dim == 2:  # One pair of frequency 1, whatever the base.
        return plain(rotary_dim, base)
    return plain(rotary_dim, base * factor ** (Decimal(rotary_dim) / (rotary_dim - 2)))


def dynamic(
    rotary_dim: int,
    base: Decimal,
    *,
    factor: Decimal,
    original_max_position_embeddings: Decimal,
    length: Decimal,
) -> Frequencies:
    r"""Return :func:`ntk` with the factor :math:`s L / L_0 - (s - 1)` once :math:`L > L_0` [1]_.

    References
    ----------
    .. [1] Peng et al. (2023). YaRN: Efficient Context Window Extension of Large Language Models,
       section 3.3. arXiv:2309.00071.
    """
    beyond = max(length - original_max_position_embeddings, Decimal(0))
    return ntk(rotary_dim, base, factor=1 + factor * beyond / original_max_position_embeddings)


def yarn(
    rotary_dim: int,
    base: Decimal,
    *,
    original_max_position_embeddings: Decimal,
    factor: Decimal,
    beta_fast: Decimal = Decimal(32),
    beta_slow: Decimal = Decimal(1),
    truncate: bool = True,
    attention_factor: Decimal | None = None,
    mscale: Decimal = Decimal(0),
    mscale_all_dim: Decimal = Decimal(0),
) -> Frequencies:
    r"""Return a blend of plain and interpolated frequencies, and a factor on the scores [1]_.

    .. math:: \theta_i' = (1 - r_i) \, \theta_i + r_i \, \theta_i / s

    where the ramp r rises from 0 at the pair that turns ``beta_fast`` times within the original
    length to 1 at the pair that turns ``beta_slow`` times. The attention factor is
    :math:`0.1 \ln s + 1`, with ``mscale`` a quotient of two such terms, unless it is given.

    References
    ----------
    .. [1] Peng et al. (2023). YaRN: Efficient Context Window Extension of Large Language Models.
       arXiv:2309.00071.
    """

    if base <= 1 or beta_fast < beta_slow:
        raise ValueError(
            f"Base {base} with beta_fast {beta_fast} and beta_slow {beta_slow} puts no slower pair "
            "after the faster ones, so there is no ramp between them. Pass a base above 1 and "
            "beta_fast of at least beta_slow."
        )

    def pair_that_turns(times: Decimal) -> Decimal:
        return (
            rotary_dim
            * (original_max_position_embeddings / (times * TWO_PI)).ln()
            / (2 * base.ln())
        )

    def magnitude(scale: Decimal) -> Decimal:
        return Decimal(1) if factor <= 1 else Decimal("0.1") * scale * factor.ln() + 1

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low = low.to_integral_value(ROUND_FLOOR)
        high = high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))
    if low == high:
        high += Decimal("0.001")

    frequencies = []
    for i, frequency in enumerate(plain(rotary_dim, base)[0]):
        ramp = min(max((i - low) / (high - low), Decimal(0)), Decimal(1))
        frequencies.append(frequency * (1 - ramp) + frequency / factor * ramp)

    if attention_factor is None:
        attention_factor = (
            magnitude(mscale) / magnitude(mscale_all_dim)
            if mscale and mscale_all_dim
            else magnitude(Decimal(1))
        )
    return tuple(frequencies), attention_factor


def llama3(
    rotary_dim: int,
    base: Decimal,
    *,
    factor: Decimal,
    low_freq_factor: Decimal,
    high_freq_factor: Decimal,
    original_max_position_embeddings: Decimal,
) -> Frequencies:
    r"""Return plain, blended or interpolated frequencies by how often a pair turns [1]_.

    .. math::

        \theta_i' = \theta_i \left( \frac{1 - r_i}{s} + r_i \right), \quad
        r_i = \operatorname{clip}\left( \frac{n_i - l}{h - l}, 0, 1 \right)

    where :math:`n_i` is the number of turns within the original length.

    References
    ----------
    .. [1] Grattafiori et al. (2024). The Llama 3 Herd of Models. arXiv:2407.21783.
    """
    if high_freq_factor <= low_freq_factor:
        raise ValueError(
            f"high_freq_factor {high_freq_factor} is not above low_freq_factor {low_freq_factor}, "
            "so no band lies between them. Pass the values from the checkpoint's config."
        )
    frequencies = []
    for frequency in plain(rotary_dim, base)[0]:
        turns = original_max_position_embeddings * frequency / TWO_PI
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, Decimal(0)), Decimal(1))
        frequencies.append(frequency * ((1 - kept) / factor + kept))
    return tuple(frequencies), Decimal(1)


def longrope(
    rotary_dim: int,
    base: Decimal,
    *,
    short_factor: tuple[Decimal, ...],
    long_factor: tuple[Decimal, ...],
    original_max_position_embeddings: Decimal,
    length: Decimal,
    factor: Decimal = Decimal(1),
    attention_factor: Decimal | None = None,
) -> Frequencies:
    r"""Return :math:`\theta_i / \lambda_i`, with a list of divisors for each range of lengths [1]_.

    The long list holds once the length exceeds the original one. The attention factor is
    :math:`\sqrt{1 + \ln s / \ln L_0}` unless it is given.

    References
    ----------
    .. [1] Ding et al. (2024). LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens.
       arXiv:2402.13753.
    """
    for key, divisors in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(divisors) != rotary_dim // 2:
            raise ValueError(
                f"{key} has {len(divisors)} entries, but rotary_dim {rotary_dim} has "
                f"{rotary_dim // 2} pairs, so some would have no frequency. Pass one entry a pair."
            )
    divisors = long_factor if length > original_max_position_embeddings else short_factor
    frequencies = tuple(
        f / divisor for f, divisor in zip(plain(rotary_dim, base)[0], divisors, strict=True)
    )
    if attention_factor is None:
        attention_factor = Decimal(1)
        if factor > 1:
            if original_max_position_embeddings <= 1:
                raise ValueError(
                    f"original_max_position_embeddings {original_max_position_embeddings} has no "
                    "positive logarithm to form the attention factor with. Pass the length that "
                    "the model was trained for, or attention_factor."
                )
            attention_factor += factor.ln() / original_max_position_embeddings.ln()
        attention_factor = attention_factor.sqrt()
    return frequencies, attention_factor


def proportional(
    rotary_dim: int,
    base: Decimal,
    *,
    factor: Decimal = Decimal(1),
    partial_rotary_factor: Decimal = Decimal(1),
) -> Frequencies:
    r"""Return :math:`\theta_i / s` for the first share of the pairs and zero for the others.

    Pairs of frequency zero are left as they are; the exponents are those of the whole width.
    """
    frequencies, attention_factor = linear(rotary_dim, base, factor=factor)
    n_rotating = int(float(partial_rotary_factor) * rotary_dim // 2)
    idle = (Decimal(0),) * (rotary_dim // 2 - n_rotating)
    return frequencies[:n_rotating] + idle, attention_factor


@dataclass(frozen=True)
class Kind:
    """A scaling kind: its function and the keys it reads from a mapping."""

    compute: Callable[..., Frequencies]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    by_length: bool = False


KINDS = {
    "default": Kind(plain),
    "linear": Kind(linear, ("factor",)),
    "ntk": Kind(ntk, ("factor",)),
    "dynamic": Kind(
        dynamic,
        ("factor",),
        ("original_max_position_embeddings", "max_position_embeddings"),
        by_length=True,
    ),
    "yarn": Kind(
        yarn,
        ("original_max_position_embeddings",),
        (
            "factor",
            "max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ),
    ),
    "llama3": Kind(
        llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "longrope": Kind(
        longrope,
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "max_position_embeddings", "attention_factor"),
        by_length=True,
    ),
    "proportional": Kind(proportional, (), ("factor", "partial_rotary_factor")),
}


def check_rotary_dim(rotary_dim: int) -> int:
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim {rotary_dim} is not even and positive, and channels rotate in pairs. "
            f"Pass an even width, such as {max(2, rotary_dim - 1)}."
        )
    return int(rotary_dim)


def _replace_max_position_embeddings(name: str, given: dict[str, Any]) -> None:
    """Turn the extended length, which some configs give, into what the kind's formula reads."""
    extended = given.pop("max_position_embeddings", None)
    if name == "dynamic":
        if extended is not None:
            given.setdefault("original_max_position_embeddings", extended)
        needed, instead = "original_max_position_embeddings", "it"
    else:
        if extended is not None:
            given.setdefault("factor", extended / given["original_max_position_embeddings"])
        needed, instead = "factor", "it or 'max_position_embeddings'"
    if needed not in given and not (name == "longrope" and "attention_factor" in given):
        raise ValueError(
            f"Scaling kind {name!r} lacks {needed!r}, without which it is undefined. "
            f"Add {instead} to the mapping."
        )


def _plain(key: str, value: Any) -> Any:
    """Return ``value`` as a hashable value that JSON can hold."""
    if key == "truncate" and isinstance(value, bool):
        return value
    is_list = key in ("short_factor", "long_factor")
    numbers = tuple(value) if is_list and np.ndim(value) == 1 else (value,)
    if not all(isinstance(n, Real) and not isinstance(n, bool) for n in numbers) or (
        is_list and np.ndim(value) != 1
    ):
        raise TypeError(
            f"Rotary setting {key}={value!r} is no {'list of numbers' if is_list else 'number'}, "
            "so no frequencies follow from it. Pass the value from the checkpoint's config."
        )
    numbers = tuple(map(float, numbers))
    least = -np.inf if key.startswith("mscale") else 0
    most = 1 if key == "partial_rotary_factor" else np.inf
    if not all(np.isfinite(n) and least < n <= most for n in numbers):
        raise ValueError(
            f"Rotary setting {key}={value!r} is not finite and in ({least}, {most}], so no "
            "frequencies follow from it. Pass the value from the checkpoint's config."
        )
    return numbers if is_list else numbers[0]


def _decimal(value: Any) -> Any:
    return tuple(map(Decimal, value)) if isinstance(value, list | tuple) else Decimal(value)

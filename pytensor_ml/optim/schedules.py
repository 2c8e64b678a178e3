"""Learning rates as functions of the number of steps taken."""

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.optim.base import Schedule


def constant_schedule(learning_rate: float, *, warmup_steps: int = 0) -> Schedule:
    """Keep the rate.

    Parameters
    ----------
    learning_rate : float
        The rate.
    warmup_steps : int
        In how many steps the rate first climbs: that of step i, counted from 0, is
        ``learning_rate * (i + 1) / (warmup_steps + 1)``.

    Examples
    --------
    >>> import numpy as np
    >>> from pytensor_ml.optim import constant_schedule
    >>> schedule = constant_schedule(0.5, warmup_steps=4)
    >>> [round(float(schedule(i).eval(mode="NUMBA")), 3) for i in (0, 3, 4, 9)]
    [0.1, 0.4, 0.5, 0.5]
    """

    def schedule(step: TensorVariable) -> TensorVariable:
        return _typed(learning_rate, step)

    return _warmed_up(schedule, learning_rate, warmup_steps)


def linear_schedule(
    learning_rate: float,
    total_steps: int,
    final_learning_rate: float = 0.0,
    transition_begin: int = 0,
    *,
    warmup_steps: int = 0,
) -> Schedule:
    """Go from one rate to another along a straight line, and stay there.

    Parameters
    ----------
    learning_rate, final_learning_rate : float
        The rates.
    total_steps : int
        In how many steps, at least 1.
    transition_begin : int
        How many steps keep the first rate before.
    warmup_steps : int
        As for :func:`constant_schedule`; everything else comes after.

    Examples
    --------
    >>> from pytensor_ml.optim import linear_schedule
    >>> schedule = linear_schedule(0.5, 100, 0.1)
    >>> [round(float(schedule(i).eval(mode="NUMBA")), 3) for i in (0, 50, 100, 150)]
    [0.5, 0.3, 0.1, 0.1]
    """
    _check_total(total_steps)

    def schedule(step: TensorVariable) -> TensorVariable:
        progress = _progress(_as_float(step) - _typed(transition_begin, step), total_steps)
        change = _typed(final_learning_rate - learning_rate, step)
        return _typed(learning_rate, step) + change * progress

    return _warmed_up(schedule, learning_rate, warmup_steps)


def cosine_schedule(
    learning_rate: float,
    total_steps: int,
    final_learning_rate: float = 0.0,
    *,
    warmup_steps: int = 0,
) -> Schedule:
    r"""Go from one rate to another along half a wave of a cosine [1]_, and stay there.

    Parameters
    ----------
    learning_rate, final_learning_rate : float
        The rates.
    total_steps : int
        In how many steps, at least 1.
    warmup_steps : int
        As for :func:`constant_schedule`; everything else comes after.

    Examples
    --------
    >>> from pytensor_ml.optim import cosine_schedule
    >>> schedule = cosine_schedule(0.5, 100, 0.1)
    >>> [round(float(schedule(i).eval(mode="NUMBA")), 3) for i in (0, 25, 50, 100, 150)]
    [0.5, 0.441, 0.3, 0.1, 0.1]

    References
    ----------
    .. [1] Loshchilov and Hutter (2016). SGDR: Stochastic Gradient Descent with Warm Restarts.
       arXiv:1608.03983.
    """
    _check_total(total_steps)

    def schedule(step: TensorVariable) -> TensorVariable:
        angle = _typed(math.pi, step) * _progress(_as_float(step), total_steps)
        share = (_typed(1, step) + pt.cos(angle)) * _typed(0.5, step)
        final = _typed(final_learning_rate, step)
        return final + _typed(learning_rate - final_learning_rate, step) * share

    return _warmed_up(schedule, learning_rate, warmup_steps)


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Follow schedules one after another, each of which counts from 0 where it begins.

    Parameters
    ----------
    schedules : sequence of schedules
        What to follow.
    boundaries : sequence of int
        The steps at which all but the first begin.

    Raises
    ------
    ValueError
        If there is not one boundary less than there are schedules, or they do not increase from
        above 0.

    Examples
    --------
    >>> from pytensor_ml.optim import constant_schedule, join_schedules, linear_schedule
    >>> schedule = join_schedules([constant_schedule(0.5), linear_schedule(0.5, 10)], [90])
    >>> [round(float(schedule(i).eval(mode="NUMBA")), 3) for i in (0, 89, 95, 100)]
    [0.5, 0.5, 0.25, 0.0]
    """
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"join_schedules got {len(schedules)} schedules and {len(boundaries)} boundaries, so "
            "it is not known where each begins. Pass one boundary for each but the first."
        )
    if any(start >= end for start, end in pairwise([0, *boundaries])):
        raise ValueError(
            f"join_schedules got the boundaries {list(boundaries)}, with which a schedule would "
            "end before it begins. Pass steps above 0, each larger than the one before."
        )

    def schedule(step: TensorVariable) -> TensorVariable:
        step = _as_float(step)
        rate = schedules[0](step)
        for following, boundary in zip(schedules[1:], boundaries, strict=True):
            start = _typed(boundary, step)
            rate = pt.where(pt.lt(step, start), rate, following(step - start))
        return rate

    return schedule


def _warmed_up(schedule: Schedule, learning_rate: float, warmup_steps: int) -> Schedule:
    if not isinstance(warmup_steps, Integral) or warmup_steps < 0:
        raise ValueError(
            f"A schedule got warmup_steps={warmup_steps}, in which the rate cannot climb. Pass an "
            "int of at least 0."
        )
    if not warmup_steps:
        return schedule

    def climb(step: TensorVariable) -> TensorVariable:
        return (_as_float(step) + _typed(1, step)) * _typed(
            learning_rate / (warmup_steps + 1), step
        )

    return join_schedules([climb, schedule], [warmup_steps])


def _progress(steps: TensorVariable, total_steps: int) -> TensorVariable:
    """Return which share of the steps has been taken."""
    share = steps / _typed(total_steps, steps)
    return pt.clip(share, _typed(0, steps), _typed(1, steps))


def _as_float(step: Any) -> TensorVariable:
    step = pt.as_tensor(step)
    return step if step.type.dtype.startswith("float") else step.astype(config.floatX)


def _typed(value: float, step: Any) -> TensorVariable:
    return pt.constant(value, dtype=_as_float(step).type.dtype)


def _check_total(total_steps: int) -> None:
    if total_steps < 1:
        raise ValueError(
            f"A schedule got total_steps={total_steps}, in which no rate can change. Pass at least "
            "1."
        )

"""Steps of several batches."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pytensor_ml.base import sharing_ops
from pytensor_ml.optim.base import (
    Gradients,
    LossGradientsOrUpdates,
    Parameter,
    Steps,
    Transform,
    UpdateOp,
    Updates,
    gradients_for,
    state_for,
    step_count,
)


def accumulate_gradients(
    rule: Transform, n_batches: int, *, namespace: str = "accumulate"
) -> Transform:
    """Let a rule take one step for several batches, by the mean of their gradients.

    Calls in between leave the parameters, and the state and the step count of the rule, as they
    are.

    Parameters
    ----------
    rule : callable
        An optimizer, or a chain that ends with one.
    n_batches : int
        How many batches a step is taken for, at least 1.
    namespace : str
        What the names of the state begin with, after the parameter's: ``accumulate/step_count`` and
        ``W/accumulate/gradient``.

    Returns
    -------
    callable
        A rule, from a loss or gradients and the parameters to updates. Every batch weighs the same,
        however many targets of it count.

    Raises
    ------
    ValueError
        If the number of batches is no int of at least 1.

    Examples
    --------
    >>> from pytensor_ml.optim import accumulate_gradients, adamw
    >>> rule = accumulate_gradients(adamw(3e-4), 8)
    """
    if not isinstance(n_batches, Integral) or n_batches < 1:
        raise ValueError(
            f"accumulate_gradients got n_batches={n_batches}, after which no step would come. Pass "
            "an int of at least 1."
        )

    def accumulated(
        loss_gradients_or_updates: LossGradientsOrUpdates, parameters: Sequence[Parameter]
    ) -> Updates:
        gradients = gradients_for("accumulate_gradients", loss_gradients_or_updates, parameters)
        count = step_count(namespace)
        is_due = pt.eq(count, n_batches - 1)
        sums = {p: state_for(p, f"{namespace}/gradient") for p in parameters}
        with sharing_ops():
            add = AddedShare(n_batches=n_batches)
            means = Gradients(gradients)
            means.update((p, add(gradients[p], sums[p])) for p in parameters)
            steps = rule(means, parameters)
            updates = Steps(
                {variable: Chosen()(new, variable, is_due) for variable, new in steps.items()}
            )
            for p in parameters:
                updates[sums[p]] = Cleared()(means[p], is_due)
        updates[count] = pt.where(is_due, pt.constant(0, dtype="int64"), count + 1)
        return updates

    return accumulated


class AddedShare(UpdateOp):
    """Add a gradient's share of a mean: inputs the gradient and the sum so far."""

    __props__ = ("n_batches",)

    n_batches: int

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        gradient, total = inputs
        dtype = total.type.dtype
        return [total + gradient.astype(dtype) * pt.constant(1 / self.n_batches, dtype=dtype)]


class Chosen(UpdateOp):
    """Choose between a new value and the old one: inputs both, and whether to take the new."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        new, old, is_due = inputs
        return [pt.where(is_due, new, old)]


class Cleared(UpdateOp):
    """Keep a sum or start it anew: inputs the sum and whether it has been used."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        total, is_due = inputs
        return [pt.where(is_due, pt.constant(0, dtype=total.type.dtype), total)]

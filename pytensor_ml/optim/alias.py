"""Optimizers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import sharing_ops
from pytensor_ml.optim.base import (
    LearningRate,
    LossGradientsOrUpdates,
    Parameter,
    Steps,
    Transform,
    Updates,
    gradients_for,
    rate_at,
    scalar_dtype,
    state_for,
    step_count,
)
from pytensor_ml.optim.rules import AdamStep, GradientStep, LionStep, MomentumStep

type Mask = Callable[[Parameter], bool]


def sgd(
    learning_rate: LearningRate = 0.01,
    momentum: float = 0.0,
    nesterov: bool = False,
    *,
    namespace: str = "sgd",
) -> Transform:
    r"""Descend along the gradient, or along the velocity that it gathers.

    .. math::
        v \leftarrow \mu v + g, \qquad \theta \leftarrow \theta - \eta v

    With ``nesterov``, :math:`\theta \leftarrow \theta - \eta (g + \mu v)` [1]_.

    Parameters
    ----------
    learning_rate : float, scalar variable or schedule
        The rate :math:`\eta`; a schedule is a function of the number of steps taken.
    momentum : float
        The share :math:`\mu` of the velocity that is kept, at least 0 and below 1.
    nesterov : bool
        Whether to look ahead along the velocity.
    namespace : str
        What the names of the state begin with, after the parameter's: ``W/sgd/velocity``.

    Returns
    -------
    callable
        A rule, from a loss or gradients and the parameters to updates.

    Raises
    ------
    ValueError
        If a number is out of its range, or there is nothing to look ahead along.

    Examples
    --------
    >>> from pytensor_ml.optim import sgd
    >>> from pytensor_ml.params import trainable
    >>> w = trainable([1.0, 2.0], name="w")
    >>> [variable.name for variable in sgd(0.1, momentum=0.9)((w**2).sum(), [w])]
    ['w', 'w/sgd/velocity']

    References
    ----------
    .. [1] Sutskever et al. (2013). On the importance of initialization and momentum in deep
       learning.
    """
    _check_share("sgd", momentum=momentum)
    if nesterov and not momentum:
        raise ValueError(
            "sgd got nesterov=True without a momentum, so there is no velocity to look ahead "
            "along. Pass a momentum, such as 0.9."
        )

    def step(
        parameter: Parameter, gradient: TensorVariable, rate: TensorVariable, _: Any
    ) -> Updates:
        if not momentum:
            return Steps({parameter: GradientStep()(parameter, gradient, rate)})
        velocity = state_for(parameter, f"{namespace}/velocity")
        op = MomentumStep(momentum=float(momentum), nesterov=nesterov)
        return _updated([parameter, velocity], op(parameter, gradient, velocity, rate))

    return _rule(namespace, learning_rate, step, counts_steps=callable(learning_rate))


def adam(
    learning_rate: LearningRate = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    amsgrad: bool = False,
    *,
    namespace: str = "adam",
) -> Transform:
    r"""Divide a mean of gradients by the root of a mean of their squares [1]_.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        \theta &\leftarrow \theta - \eta \frac{m / (1 - \beta_1^t)}
        {\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Parameters
    ----------
    learning_rate : float, scalar variable or schedule
        The rate :math:`\eta`; a schedule is a function of the number of steps taken.
    beta1, beta2 : float
        The share of each mean that is kept, at least 0 and below 1.
    epsilon : float
        What is added to the root, at least 0.
    amsgrad : bool
        Whether the largest v so far takes the place of v [2]_.
    namespace : str
        What the names of the state begin with, after the parameter's: ``adam/step_count``,
        ``W/adam/first_moment`` and ``W/adam/second_moment``.

    Returns
    -------
    callable
        A rule, from a loss or gradients and the parameters to updates.

    Raises
    ------
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> from pytensor_ml.optim import adam
    >>> from pytensor_ml.params import trainable
    >>> w = trainable([1.0, 2.0], name="w")
    >>> [variable.name for variable in adam(1e-3)((w**2).sum(), [w])]
    ['w', 'adam/step_count', 'w/adam/first_moment', 'w/adam/second_moment']

    References
    ----------
    .. [1] Kingma and Ba (2014). Adam: A Method for Stochastic Optimization. arXiv:1412.6980.
    .. [2] Reddi, Kale and Kumar (2018). On the Convergence of Adam and Beyond. arXiv:1904.09237.
    """
    return _adam("adam", learning_rate, 0.0, beta1, beta2, epsilon, amsgrad, None, namespace)


def adamw(
    learning_rate: LearningRate = 0.001,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    amsgrad: bool = False,
    mask: Mask | None = None,
    *,
    namespace: str = "adamw",
) -> Transform:
    r""":func:`adam`, and besides a decay of the parameters that does not pass through the moments.

    .. math:: \theta \leftarrow \theta - \eta \lambda \theta

    before Adam's step, with the same rate :math:`\eta` [1]_.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon, amsgrad
        As for :func:`adam`.
    weight_decay : float
        The factor :math:`\lambda`, at least 0.
    mask : callable, optional
        Which parameters decay; default is all. See :func:`matrices_except`.
    namespace : str
        As for :func:`adam`.

    Returns
    -------
    callable
        A rule, from a loss or gradients and the parameters to updates.

    Raises
    ------
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> from pytensor_ml.layers import Embedding
    >>> from pytensor_ml.optim import adamw, matrices_except
    >>> embedding = Embedding("tokens", n_embeddings=1000, n_features=64)
    >>> rule = adamw(3e-4, weight_decay=0.1, mask=matrices_except(embedding.W))

    References
    ----------
    .. [1] Loshchilov and Hutter (2017). Decoupled Weight Decay Regularization. arXiv:1711.05101.
    """
    return _adam(
        "adamw", learning_rate, weight_decay, beta1, beta2, epsilon, amsgrad, mask, namespace
    )


def lion(
    learning_rate: LearningRate = 1e-4,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    mask: Mask | None = None,
    *,
    namespace: str = "lion",
) -> Transform:
    r"""Step by the sign of a mean of gradients [1]_.

    .. math::
        \theta &\leftarrow \theta - \eta \, (\mathrm{sign}(\beta_1 m + (1 - \beta_1) g)
        + \lambda \theta) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    Every entry moves by the rate, so it is three to ten times smaller than Adam's.

    Parameters
    ----------
    learning_rate : float, scalar variable or schedule
        The rate :math:`\eta`; a schedule is a function of the number of steps taken.
    weight_decay : float
        The factor :math:`\lambda`, at least 0.
    beta1, beta2 : float
        The shares of m that are kept in the step and in m, at least 0 and below 1.
    mask : callable, optional
        Which parameters decay; default is all. See :func:`matrices_except`.
    namespace : str
        What the names of the state begin with, after the parameter's: ``W/lion/momentum``.

    Returns
    -------
    callable
        A rule, from a loss or gradients and the parameters to updates.

    Raises
    ------
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> from pytensor_ml.optim import lion
    >>> from pytensor_ml.params import trainable
    >>> w = trainable([1.0, 2.0], name="w")
    >>> [variable.name for variable in lion(1e-4)((w**2).sum(), [w])]
    ['w', 'w/lion/momentum']

    References
    ----------
    .. [1] Chen et al. (2023). Symbolic Discovery of Optimization Algorithms. arXiv:2302.06675.
    """
    _check_share("lion", beta1=beta1, beta2=beta2)
    _check_not_negative("lion", weight_decay=weight_decay)

    def step(
        parameter: Parameter, gradient: TensorVariable, rate: TensorVariable, _: Any
    ) -> Updates:
        momentum = state_for(parameter, f"{namespace}/momentum")
        op = LionStep(
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(weight_decay) if mask is None or mask(parameter) else 0.0,
        )
        return _updated([parameter, momentum], op(parameter, gradient, momentum, rate))

    return _rule(namespace, learning_rate, step, counts_steps=callable(learning_rate))


def matrices_except(*excluded: Parameter) -> Mask:
    """Return a mask that leaves out vectors, which norms and biases are, and ``excluded``.

    Parameters
    ----------
    *excluded : parameter
        What is not to decay besides, such as the table of an embedding.

    Examples
    --------
    >>> from pytensor_ml.layers import Embedding, Linear
    >>> from pytensor_ml.optim import matrices_except
    >>> table = Embedding("tokens", n_embeddings=1000, n_features=64).W
    >>> fc = Linear("fc", n_in=64, n_out=64)
    >>> [matrices_except(table)(parameter) for parameter in (table, fc.W, fc.b)]
    [False, True, False]
    """
    return lambda parameter: parameter.type.ndim >= 2 and parameter not in excluded


def _adam(
    name: str,
    learning_rate: LearningRate,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    amsgrad: bool,
    mask: Mask | None,
    namespace: str,
) -> Transform:
    _check_share(name, beta1=beta1, beta2=beta2)
    _check_not_negative(name, epsilon=epsilon, weight_decay=weight_decay)
    slots = ["first_moment", "second_moment", *(["max_second_moment"] if amsgrad else [])]

    def step(
        parameter: Parameter,
        gradient: TensorVariable,
        rate: TensorVariable,
        bias_corrections: Sequence[TensorVariable],
    ) -> Updates:
        moments = [state_for(parameter, f"{namespace}/{slot}") for slot in slots]
        op = AdamStep(
            beta1=float(beta1),
            beta2=float(beta2),
            epsilon=float(epsilon),
            weight_decay=float(weight_decay) if mask is None or mask(parameter) else 0.0,
            amsgrad=amsgrad,
        )
        results = op(parameter, gradient, *moments, rate, *bias_corrections)
        return _updated([parameter, *moments], results)

    return _rule(namespace, learning_rate, step, counts_steps=True, betas=(beta1, beta2))


def _rule(
    namespace: str,
    learning_rate: LearningRate,
    step: Callable[..., Updates],
    *,
    counts_steps: bool,
    betas: Sequence[float] = (),
) -> Transform:
    """Return the rule that takes ``step`` of each parameter, gradient, rate and bias corrections.

    The bias correction of a mean with the share beta after t steps is 1 - beta**t.
    """
    if (
        not callable(learning_rate)
        and not isinstance(learning_rate, TensorVariable)
        and not 0 <= learning_rate < math.inf
    ):
        raise ValueError(
            f"{namespace} got a learning rate of {learning_rate}, which does not lead downhill. "
            "Pass one of at least 0."
        )

    def rule(
        loss_gradients_or_updates: LossGradientsOrUpdates, parameters: Sequence[Parameter]
    ) -> Updates:
        gradients = gradients_for(namespace, loss_gradients_or_updates, parameters)
        dtype = scalar_dtype(parameters)
        steps = Steps(gradients)
        count = step_count(namespace) if counts_steps else None
        rate = rate_at(learning_rate, count, dtype)
        bias_corrections = []
        if count is not None:
            steps[count] = count + 1
            # Not beta**t: in float32, a beta of 0.999 is off by 1e-5 of its distance from 1.
            t = (count + 1).astype(dtype)
            bias_corrections = [
                -pt.expm1(t * pt.constant(math.log(beta) if beta else -math.inf, dtype=dtype))
                for beta in betas
            ]
        with sharing_ops():
            for parameter in parameters:
                steps.update(step(parameter, gradients[parameter], rate, bias_corrections))
        return steps

    return rule


def _updated(variables: Sequence[Parameter], values: Sequence[TensorVariable]) -> Updates:
    return Steps(zip(variables, values, strict=True))


def _check_share(name: str, **shares: float) -> None:
    for which, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(
                f"{name} got {which}={share}, with which a mean would not forget. Pass a share of "
                "at least 0 and below 1."
            )


def _check_not_negative(name: str, **numbers: float) -> None:
    for which, number in numbers.items():
        if not number >= 0:
            raise ValueError(
                f"{name} got {which}={number}, with which parameters could grow without bound. "
                "Pass a number of at least 0."
            )

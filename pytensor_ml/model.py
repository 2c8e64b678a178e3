"""A network with its parameters, to be drawn, trained and run."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from pytensor.compile.executor import Function
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.loss import Loss, supervised_loss
from pytensor_ml.optim.base import Parameter, Transform
from pytensor_ml.optim.train import TrainStep, compile_train
from pytensor_ml.params import TrainableParameter
from pytensor_ml.plot import network_part
from pytensor_ml.pytensorf import collect_data_inputs, collect_trainable_params, compile_predict
from pytensor_ml.state import Initializer, RandomState, initialize_params
from pytensor_ml.summary import Part, Summarized


class Model(Summarized):
    """A network's output and what is done with it.

    Parameters
    ----------
    y : tensor
        The output, built from inputs by layers.
    compile_kwargs : dict, optional
        What both functions are compiled with (:func:`pytensor_ml.pytensorf.function`), such as
        ``{"mode": backend_mode("jax")}``.

    Raises
    ------
    TypeError
        If the output is not one variable.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor
    >>> from pytensor_ml.layers import Input, Linear
    >>> from pytensor_ml.loss import CrossEntropy
    >>> from pytensor_ml.model import Model
    >>> from pytensor_ml.optim import adam
    >>> from pytensor_ml.pytensorf import backend_mode
    >>> x = Input("x", shape=(None, 2))
    >>> y = Linear("fc", n_in=2, n_out=2)(x)
    >>> model = Model(y, compile_kwargs={"mode": backend_mode("numba")}).initialize(seed=0)
    >>> step = model.compile_train(adam(0.1), CrossEntropy(expect_logits=True))
    >>> batch = np.array([[0.0, 1.0], [1.0, 0.0]], pytensor.config.floatX)
    >>> losses = [float(step(batch, np.array([0, 1]))) for _ in range(20)]
    >>> bool(losses[-1] < 0.5 * losses[0])
    True
    >>> model.predict(batch).argmax(axis=-1).tolist()
    [0, 1]
    """

    def __init__(self, y: TensorVariable, compile_kwargs: dict[str, Any] | None = None):
        if not isinstance(y, Variable):
            raise TypeError(
                f"Model got {type(y).__name__}, but a loss compares one output. Pass one tensor; "
                "compile_predict takes a list of them."
            )
        self.y = y
        self._compile_kwargs = compile_kwargs or {}
        self._predict: Function | None = None

    def _part(self) -> Part:
        return network_part(self.y, title=f"Model({self.y})")

    @property
    def weights(self) -> list[TrainableParameter]:
        """The parameters that training updates."""
        return collect_trainable_params(self.y)

    def initialize(
        self,
        seed: RandomState = None,
        initializers: Mapping[SharedVariable, Initializer] | None = None,
    ) -> Self:
        """Draw every parameter anew; see :func:`~pytensor_ml.state.initialize_params`."""
        weights = self.weights
        values = initialize_params(weights, seed, initializers)
        for parameter, value in zip(weights, values, strict=True):
            parameter.set_value(value, borrow=True)
        return self

    def compile_train(
        self,
        rule: Transform,
        loss_fn: Loss | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        *,
        loss: TensorVariable | None = None,
        parameters: Sequence[Parameter] | None = None,
        inputs: Sequence[Variable] | None = None,
        extra_outputs: Sequence[Variable] | None = None,
    ) -> TrainStep:
        """Compile a function that takes a batch and makes the loss smaller.

        Parameters
        ----------
        rule : callable
            An optimizer, or a chain that ends with one.
        loss_fn : Loss, optional
            The loss of the output. The compiled function then takes targets, called ``target``,
            after the inputs.
        compile_kwargs : dict, optional
            What takes precedence over the model's own.
        loss : scalar tensor, optional
            A loss built from the output or from what leads to it, in the place of ``loss_fn``.
            Parameters of its own are trained too.
        parameters : sequence of parameters, optional
            What to train; all others stay as they are. Default is every trainable parameter of the
            output and of the loss.
        inputs : sequence of Variable, optional
            Inputs in calling order. Default is those that the loss and the extra outputs need: of
            the output's own, then the target, then others.
        extra_outputs : sequence of Variable, optional
            What to return besides the loss.

        Returns
        -------
        TrainStep

        Raises
        ------
        ValueError
            If not just one of ``loss_fn`` and ``loss`` is given, or as
            :func:`~pytensor_ml.optim.compile_train` raises.
        """
        if (loss_fn is None) == (loss is None):
            given = "neither loss_fn nor loss" if loss is None else "both loss_fn and loss"
            raise ValueError(
                f"compile_train got {given}, so it is not known what to make small. Pass one: "
                "loss_fn for targets to compare the output with, or a loss built from it."
            )
        targets: list[Variable] = []
        if loss_fn is not None:
            loss, target = supervised_loss(self.y, loss_fn)
            targets = [target]
        assert loss is not None
        if parameters is None:
            parameters = list(dict.fromkeys([*self.weights, *collect_trainable_params(loss)]))
        if inputs is None:
            needed = collect_data_inputs([loss, *(extra_outputs or ())])
            ordered = dict.fromkeys([*collect_data_inputs(self.y), *targets, *needed])
            inputs = [variable for variable in ordered if variable in needed]
        return compile_train(
            loss,
            rule,
            parameters=parameters,
            inputs=inputs,
            extra_outputs=extra_outputs,
            compile_kwargs={**self._compile_kwargs, **(compile_kwargs or {})},
        )

    def predict(self, *inputs: np.ndarray, **named_inputs: np.ndarray) -> np.ndarray:
        """Return the output for a batch, without what only acts in training.

        Parameters
        ----------
        *inputs, **named_inputs : array
            The inputs of the output, in the order in which they were made or by their names.
        """
        if self._predict is None:
            self._predict = compile_predict(self.y, compile_kwargs=self._compile_kwargs)
        return np.asarray(self._predict(*inputs, **named_inputs))

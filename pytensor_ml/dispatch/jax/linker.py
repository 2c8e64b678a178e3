"""A linker for functions that own what they update."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from pytensor.link.jax.linker import JAXLinker


class DonatingJAXLinker(JAXLinker):
    """PyTensor's JAX linker, except that updated shared variables give their buffers away.

    JAX then writes the new value into the old one's memory instead of copying what has not changed.
    Nothing else may hold the old value: JAX deletes it.
    """

    def jit_compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if self.scalar_shape_inputs:
            return super().jit_compile(fn)
        # From the position of an output to that of the input that it updates.
        fgraph: Any = self.fgraph
        # JAX pairs what is given away with outputs of the same shape, first with first.
        given_away = [i for _, i in sorted(fgraph.update_mapping.items())]
        kept = [i for i in range(len(fgraph.inputs)) if i not in given_away]
        order = [*given_away, *kept]

        @partial(jax.jit, donate_argnums=0)
        def run(given_away: list[Any], kept: list[Any]) -> Any:
            arguments = dict(zip(order, [*given_away, *kept], strict=True))
            return fn(*(arguments[i] for i in range(len(order))))

        return lambda *arguments: run(
            [arguments[i] for i in given_away], [arguments[i] for i in kept]
        )

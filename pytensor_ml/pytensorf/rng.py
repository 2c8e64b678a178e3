"""Generators that a graph draws from."""

from collections.abc import Sequence

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import applys_between
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.random.type import RandomType

from pytensor_ml.pytensorf.collect import Outputs, as_output_list

type SeedSequenceSeed = int | Sequence[int] | np.ndarray | None
type RandomSeed = SeedSequenceSeed | np.random.SeedSequence


def collect_rng_updates(outputs: Outputs) -> dict[SharedVariable, Variable]:
    """Map each shared generator that the graph draws from to its state after the last draw.

    Raises
    ------
    ValueError
        If two draws start from the same state, which would make them equal.
    """
    next_state: dict[Variable, Variable] = {}
    for node in applys_between([], as_output_list(outputs)):
        if not isinstance(node.op, RNGConsumerOp):
            continue
        for before, after in node.op.update(node).items():
            if next_state.get(before, after) is not after:
                raise ValueError(
                    f"Two draws read the same state of generator {before}, so they would be equal "
                    "and its update is not defined. Give each its own generator, or chain them."
                )
            next_state[before] = after

    updates = {}
    for generator in [v for v in next_state if isinstance(v, SharedVariable)]:
        state: Variable = generator
        while state in next_state:
            state = next_state[state]
        updates[generator] = state
    return updates


def reseed_rngs(rngs: Sequence[SharedVariable], seed: RandomSeed) -> None:
    """Give each generator a stream of its own that follows from ``seed``."""
    sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    for rng, child in zip(rngs, sequence.spawn(len(rngs)), strict=True):
        assert isinstance(rng.type, RandomType)
        rng.set_value(np.random.Generator(np.random.PCG64(child)), borrow=True)

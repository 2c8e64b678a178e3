"""What the processes of a benchmark run, a module for each package that takes part.

A module has ``PACKAGES``, whose versions are printed, and a function for every task, which takes
the row's inputs and settings and returns a :class:`Task`. Those for other environments import
nothing that may be missing there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# Of training in one run: a step that follows another finds memory and threads as training does.
TRAINING_STEPS = 4


class Task(NamedTuple):
    """What is measured.

    Attributes
    ----------
    run : callable
        Does the work and returns its outputs, which are ready, as a list of arrays.
    prepare : callable
        What has to come before each run, untimed.
    steps : int
        How many equal steps a run makes; times are of one.
    """

    run: Callable[[], list[Any]]
    prepare: Callable[[], None] = lambda: None
    steps: int = 1

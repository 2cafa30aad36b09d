"""Parameters that share a bucket's vector, and have no gradient in a step: Keras passes them over.

The vector is updated with zeros in their place, and their elements stay as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import keras_optimizers

import keras
import numpy as np
import tensorflow as tf

Live = Mapping[int, np.ndarray]
"""By position of a variable, which of its elements are updated."""


def live_elements(sizes: Sequence[int], live: Sequence[bool]) -> np.ndarray | None:
    """Which elements of a vector have a gradient; None if all have.

    Args:
        sizes: Elements of each member.
        live: Per member, whether it has one.
    """
    return None if all(live) else np.repeat(np.asarray(live, bool), sizes)


@contextlib.contextmanager
def passed_over(optimizer: Any, variables: Sequence[keras.Variable], live: Live) -> Iterator[None]:
    """Meanwhile, an optimizer leaves elements of some variables, and their state, as they are.

    Args:
        optimizer: An element-wise optimizer.
        variables: What it was built on.
        live: Of those that are not updated whole.
    """
    if not live:
        yield
        return
    families = keras_optimizers.families(optimizer).values()
    # Before the decay of weights, which comes before the first step.
    weights = {n: tf.identity(variables[n].value) for n in live}

    def step(own: Any, gradient: Any, argument: Any, rate: Any) -> None:
        n = keras_optimizers.index_of(optimizer, argument)
        if n not in live:
            own(gradient, argument, rate)
            return
        slots = [slot for family in families if (slot := family[n]) is not None]
        before = [weights[n], *(tf.identity(slot.value) for slot in slots)]
        own(gradient, argument, rate)
        for variable, value in zip([variables[n], *slots], before):
            variable.assign(tf.where(live[n], tf.convert_to_tensor(variable.value), value))

    with keras_optimizers.steps_through(optimizer, step):
        yield

"""What the passes of a step gave, before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

State = Mapping[int, tuple[keras.Variable, Any]]
"""Variables and their new values, by identity of the variable."""


@dataclasses.dataclass(frozen=True)
class SliceResult:
    """What one slice's pass gave; of a pipeline, one replica's.

    Attributes:
        loss: Its part of the loss, a scalar; None of a pass without one.
        terms: Its part of each compiled loss.
        loss_parts: Its part of the rest of the loss; see `kdist.program.loss_parts`.
        gradients: Of the connected variables; its form is the runner's, which reads it.
        updated: New values of the state that was written.
        outputs: The model's outputs for its rows; None where nobody wants them.
        masks: The mask of each flat output, or None, and then the logits of each, or None.
        added: Values of `add_loss`, of a pass without a loss.
    """

    loss: Any = None
    terms: Sequence[Any] = ()
    loss_parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gradients: Any = ()
    updated: Sequence[Any] = ()
    outputs: Any = None
    masks: Sequence[Any] = ()
    added: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What all slices' passes gave.

    Attributes:
        loss: The loss of the global batch, a scalar.
        slices: What each slice gave.
        once: Gradients, by position, of weights that a loss over the whole batch itself uses, and
            of penalties of tables on the host.
        state: All variables that a step with such a loss writes, and their new values, by identity
            of the variable.
    """

    loss: Any
    slices: Sequence[SliceResult]
    once: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    state: State = dataclasses.field(default_factory=dict)

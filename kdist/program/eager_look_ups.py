"""How tables are looked up where operations run one by one, and tensors do not tell."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdist.storage.sparse import LookUp

import tensorflow as tf

if TYPE_CHECKING:
    from kdist.program.program import Program

_NOT_KNOWN = (
    "run_eagerly: it is not known which look-ups are the same in each batch (positions, for "
    "example), since {}. Replicas' are taken as different ones, and an Adam or Adagrad sees those "
    "that are the same several times. Leave run_eagerly out to have them told apart. Received: "
    "tables {}"
)


class EagerLookUps:
    """How the rows of a program's gradients come about, from a trace; nothing of it runs."""

    def __init__(self) -> None:
        self._known: dict[int, LookUp] | None = None

    def learn(self, program: Program, given: Sequence[Any]) -> None:
        """Traces the program, the first time.

        Args:
            program: The program.
            given: What its `loss_and_gradients` is called with, eagerly.
        """
        if self._known is not None:
            return
        self._known = {}  # of the trace, which tells by itself
        specs = tf.nest.map_structure(_spec, list(given))
        try:
            traced = tf.function(
                lambda *one: program.loss_and_gradients(*one)["loss"], autograph=False
            )
            traced.get_concrete_function(*specs)
        except Exception as error:  # what runs op by op need not be made for graphs
            reason = f"the model cannot be traced ({str(error).splitlines()[0]})"
            warnings.warn(_NOT_KNOWN.format(reason, "of all layers"), stacklevel=2)
            return
        rows = program.trained.rows
        both = [i for i, one in rows.items() if one.same]
        if both:
            names = [program.state.trainable[i].path for i in both]
            reason = "the batch looks up in the same tables, too"
            warnings.warn(_NOT_KNOWN.format(reason, names), stacklevel=2)
        self._known = {i: one for i, one in rows.items() if i not in both}

    def known(self, position: int, otherwise: LookUp) -> LookUp:
        """How a variable is looked up: in a graph as its tensors tell."""
        known = self._known if tf.executing_eagerly() else None
        return (known or {}).get(position, otherwise)


def _spec(value: Any) -> Any:
    return tf.type_spec_from_value(value) if tf.is_tensor(value) else value

"""How tables are looked up where operations run one by one, and tensors do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdist.display.warn import warn
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
    """How the rows of a program's gradients come about, from a trace; nothing of it runs.

    Each kind of batch has a trace: which inputs there are may decide what looks a table up.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[int, LookUp]] = {}
        self._known: dict[int, LookUp] = {}

    def learn(self, program: Program, given: Sequence[Any]) -> None:
        """Traces the program, the first time that it is given such data.

        Args:
            program: The program.
            given: What its `loss_and_gradients` is called with, eagerly.
        """
        kind = repr(tf.nest.map_structure(_kind, given[2]))
        if kind not in self._of:
            self._of[kind] = self._traced(program, given)
        self._known = self._of[kind]

    @staticmethod
    def _traced(program: Program, given: Sequence[Any]) -> dict[int, LookUp]:
        """What a trace says, by variable; nothing of what it cannot tell."""
        specs = tf.nest.map_structure(_spec, list(given))
        try:
            traced = tf.function(
                lambda *one: program.loss_and_gradients(*one)["loss"], autograph=False
            )
            traced.get_concrete_function(*specs)
        except Exception as error:  # what runs op by op need not be made for graphs
            reason = f"the model cannot be traced ({str(error).splitlines()[0]})"
            warn(_NOT_KNOWN.format(reason, "of all layers"))
            return {}
        rows = program.trained.rows
        both = [i for i, one in rows.items() if one.same]
        if both:
            names = [program.state.trainable[i].path for i in both]
            reason = "the batch looks up in the same tables, too"
            warn(_NOT_KNOWN.format(reason, names))
        return {i: one for i, one in rows.items() if i not in both}

    def known(self, position: int, otherwise: LookUp) -> LookUp:
        """How a variable is looked up: in a graph as its tensors tell."""
        known = self._known if tf.executing_eagerly() else {}
        return known.get(position, otherwise)


def _kind(leaf: Any) -> Any:
    """What batches of one kind have in common; their sizes may differ."""
    return (type(leaf), leaf.dtype, leaf.shape.rank) if tf.is_tensor(leaf) else type(leaf)


def _spec(value: Any) -> Any:
    return tf.type_spec_from_value(value) if tf.is_tensor(value) else value

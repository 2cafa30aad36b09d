"""Rows of tables on the host, or split by hand, for calls of a layer.

A step of kdist's own fetches the rows of its one batch before its programs run. A step of the
user's may call a layer several times, each time with other ids: each call fetches its own, and its
gradient, which a tape asks for later, is of those.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.calls.arguments import CallArguments
from kdist.calls.functions import CalledProgram, CallInput
from kdist.program.program import Program
from kdist.storage.asked_rows import LookUps
from kdist.storage.fetched_table import FetchedTable
from kdist.storage.sparse import LookUp

import keras
import tensorflow as tf


class CallTables:
    """The tables that calls of a layer, of one kind, look up.

    Args:
        program: The model's.
        layer: The layer.
        call: Its `call`.
        arguments: What it is called with, but for sizes.
    """

    def __init__(
        self, program: Program, layer: keras.Layer, call: Callable, arguments: CallArguments
    ) -> None:
        inside = set(map(id, keras_models.flat_layers(layer)))
        mine = [one for one in program.tables.layers if id(one) in inside]
        self._program = CalledProgram(program, call, arguments)
        self._program.place_tables(mine)
        self._asked: dict[FetchedTable, Any] = {
            one.entry: {} for one in self._program.tables.tables
        }

    @property
    def look_ups(self) -> Mapping[int, LookUp]:
        """By position of the table, how its rows are looked up, once a call has fetched some."""
        return self._program.tables.look_ups

    def fetch(self, parts: Sequence[CallInput]) -> CallRows:
        """Fetches what a call looks up, in the graph of now.

        Args:
            parts: Per replica, what the call takes.

        Raises:
            ValueError: Which rows it looks up does not follow from what it takes.
        """
        rows = CallRows(
            self,
            {entry: LookUps(asked=known, of_call=True) for entry, known in self._asked.items()},
        )
        if self._asked:
            given = [(one.rows, one.masks, one.shared) for one in parts]
            with rows.taken():
                self._program.tables.fetch_micro_batches([[(x, None, None)] for x in given], True)
        return rows

    def spec(self, replica: int, variable: keras.Variable) -> tf.TensorSpec:
        """What a replica's program takes as a variable; of such a table, rows."""
        return self._program.spec(variable, (replica, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class CallRows:
    """The rows of one call.

    Attributes:
        tables: Whose they are.
        look_ups: By table, which.
    """

    tables: CallTables
    look_ups: Mapping[FetchedTable, LookUps]

    def spec(self, replica: int, variable: keras.Variable) -> tf.TensorSpec:
        """See `CallTables.spec`."""
        return self.tables.spec(replica, variable)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Meanwhile, the tables are read, and their gradients are, by these look-ups."""
        with contextlib.ExitStack() as stack:
            for entry, look_ups in self.look_ups.items():
                stack.enter_context(entry.looking_up(look_ups))
            yield

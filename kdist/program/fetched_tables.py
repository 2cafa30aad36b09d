"""Tables on the host, or split by hand, as programs see them: rows fetched before a program runs.

A program cannot ask other devices while it runs on one. So what it will look up is computed before,
by the part of the model's own call that leads from its inputs to the indices, and each table's
place among the program's parameters is taken by the rows of its look-ups, one after the other. The
layer then takes as many of them as it has indices. What the gradient of these rows is, is the
table's gradient as rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kdist.graphs.inferred import InferredShapes
from kdist.program.batch import SplitBatch
from kdist.program.look_ups import Recorded
from kdist.program.looked_up import LookedUp, RowsAhead
from kdist.program.pruning import pruned
from kdist.storage.alike_rows import Asked
from kdist.storage.asked_rows import Asking
from kdist.storage.sparse import LookUp, depends_on

import keras
import tensorflow as tf

RANDOM = ("Random", "StatefulRandom", "StatefulStandard", "StatefulUniform", "Multinomial")
"""How the names of operations begin that draw other numbers each time they run."""


class FetchedTables:
    """The tables of a model that are on the host, or split by hand.

    Args:
        tables: The tables; one that several stages look up, once for each.
        forward: Calls the model in a scope whose look-ups are given: (x, training, look-ups,
            values by identity of the variable).
        variables: All variables that the model reads, but the tables.

    Attributes:
        look_ups: By position of the table, how its rows are looked up in training, once known.
        frozen: The same by identity of the variable, of tables that do not train.
    """

    def __init__(
        self,
        tables: Sequence[LookedUp],
        forward: Callable,
        variables: Sequence[keras.Variable],
    ) -> None:
        self.tables = list(tables)
        self.layers = list(dict.fromkeys(one.layer for one in tables))
        self.look_ups: dict[int, LookUp] = {}
        self.frozen: dict[int, LookUp] = {}
        self._forward = forward
        self._variables = list(variables)
        self._functions: dict[Any, Any] = {}
        self._by_batch: dict[tuple[bool, int], bool] = {}
        self._taken = False

    def __bool__(self) -> bool:
        return bool(self.tables)

    def fetch(self, batch: SplitBatch, training: bool) -> None:
        """Fetches what the slices' programs will look up, in the graph of now.

        Args:
            batch: The batch.
            training: Whether for the programs of training.
        """
        self.fetch_micro_batches([[part] for part in batch.parts], training)

    def fetch_micro_batches(self, parts: Sequence[Sequence[Any]], training: bool) -> None:
        """Fetches what stages' programs will look up; see `fetch`.

        Args:
            parts: `parts[replica][micro_batch]`: (x, y, sample_weight).
            training: See `fetch`.
        """
        for table, s, found, asking in self._asked(parts, training):
            if not (training and self._taken and table.entry.prefetch):
                table.entry.look_up(s, found, asking)

    def _asked(
        self, parts: Sequence[Sequence[Any]], training: bool
    ) -> Iterator[tuple[LookedUp, int, Sequence[Any], Asking]]:
        """Per table and replica, what `FetchedTable.look_up` takes."""
        for r, row in enumerate(parts) if self.tables else ():
            where = [one.slice_of(r) for one in self.tables]
            with tf.device(self.tables[0].entry.device((where[0], 0))):
                indices = [self._indices(x, training) for x, _, _ in row]
            for number, (table, s) in enumerate(zip(self.tables, where, strict=True)):
                # What does not depend on the batch is looked up once, as by one device.
                different = row if self._by_batch[training, number] else row[:1]
                found = [t for one in indices[: len(different)] for t in one[number]]
                which = (different, training, number)
                on = functools.partial(self._indices_on, *which)
                yield table, s, found, Asking(on, functools.partial(self._sizes_at, *which))

    def look_ahead(self, parts: Sequence[Sequence[Any]], there: Any) -> RowsAhead:
        """Fetches what the next step of training will look up, as tables are now.

        Args:
            parts: See `fetch_micro_batches`.
            there: Whether there is a next step, a boolean scalar.
        """
        return [
            (table, s, table.entry.look_ahead(s, found, asking, there))
            for table, s, found, asking in self._asked(parts, training=True)
            if table.entry.prefetch
        ]

    @contextlib.contextmanager
    def taking(self, ahead: RowsAhead) -> Iterator[None]:
        """Has a step in this block take the rows that were fetched for it."""
        for table, s, one in ahead:
            table.entry.take(s, one)
        self._taken = True
        try:
            yield
        finally:
            self._taken = False

    @property
    def prefetched(self) -> list[LookedUp]:
        """The tables whose rows are looked up a step ahead."""
        return [table for table in self.tables if table.entry.prefetch]

    @property
    def penalized(self) -> list[LookedUp]:
        """The tables with a penalty over all of their rows."""
        found = {one.position: one for one in self.tables if one.trains and one.penalty is not None}
        return list(found.values())

    def of(self, variable: keras.Variable, virtual: int | None = None) -> LookedUp | None:
        """A table, as a virtual stage looks it up; None for a variable that is none."""
        every = [one for one in self.tables if one.layer.embeddings is variable]
        found = [one for one in every if virtual is None or virtual in (one.virtuals or (virtual,))]
        return next(iter(found), None)

    def turn(self, variable: keras.Variable, virtual: int, micro_batch: int) -> int:
        """See `LookedUp.turn`."""
        table = self.of(variable, virtual)
        assert table is not None
        return table.turn(micro_batch, virtual)

    def joined(self, s: int, position: int, gradients: Mapping[int, Any]) -> Any:
        """A slice's gradient of a table's rows, look-up by look-up, of those of turns."""
        if not self.look_ups[position].by_batch:
            return tf.add_n(list(gradients.values()))
        like = next(iter(gradients.values()))
        entry = next(one.entry for one in self.tables if one.position == position)
        # Look-ups from which nothing is learned have none.
        parts = [
            gradients[turn] if turn in gradients else tf.zeros([size, like.shape[1]], like.dtype)
            for turn, size in enumerate(entry.wanted[s].sizes)
        ]
        return tf.concat(parts, 0)

    def spec(
        self,
        variable: keras.Variable,
        part: tuple[int, int] | None = None,
        virtual: int | None = None,
    ) -> tf.TensorSpec | None:
        """Spec of what a program takes as a table; None for a variable that is none.

        Args:
            variable: The variable.
            part: Replica and micro-batch whose sizes it has; None for any.
            virtual: The virtual stage that looks it up.
        """
        table = self.of(variable, virtual)
        if table is None:
            return None
        size = None
        if part is not None:
            sizes = table.entry.wanted[table.slice_of(part[0])].sizes
            size = sizes[table.turn(part[1], virtual)] if len(sizes) > 1 else sizes[0]
        dtype, columns = table.layer.embeddings.dtype, table.layer.embeddings.shape[1]
        return tf.TensorSpec([size if isinstance(size, int) else None, columns], dtype)

    def _indices_on(
        self, row: Sequence[Any], training: bool, number: int, device: str
    ) -> Sequence[Any]:
        """The indices of some micro-batches in one table, computed on a device."""
        with tf.device(device):
            return [t for x, _, _ in row for t in self._indices(x, training)[number]]

    def _sizes_at(
        self,
        row: Sequence[Any],
        training: bool,
        number: int,
        shape_of: Callable[[Any], Any],
    ) -> Sequence[int | None]:
        """How many these would be; see `Asking`."""
        found = []
        for x, _, _ in row:
            function, given = self._function_of(x, training)
            shapes = [*map(shape_of, given), *(t.shape for t in function.captured_inputs)]
            graph = InferredShapes(function.graph.as_graph_def(), function.inputs, shapes)
            results = self._by_table(function.outputs)[number]
            found += [graph.shape(t).num_elements() for t in results]
        return found

    def _indices(self, x: Any, training: bool) -> Sequence[Sequence[Any]]:
        """Per table and virtual stage of it, what a replica looks up, in order, flat."""
        function, given = self._function_of(x, training)
        return self._by_table(function(*given))

    def _by_table(self, results: Sequence[Any]) -> Sequence[Sequence[Any]]:
        found = iter(results)
        return [[next(found) for _ in one.virtuals or (None,)] for one in self.tables]

    def _function_of(self, x: Any, training: bool) -> tuple[Any, list[Any]]:
        """What finds the indices, made on first use, and the tensors that it takes."""
        leaves = tf.nest.flatten(x, expand_composites=True)
        given = [tf.convert_to_tensor(t) for t in leaves if t is not None]
        specs = tuple(tf.TensorSpec(t.shape, t.dtype) for t in given)
        key = training, repr(tf.nest.map_structure(type, x)), specs
        if key not in self._functions:
            with tf.init_scope():
                self._functions[key] = self._function(x, specs, training)
        function, look_ups = self._functions[key]
        self.look_ups.update(look_ups)
        return function, given

    def _function(
        self, x: Any, specs: Sequence[tf.TensorSpec], training: bool
    ) -> tuple[Callable, Mapping[int, LookUp]]:
        """From the model's inputs to the indices: that part of the model's call alone.

        Returns:
            The function, and how tables that train are looked up, by position.
        """
        sources: list[tuple[Any, str]] = []
        recorded = Recorded()

        def indices(*tensors: Any) -> list[Any]:
            given = iter(tensors)
            like = tf.nest.flatten(x, expand_composites=True)
            leaves = [None if t is None else next(given) for t in like]
            values = {}
            for v in self._variables:
                values[id(v)] = tf.compat.v1.placeholder(v.dtype, v.shape)
                sources.append((values[id(v)], f"variable {v.path!r}"))
            filled = tf.nest.pack_sequence_as(x, leaves, expand_composites=True)
            self._forward(filled, training, recorded, values)
            sources.extend(recorded.rows)
            return [
                t
                for one in self.tables
                for t in recorded.indices(one.layer.embeddings, one.virtuals)
            ]

        whole = tf.compat.v1.wrap_function(indices, list(specs))
        inputs, results = whole.inputs[: len(specs)], whole.outputs
        look_ups: dict[int, LookUp] = {}
        places = [(n, v) for n, one in enumerate(self.tables) for v in one.virtuals or (None,)]
        for (number, virtual), result in zip(places, results, strict=True):
            table = self.tables[number]
            _check_sources(table, result, sources)
            # Of one that several stages look up, each micro-batch does, whatever the ids are.
            by_batch = virtual is not None or depends_on(result, inputs, training)
            self._by_batch[training, number] = by_batch
            known = LookUp(by_batch, index_bytes=result.dtype.size)
            if training and table.trains:
                look_ups[table.position] = known
            elif training:
                self.frozen[id(table.layer.embeddings)] = known
        for position, look_up in look_ups.items():
            same = self._alike(position, recorded, inputs) if look_up.by_batch else ()
            look_ups[position] = dataclasses.replace(look_up, same=same)
        return pruned(whole, inputs, results), look_ups

    def _alike(
        self, position: int, recorded: Recorded, inputs: Sequence[Any]
    ) -> tuple[tuple[int, int], ...]:
        """How many look-ups of a table are the same in each batch, by stage; tells it which."""
        same: dict[int, int] = {}
        for table in (one for one in self.tables if one.position == position):
            stage = table.entry.topology.slices[table.slice_of(0)].stage
            for number, virtual in enumerate(table.virtuals or (None,)):
                found = [
                    Asked(t.shape.num_elements(), not depends_on(t, inputs))
                    for t in recorded.asked(table.layer.embeddings, virtual)
                ]
                if any(one.same for one in found):
                    unknown = sum(one.size is None for one in found)
                    if unknown > 1 or any(one.same and one.size is None for one in found):
                        _refuse_alike(table, f"look-ups of sizes {[one.size for one in found]}")
                    same[stage] = same.get(stage, 0) + sum(n.size or 0 for n in found if n.same)
                table.entry.note_asked(stage, number, found)
        return tuple(same.items())


def _refuse_alike(table: LookedUp, received: str) -> None:
    """Refuses look-ups of which it is not known where they are the same in each batch.

    Raises:
        ValueError: Always, but where sums of all rows are what the optimizer takes.
    """
    if not table.entry.combined or table.entry.now.of_call:
        raise ValueError(
            "A table on the host, or split by hand, has look-ups by ids of the batch and by ids "
            "that are the same in each batch; the optimizer takes each row's gradient by itself, "
            "and which these are has to be known. Give the model's inputs their sizes, or use "
            "kdist.lazy(...), or leave the table whole on the device. Received: "
            f"layer {table.layer.path or table.layer.name!r}, {received}"
        )


def _check_sources(table: LookedUp, ids: Any, sources: Sequence[tuple[Any, str]]) -> None:
    """Refuses indices that are not known before the model runs.

    Raises:
        ValueError: They follow from weights, from rows of a table, or from random numbers.
    """
    named = {tensor.op.name: what for tensor, what in sources}
    waiting, seen = [ids.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        what = named.get(operation.name, "")
        if operation.type.startswith(RANDOM):
            what = f"random numbers, {operation.name!r}"
        if what:
            raise ValueError(
                "Rows of a table on the host, or split by hand, are fetched before the model runs, "
                "so which they are must follow from the model's inputs alone. Leave the table "
                "whole on the device, without kdist.place or manual_split, and with "
                "placement='device' in a TableConfig. Received: layer "
                f"{table.layer.path or table.layer.name!r}, whose indices follow from {what}"
            )
        waiting.extend(t.op for t in operation.inputs)

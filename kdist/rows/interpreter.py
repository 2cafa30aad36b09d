"""Walks through a traced graph and the functions it calls, with what is known of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kdist._compat import function_graphs
from kdist.rows import (
    contractions,
    control,
    elementwise,
    joins,
    look_ups,
    parsing,
    reductions,
    shaping,
)
from kdist.rows.known_functions import known_function
from kdist.rows.mapped import LoopMap, mapped_by_loop
from kdist.rows.node import RULES, Node
from kdist.rows.numbers import fixed, power_of
from kdist.rows.own_numbers import choice_after_own_number
from kdist.rows.values import Const, Linear, Mixed, Mixing, Rows, RowsMeet, Value, join
from kdist.storage.constant_ids import ConstantIds
from kdist.storage.constants import constant_value

import numpy as np
import tensorflow as tf

# Imported for the rules that they register.
assert contractions and elementwise and joins and look_ups and parsing and reductions and shaping

ROW_BY_ROW = "kdist_row_by_row"
"""Name of an `IdentityN(result, argument)` whose first output counts as the argument does."""
LOOP_LIMIT = 12
"""Passes over a loop's body after which it counts as mixing; each can only lose knowledge."""
SHAPE_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
LOOK_UPS = {"Gather", "GatherV2", "ResourceGather"}
CALLS = {"StatefulPartitionedCall", "If", "Case", "While"}
ASSIGN = {
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceScatterAdd",
    "ResourceScatterUpdate",
    "ResourceScatterSub",
}
OWN_PLACES = {
    "GatherNd": (1, (0,)),
    "ScatterNd": (0, (1,)),
    "TensorScatterAdd": (1, (0, 2)),
    "TensorScatterMax": (1, (0, 2)),
    "TensorScatterMin": (1, (0, 2)),
    "TensorScatterSub": (1, (0, 2)),
    "TensorScatterUpdate": (1, (0, 2)),
}
"""Operations that may be of each row by itself: which input has the places, and which has rows."""


class Interpreter:
    """Follows the batch through graphs.

    Args:
        batch: Its size B in these graphs.

    Attributes:
        mixings: Where rows met first, in graph order.
        accepted: The same inside of what is marked to count row by row.
        constant_ids: Looked up in tables.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.mixings: list[Mixing] = []
        self.accepted: list[Mixing] = []
        self.constant_ids = ConstantIds()
        self._written: dict[int, Value] = {}
        self._known: dict[int, Value] = {}
        self._special: Mapping[str, Callable[[Any, list[Value]], list[Value]]] = {
            **dict.fromkeys(OWN_PLACES, self._chosen),
            "IdentityN": self._identities,
            "PartitionedCall": self._call,
            "StatefulPartitionedCall": self._call,
            "If": self._branches,
            "StatelessIf": self._branches,
            "Case": self._branches,
            "StatelessCase": self._branches,
            "While": self._loop,
            "StatelessWhile": self._loop,
            "ReadVariableOp": self._read,
            "TensorListStack": self._stacked,
            **dict.fromkeys(ASSIGN, self._assign),
        }

    def evaluate(
        self, graph: Any, given: Mapping[int, Value], outputs: Sequence[Any]
    ) -> list[Value]:
        """What is known about some tensors of a graph.

        Args:
            graph: A traced graph.
            given: By identity of a placeholder, what is known about it; others are constants.
            outputs: Tensors of the graph.
        """
        known = dict(given)
        for op in _needed(graph, outputs):
            if op.type in ("Placeholder", "PlaceholderWithDefault"):
                known.setdefault(id(op.outputs[0]), Const())
                continue
            values = [known[id(t)] for t in op.inputs]
            self._known = known
            for tensor, value in zip(op.outputs, self._outputs(op, values)):
                known[id(tensor)] = value
        return [known[id(t)] for t in outputs]

    def _outputs(self, op: Any, values: list[Value]) -> list[Value]:
        try:
            return self._special.get(op.type, self._usual)(op, values)
        except RowsMeet:
            return [Mixed(self._note(op, values))] * len(op.outputs)

    def _usual(self, op: Any, values: list[Value]) -> list[Value]:
        """Rows that have met stay so; else the operation's rule says."""
        mixed = [v for v in values if isinstance(v, Mixed)]
        if mixed and op.type not in SHAPE_ONLY:
            known = fixed(op.outputs[0]) if op.type == "Minimum" else None
            return [mixed[0] if known is None else self._refined_to(known)] * len(op.outputs)
        apart = [Const() if isinstance(v, Mixed) else v for v in values]
        return self._by_rule(Node(op, apart, self.batch))

    def _chosen(self, op: Any, values: list[Value]) -> list[Value]:
        """What rows take from a table, or write to one; or each from itself, and to itself."""
        at, rows = OWN_PLACES[op.type]
        joined = choice_after_own_number(op.inputs[at], self.batch)
        if joined is None or op.outputs[0].shape[0] != self.batch:
            return self._usual(op, values)
        choice, parts = joined
        given = [values[n] for n in rows] + [self._known[id(part)] for part in parts]
        alike = [v for v in given if isinstance(v, Const) and v.is_flat(0) and v.power == 0]
        own = [v for v in given if v == Rows(0)]
        if not own or len(own) + len(alike) < len(given):
            return self._usual(op, values)
        self.mixings = [one for one in self.mixings if one.name != choice.name]
        return [Rows(0)]

    def _stacked(self, op: Any, values: list[Value]) -> list[Value]:
        """A list as a tensor; of what a loop did to each row, the rows."""
        found = mapped_by_loop(op, self.batch)
        if found is None:
            return self._usual(op, values)
        given = [self._known[id(one.inputs[0])] for one in found.lists]
        alike = [v for v in given if isinstance(v, Const) and v.is_flat(0) and v.power == 0]
        rows = [v for v in given if v == Rows(0)]
        if not rows or len(rows) + len(alike) < len(given) or not self._is_of_element(found):
            return self._usual(op, values)
        inside = f"{found.loop.name}/"
        names = {found.loop.name, *(one.name for one in found.lists)}
        self.mixings = [
            m for m in self.mixings if m.name not in names and not m.name.startswith(inside)
        ]
        return [Rows(0)]

    def _is_of_element(self, mapped: LoopMap) -> bool:
        """Whether what a loop makes of an element does not depend on how many there are."""
        known = self._known
        others = {name: known[id(tensor)] for name, tensor in mapped.others.items()}
        (value,) = self.evaluate(mapped.body, others, [mapped.element])
        self._known = known
        return isinstance(value, Const) and value.power == 0

    def _by_rule(self, node: Node) -> list[Value]:
        count = len(node.op.outputs)
        if node.op.type in LOOK_UPS and node.constant:
            self._note_ids(*node.op.inputs[:2])
        try:
            found = RULES.get(node.op.type, control.without_rule)(node)
        except RowsMeet:
            if not node.constant:
                raise
            found = control.without_rule(node)
        values = found if isinstance(found, list) else [found] * count
        return [self._refined(t, v) for t, v in zip(node.op.outputs, values)]

    def _note_ids(self, table: Any, ids: Any) -> None:
        value = constant_value(ids) if table.dtype.is_floating and table.shape.rank == 2 else None
        if value is not None:
            self.constant_ids = self.constant_ids.with_look_up(value, self.batch)

    def _refined(self, tensor: Any, value: Value) -> Value:
        """A constant that depends on the batch's size, with its power if the graph fixes it."""
        if not isinstance(value, Const) or value.power == 0:
            return value
        known = fixed(tensor)
        return value if known is None else Const(value.flat, power_of(known, self.batch))

    def _refined_to(self, known: np.ndarray) -> Const:
        """A constant of which the graph fixes the value, whatever it is computed from."""
        return Const(power=power_of(known, self.batch))

    def _note(self, op: Any, values: Sequence[Value]) -> Mixing:
        """Lists an operation at which rows meet; a sum over rows that it gets is named with it."""
        sums = [v.origin.operation for v in values if isinstance(v, Linear)]
        operation = f"{sums[0]}, then {op.type}" if sums else op.type
        mixing = Mixing(_scope(op.name), operation, op.name)
        if mixing not in self.mixings:  # a loop's body is looked at several times
            self.mixings.append(mixing)
        return mixing

    def _identities(self, op: Any, values: list[Value]) -> list[Value]:
        scope, _, name = op.name.rpartition("/")
        if (known := known_function(op)) is not None:
            result = known(op, values)
            if result is not None:
                self.mixings = [m for m in self.mixings if not m.name.startswith(f"{scope}/")]
                return [result, *values[1:]]
        if not name.startswith(ROW_BY_ROW):
            return values
        inside = [m for m in self.mixings if m.name.startswith(f"{scope}/")]
        given = next((one for one in values[1:] if isinstance(one, Mixed)), values[1])
        if not isinstance(given, Mixed):
            self.mixings = [m for m in self.mixings if m not in inside]
            self.accepted.extend(inside)
        return [given] * len(values)

    def _assign(self, op: Any, values: list[Value]) -> list[Value]:
        """A variable that is written within the graph is read as what was written."""
        if all(isinstance(v, Const) for v in values[1:]):
            return []
        if op.type == "AssignVariableOp":
            self._written[id(op.inputs[0])] = values[1]
        else:
            self._written[id(op.inputs[0])] = Mixed(self._note(op, values))
        return []

    def _read(self, op: Any, values: list[Value]) -> list[Value]:
        return [self._written.get(id(op.inputs[0]), values[0])]

    def _function(self, op: Any, attribute: Any) -> Any:
        graph = function_graphs.function_graph(op.graph, attribute.name)
        if graph is None:
            raise RowsMeet
        return graph

    def _body(self, graph: Any, outside: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """What a called graph returns for tensors outside of it; it may write their variables."""
        if len(graph.inputs) != len(values):
            raise RowsMeet
        given = {id(t): v for t, v in zip(graph.inputs, values)}
        pairs = list(zip(outside, graph.inputs))
        self._pass_on((id(a), id(b)) for a, b in pairs)
        found = self.evaluate(graph, given, graph.outputs)
        self._pass_on((id(b), id(a)) for a, b in pairs)
        return found

    def _pass_on(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Notes what was written to one name of a variable for its other name."""
        for one, other in pairs:
            if one in self._written:
                self._written[other] = self._written[one]

    def _call(self, op: Any, values: list[Value]) -> list[Value]:
        return self._body(self._function(op, op.get_attr("f")), op.inputs, values)

    def _branches(self, op: Any, values: list[Value]) -> list[Value]:
        """Either branch, if no row decides which."""
        if op.type.endswith("Case"):
            attributes = op.get_attr("branches")
        else:
            attributes = [op.get_attr("then_branch"), op.get_attr("else_branch")]
        if isinstance(values[0], Mixed):
            return [values[0]] * len(op.outputs)
        if not isinstance(values[0], Const):
            raise RowsMeet
        found = [self._body(self._function(op, a), op.inputs[1:], values[1:]) for a in attributes]
        first = found[0]
        for other in found[1:]:
            first = [join(a, b) for a, b in zip(first, other)]
        return first

    def _loop(self, op: Any, values: list[Value]) -> list[Value]:
        """What stays true however often the body runs, if no row decides how often."""
        condition = self._function(op, op.get_attr("cond"))
        body = self._function(op, op.get_attr("body"))
        for _ in range(LOOP_LIMIT):
            (runs,) = self._body(condition, op.inputs, values)
            after = [
                join(old, new) for old, new in zip(values, self._body(body, op.inputs, values))
            ]
            if isinstance(runs, Mixed):
                return [runs] * len(values)
            if not isinstance(runs, Const):
                raise RowsMeet
            if after == values:
                if runs.power != 0:
                    self._only_unchanged(body, values)
                return values
            values = after
        raise RowsMeet

    def _only_unchanged(self, body: Any, values: Sequence[Value]) -> None:
        """Where the batch's size decides how often: only counters may change."""
        for old, new, value in zip(body.inputs, body.outputs, values):
            changed = old is not new and new.op.type != "Identity"
            if changed and not (isinstance(value, Const) and value.power is None):
                raise RowsMeet


def _scope(name: str) -> str:
    return name.rpartition("/")[0]


def _may_write(op: Any) -> bool:
    """Whether an operation calls a function that gets a variable to write."""
    return op.type in CALLS and any(t.dtype == tf.resource for t in op.inputs)


def _needed(graph: Any, outputs: Sequence[Any]) -> list[Any]:
    """The operations that outputs, or writes to variables, depend on, in graph order."""
    operations = graph.get_operations()
    waiting = [t.op for t in outputs]
    waiting += [op for op in operations if op.type in ASSIGN or _may_write(op)]
    needed: set[int] = set()
    while waiting:
        op = waiting.pop()
        if id(op) not in needed:
            needed.add(id(op))
            waiting.extend(t.op for t in op.inputs)
    return [op for op in operations if id(op) in needed]

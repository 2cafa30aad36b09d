"""What is known of a virtual stage over inner axes once it has been lowered.

Which of its operations communicate, and what a device has of their results, comes out after it was
traced, and after what runs again was chosen. So it is traced once more, and chosen anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kdist.stages.waiting import nbytes

PASSED_ON = ("Sum", "Reshape", "Relayout", "RelayoutLike", "Identity", "BroadcastTo")
"""Types of operations that lowering leaves out where they return what they are given."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What an earlier lowering of a virtual stage showed, by number in the joint trace.

    Attributes:
        communicate: Operations that communicate over inner axes.
        sizes: By operation, the bytes that a device has of each of its results; None if it has not
            been lowered, or where they do not matter.
        sums: Operations that one device computes for all of its group, and these read where it
            lies; by operation, the groups.
    """

    communicate: frozenset[int] = frozenset()
    sizes: Mapping[int, tuple[int, ...]] | None = None
    sums: Mapping[int, Sequence[Sequence[int]]] = dataclasses.field(default_factory=dict)

    def turns(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """By name of a sum, whose turn it is to compute it, whatever else its function computes.

        Args:
            numbers: Of operations, by name.
        """
        turn = {number: i for i, number in enumerate(sorted(self.sums))}
        return {name: turn[number] for name, number in numbers.items() if number in turn}

    def elsewhere(self) -> list[frozenset[int]]:
        """By device of a slice, the sums that lie on another one."""
        devices = {k for groups in self.sums.values() for members in groups for k in members}

        def there(k: int, groups: Sequence[Sequence[int]], turn: int) -> bool:
            return k in {members[turn % len(members)] for members in groups}

        found = [
            frozenset(
                number
                for turn, number in enumerate(sorted(self.sums))
                if not there(k, self.sums[number], turn)
            )
            for k in sorted(devices)
        ]
        return found or [frozenset()]

    def size(self, tensor: Any, numbers: Mapping[str, int], elsewhere: Collection[int] = ()) -> int:
        """Bytes of a tensor of the joint trace on a device.

        Args:
            tensor: The tensor.
            numbers: Of operations, by name.
            elsewhere: Operations whose results lie on another device.
        """
        sizes = self.sizes or {}
        while True:
            number = numbers.get(tensor.op.name, -1)
            if number in elsewhere:
                return 0
            found = sizes.get(number, ())
            if tensor.value_index < len(found):
                return found[tensor.value_index]
            same = _same(tensor.op.inputs, tensor)
            if not sizes or not same:
                return nbytes(tensor)
            tensor = same[0]

    def kind(self, operation: Any, numbers: Mapping[str, int]) -> str:
        """The type of an operation of the joint trace, as far as memory is concerned.

        Args:
            operation: The operation.
            numbers: Of operations, by name.
        """
        if not self._left_out(operation, numbers):
            return str(operation.type)
        if operation.type in PASSED_ON and _same(operation.inputs, operation.outputs[0]):
            return "Identity"
        given = [t.op for t in operation.inputs]
        constant = given and all(self._left_out(one, numbers) for one in given)
        return "Const" if constant else str(operation.type)

    def _left_out(self, operation: Any, numbers: Mapping[str, int]) -> bool:
        """Whether lowering made nothing of an operation."""
        if not self.sizes or operation.type == "Placeholder":
            return False
        return numbers.get(operation.name) not in self.sizes


UNKNOWN = Known()
"""Of a virtual stage that has not been lowered."""


def _same(inputs: Any, tensor: Any) -> list[Any]:
    """Inputs of a tensor's shape and dtype."""
    if not tensor.shape.is_fully_defined():
        return []
    return [t for t in inputs if t.dtype == tensor.dtype and t.shape == tensor.shape]

"""What is lowered for a mesh, and what comes of it: the program of one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.display.tables import readable
from kdist.dtensor import lowered
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.sizes import Examples

import tensorflow as tf
from tensorflow.experimental import dtensor


@dataclasses.dataclass(frozen=True)
class Argument:
    """What a parameter of a lowered program takes.

    Attributes:
        name: Its name in the program.
        position: Which flat input of the traced function it is; None: the device's number.
        layout: Of that input; None if every device has all of it.
    """

    name: str
    position: int | None
    layout: dtensor.Layout | None = None


@dataclasses.dataclass(frozen=True)
class Island:
    """Operations of a traced function that every device runs whole, and what that costs.

    Attributes:
        operations: Their types and names, those that DTensor cannot expand first.
        reason: Why DTensor cannot.
        layer: Path of the layer that the first serves, empty outside of layers.
        bytes: Of the operands, on one device, that had to be gathered for it.
        flops: Of its matrix products; see `kdist.dtensor.flops`.
        share: What part of the function's that is.
    """

    operations: tuple[tuple[str, str], ...]
    reason: str
    layer: str
    bytes: int
    flops: float
    share: float

    @property
    def title(self) -> str:
        """Its first operation, and where that is."""
        kind, name = self.operations[0]
        if kind.endswith("PartitionedCall"):  # of what is inside it, the reason tells
            kind = self.reason.partition(":")[0]
        return f"{kind} in layer {self.layer!r}" if self.layer else f"{kind} ({name})"

    def __str__(self) -> str:
        others = len(self.operations) - 1
        return (
            f"{self.title}{f' and {others} operations around it' if others else ''}: "
            f"{readable(self.bytes)} gathered, {self.share:.0%} of the step's FLOPs not divided "
            f"({self.reason})"
        )


@dataclasses.dataclass(frozen=True)
class Function:
    """What is lowered.

    Attributes:
        specs: Of its flat inputs.
        call: Calls it in the graph that is being traced, with flat inputs; a structure of tensors.
    """

    specs: Sequence[tf.TensorSpec]
    call: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(
        cls,
        concrete: Any,
        shapes: Sequence[Any] | None = None,
        values: Mapping[int, Any] | None = None,
    ) -> Function:
        """A concrete function; what it captured is input.

        Args:
            concrete: The function.
            shapes: Of each flat input and capture, where it was traced for several.
            values: Of flat inputs that are the same in every call.
        """
        shapes = [t.shape for t in concrete.inputs] if shapes is None else shapes
        dtypes = [t.dtype for t in concrete.inputs]
        specs = list(map(tf.TensorSpec, shapes, dtypes))
        split = len(specs) - len(concrete.captured_inputs)

        def call(inputs: Sequence[Any]) -> Any:
            given = list(inputs)
            for position, value in (values or {}).items():
                given[position] = tf.constant(value)
            return keras_trainer.call_flat(concrete, given[:split], given[split:])

        return cls(specs, call)


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """What DTensor made of a traced function: the program of one device.

    Attributes:
        definition: The program, a `FunctionDef`; it may read its device's number.
        bodies: Functions of its loops and branches, by name.
        axes: Names and sizes of the mesh axes; devices are numbered row-major over them.
        arguments: What each parameter takes, in the program's order.
        results: For each flat result of the traced function, the tensor of the program that it is.
        layouts: Of each flat result.
        structure: The traced function's results, with positions of flat results as leaves.
        collectives: Those of the program.
        gathers: Where each device's part of a gather begins, by name of the collective, if that is
            not to be read from the program.
        examples: Of each flat result, where a program is for several sizes.
        bounded: Whether it is for sizes between those of the examples alone.
        untouched: Names of nodes and bodies that were added to what DTensor made, as they are.
        once: Names of the nodes that the first device alone runs.
        islands: What of the traced function runs on whole operands; see `kdist.dtensor.islands`.
        shape: Tells the shape of a node's output, where nodes have no note of it.
    """

    definition: Any
    bodies: Mapping[str, Any]
    axes: Mapping[str, int]
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    layouts: tuple[dtensor.Layout, ...]
    structure: Any
    collectives: tuple[lowered.Collective, ...] = ()
    gathers: Mapping[str, list[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    examples: tuple[Examples, ...] | None = None
    bounded: bool = False
    untouched: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()
    islands: tuple[Island, ...] = ()
    shape: Callable[[str, int], tf.TensorShape] | None = None

    @property
    def knows_sizes(self) -> bool:
        """Whether all sizes of tensors follow from those of what it takes."""
        noted = (n.attr[SHAPES].list.shape for n in self.definition.node_def if SHAPES in n.attr)
        shapes = [tf.TensorShape(one) for shapes in noted for one in shapes]
        return all(one.is_fully_defined() for one in shapes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axes.values())

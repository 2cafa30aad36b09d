"""A function and its vector-Jacobian product, where blocks run again in the backward half."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist.config.recompute_blocks import Blocks
from kdist.graphs.chunks import ProgramGraph
from kdist.graphs.layer_names import BACKWARD
from kdist.graphs.recompute import Passes
from kdist.program.again import Candidates, Nodes
from kdist.program.blocks import block_of
from kdist.program.vjp import PureFunction
from kdist.stages.laid_vjp import LaidVjp
from kdist.stages.lowered import UNKNOWN, Known
from kdist.stages.node_seconds import operation_seconds

import tensorflow as tf


class RepeatingVjp(LaidVjp):
    """The two halves of a function, with what the backward half computes again.

    Args:
        function: See `Vjp`.
        params: See `Vjp`.
        inputs: See `Vjp`.
        wrap: See `Vjp`.
        blocks: The model's blocks; None if nothing runs again.
        held: Calls of which something is kept at a time; see `Nodes`.
        known: What lowering has shown of the function.
        **how: See `LaidVjp`.

    Attributes:
        numbers: Of the operations of the joint trace, by name.
        local: Operations that run again, of blocks of which nothing may that communicates.
    """

    def __init__(
        self,
        function: PureFunction,
        params: Sequence[tf.TensorSpec],
        inputs: Sequence[tf.TensorSpec],
        wrap: Callable[..., Callable],
        *,
        blocks: Blocks | None,
        held: int,
        known: Known = UNKNOWN,
        **how: Any,
    ) -> None:
        self._blocks, self._held, self._known = blocks, held, known
        self.numbers: dict[str, int] = {}
        self.local: frozenset[str] = frozenset()
        self._effects: set[str] = set()
        super().__init__(function, params, inputs, wrap, **how)

    def cut(self, again: Collection[str] = ()) -> None:
        """See `Vjp.cut`; of what may not run again, nothing does."""
        again = frozenset(again) - self._effects
        keeps = self._blocks.keeps_communication if self._blocks else lambda _: False
        self.local = frozenset(n for n in again if keeps(block_of(n)))
        super().cut(again)

    def repeats(self, again: Collection[str]) -> bool:
        """Whether the backward half, before it is cut, would run any of some operations again."""
        again = frozenset(again) - self._effects
        kept, others = ({t.ref() for t in self._frontier(names)} for names in ((), again))
        return bool(again) and kept != others

    def candidates(self) -> Candidates:
        """The operations of blocks, but for what leaves them and what has an effect."""
        assert self._blocks is not None
        nodes = {op.name: op for op in self._joint_trace.graph.get_operations()}
        inputs = {name: [t.name for t in op.inputs] for name, op in nodes.items()}
        kept = {n for n, op in nodes.items() if op.op_def is None or op.op_def.is_stateful}
        if not self.backend.draws_alike:
            drawn = [op for op in nodes.values() if op.type.startswith("StatelessRandom")]
            # A mask is smaller than the numbers that it is made of.
            masks = [m for op in drawn for t in op.outputs for m in t.consumers()]
            kept |= {op.name for op in (*drawn, *masks)}
        self.numbers, self._effects = {name: i for i, name in enumerate(nodes)}, kept
        passes = Passes(frozenset(self._forward_ops), frozenset())
        whole = ProgramGraph(inputs, [t.name for t in self._outputs], effects=kept)
        known = Nodes(
            kind=lambda n: nodes[n].type,
            nbytes=lambda n: sum(map(self._size, nodes[n].outputs)),
            seconds=lambda n: operation_seconds(nodes[n]),
            communication={n for n, i in self.numbers.items() if i in self._known.communicate},
            unknown=self._unknown(),
            later=self._lowered_later,
            held=self._held,
        )
        return Candidates(whole, passes, self._blocks, known)

    def repeated_communication(self, forward: Any, backward: Sequence[Any]) -> frozenset[int]:
        """Numbers of operations that communicate, if any of them runs again and should not.

        Args:
            forward: What the backend made of the forward half, lowered.
            backward: What it made of the backward half, or of its halves.

        Raises:
            ValueError: It does not show which operation communicates.
        """
        if not self.local:
            return frozenset()
        again: set[str] = set().union(*(part.communicating() for part in backward))
        self._refuse_unknown(again - self.numbers.keys())
        if not again & self.local:
            return frozenset()
        repeated = (again | forward.communicating()) & self.local
        return frozenset(self.numbers[name] for name in repeated)

    def _refuse_unknown(self, nodes: set[str]) -> None:
        """Refuses what DTensor added of which it does not show for what."""
        assert self._blocks is not None
        for node in nodes:
            number = block_of(node)
            if BACKWARD not in node and self._blocks.keeps_communication(number):
                raise ValueError(
                    "In a pipeline's stage and in a step of one's own, over inner axes, "
                    "policy='selective' and mp_comm_recompute=False need to know which operation "
                    "communicates. Leave them out for layer "
                    f"{self._blocks.blocks[number].name!r}. Received: {node}"  # type: ignore[index]
                )

    def _size(self, tensor: Any, elsewhere: Collection[int] = ()) -> int:
        """Bytes of a tensor on a device."""
        return self._known.size(tensor, self.numbers, elsewhere)

    @property
    def _lowered_later(self) -> bool:
        """Whether lowering is still to show what a device has of each tensor."""
        unlowered = not self.backend.draws_alike and self._known.sizes is None
        return unlowered and not self._unknown()

    def _unknown(self) -> str:
        """Why sizes per device are not known, "" if they are."""
        params, inputs = self._arguments
        if all(t.shape.is_fully_defined() for t in (*params, *inputs)):
            return ""
        return "the sizes of a batch are not known when the step is traced"

"""The functions of one virtual stage: forward, backward, and the backward's two halves.

Zero-bubble schedules (Qi et al. 2023) split the backward: the gradient of the inputs, for which the
stage before waits, and the gradient of the weights, for which nobody does. Both are cut from the
one joint graph of `kdist.program.vjp.Vjp`; what the first half has computed goes to the second.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist.graphs.chunks import ProgramGraph, node_of
from kdist.pipeline.schedule import Schedule
from kdist.program.again import Candidates
from kdist.program.vjp import InnerFunction, PureFunction, reached, unflatten
from kdist.stages.body import StageBody
from kdist.stages.lowered import UNKNOWN, Known
from kdist.stages.repeating import RepeatingVjp
from kdist.stages.stage_peaks import Halves, StageTrace
from kdist.stages.waiting import StageMemory, made_by, most_held, owned, together

import tensorflow as tf

_SIZES = ("Shape", "ShapeN", "Size", "Rank")


class StageVjp(RepeatingVjp):
    """Forward and backward of a virtual stage.

    Only the first inputs, those from the stage before, get a gradient, and only the first outputs,
    what the stage sends on and its part of the loss, take one.

    Args:
        function: See `Vjp`.
        params: See `Vjp`.
        inputs: See `Vjp`.
        wrap: See `Vjp`.
        body: The virtual stage.
        boundary: Number of inputs that come from the stage before.
        state: Which inputs are state.
        targets: Tells, once the function has run, how many outputs take a cotangent.
        unread: Tells then which outputs nothing reads.
        split: Whether the backward is also cut into halves.
        known: What lowering has shown of the stage.
    """

    def __init__(
        self,
        function: PureFunction,
        params: Sequence[tf.TensorSpec],
        inputs: Sequence[tf.TensorSpec],
        wrap: Callable[[Any], Callable],
        *,
        body: StageBody,
        boundary: int,
        state: range,
        targets: Callable[[], int],
        unread: Callable[[], range],
        split: bool,
        known: Known = UNKNOWN,
        left_out: Collection[int] = (),
    ) -> None:
        self.boundary, self._count, self._split = boundary, targets, split
        self._left_out = left_out
        self._unread = unread
        self._body = body
        self._trace: StageTrace | None = None
        super().__init__(
            function,
            params,
            inputs,
            wrap,
            backend=body.backend,
            positions=body.params,
            trained=len(body.program.state.trainable),
            of_batch=lambda j: j not in state,
            blocks=body.program.blocks,
            held=body.staged.schedule.held()[body.virtual],
            known=known,
        )

    def _sources(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        return super()._sources(params, inputs[: self.boundary])

    def _targets(self, outputs: list[Any]) -> list[int]:
        found = super()._targets(outputs[: self._count()])
        return [i for i in found if i not in self._left_out]

    @property
    def inputs_without_gradient(self) -> list[int]:
        """Which tensors from the stage before get none."""
        kinds = self._kinds[self._sizes[0] :][: self.boundary]
        return [i for i, kind in enumerate(kinds) if kind is None]

    def _cut_backward(self, feeds: Sequence[Any]) -> None:
        if not self._split:
            super()._cut_backward(feeds)
            return
        joint, wrap = self._joint_trace, self._wrap
        weights, inward = self._of_weights()
        first = _backward_operations(inward, feeds, self._forward_ops)
        kept = self._made_by(first, weights, feeds)
        # With nothing to compute, the first half still is an operation, to be ordered and seen.
        passed = [] if inward else list(self._given)
        self._inward, self._kept = len(inward), len(kept)
        late = self._kept_feeds
        effects = self._effects_in(forward=False)
        self._call_input = InnerFunction(
            joint, feeds, [*inward, *kept, *passed], wrap, late, effects
        )
        if weights:
            self._call_weight = InnerFunction(joint, [*feeds, *kept], weights, wrap, late)

    def cut(self, again: Collection[str] = ()) -> None:
        """See `RepeatingVjp.cut`."""
        self._trace = None
        super().cut(again)

    def _of_weights(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Gradients of parameters, and those of inputs."""
        sizes = [0 if k is None else 1 if k == "dense" else 2 for k in self._kinds]
        count = sum(sizes[: self._sizes[0]])
        return self._fetches[:count], self._fetches[count:]

    def candidates(self) -> Candidates:
        """See `RepeatingVjp.candidates`."""
        found = super().candidates()
        nodes = {op.name: op for op in self._joint_trace.graph.get_operations()}
        # Of a tensor that another one is laid out like, no value is looked at.
        looked_at = {
            n: r[:1] if nodes[n].type == "RelayoutLike" else r
            for n, r in found.graph.inputs.items()
        }
        outputs = [t.name for t in self._read_outputs()]
        self._trace = StageTrace(
            ProgramGraph(looked_at, outputs, self._effects & self._forward_ops),
            self._forward_ops,
            {t.op.name for t in self._given},
            lambda n: self._kind(nodes[n]),
            lambda r: self._size(nodes[node_of(r)].outputs[int(r.rpartition(":")[2])]),
            self.backend.draws_alike,
        )
        return found

    def held(self, again: Collection[str], elsewhere: Collection[int] = ()) -> StageMemory:
        """What the virtual stage has on its device, if some operations run again.

        Args:
            again: Their names.
            elsewhere: Numbers of the operations whose results lie on another device.
        """
        assert self._trace is not None
        trace = self._trace.reading([n for n, i in self.numbers.items() if i in elsewhere])
        again = frozenset(again) - self._effects
        size = functools.partial(self._size, elsewhere=elsewhere)
        weights, inward = self._of_weights()
        saved = self._values(self._frontier(again), self._fetches)
        kept, names = [t.name for t in saved], [t.name for t in weights]
        put_off: list[Any] = []
        if self._split:
            handed = self._handed(weights, inward, saved)
            put_off = self._values([*saved, *handed, *self._given], weights)
            given = owned(put_off, size)
            halves = Halves(
                [t.name for t in inward],
                names,
                [t.name for t in handed],
                [name for name in kept if name in given],
                {name: n for name, n in given.items() if node_of(name) not in trace.seeds},
            )
            computing = trace.in_halves(kept, halves)
        else:
            computing = trace.in_one(kept, [t.name for t in inward], names)
        sent = [] if self._body.last else self._outputs[: self._count()]
        returned, mine = self._read_outputs()[self._count() :], set(map(made_by, saved))
        return StageMemory(
            computing,
            together(saved, size),
            together(put_off, size),
            sum(map(size, returned)),
            sum(size(t) for t in returned if made_by(t) in mine),
            together(sent, size),
            together(inward, size),
        )

    def elsewhere(self) -> list[frozenset[int]]:
        """See `Known.elsewhere`."""
        return self._known.elsewhere()

    def _kind(self, operation: Any) -> str:
        """The type of an operation, as far as memory is concerned.

        Over inner axes one device makes the gradient of a whole table. On the others the sums that
        lead to it are no part of a parameter's gradient.
        """
        kind = self._known.kind(operation, self.numbers)
        return "Add" if kind == "AddN" and not self.backend.draws_alike else kind

    def _read_outputs(self) -> list[Any]:
        """The outputs that something reads; on one device a call returns all of them."""
        unread = range(0) if self.backend.draws_alike else self._unread()
        return [t for i, t in enumerate(self._outputs) if i not in unread]

    @staticmethod
    def _values(feeds: Sequence[Any], fetches: Sequence[Any]) -> list[Any]:
        """Feeds of which values are looked at."""
        needed = reached(feeds, fetches, values=True)
        return [t for t in feeds if t.ref() in needed]

    def _handed(
        self, weights: Sequence[Any], inward: Sequence[Any], saved: Sequence[Any]
    ) -> list[Any]:
        """What the first half of a backward would give to the second, if so much is saved."""
        feeds = [*self._arguments[0], *saved, *self._given]
        first = _backward_operations(inward, feeds, self._forward_ops)
        return self._made_by(first, weights, feeds)

    def needs(self, half: str) -> set[int]:
        """Which parameters a backward looks at.

        Args:
            half: "backward", or "input" or "weight" of one in halves.
        """
        cut = getattr(self, f"_call_{half}", None)
        return set() if cut is None else {i for i in cut.needs if i < self._sizes[0]}

    def _made_by(self, made: set[str], fetches: Sequence[Any], feeds: Sequence[Any]) -> list[Any]:
        """Tensors of the operations in `made` that `fetches` need."""
        fed = {t.op.name for t in feeds}
        kept: dict[Any, Any] = {}
        seen: set[Any] = set()
        waiting = list(fetches)
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in seen or tensor.op.name in fed | self._forward_ops:
                continue
            seen.add(tensor.ref())
            again = not self._passes(tensor) or _of_sizes(tensor, fed | self._forward_ops)
            if tensor.op.name in made and not again:
                kept[tensor.ref()] = tensor
            else:
                waiting.extend(tensor.op.inputs)
        return list(kept.values())

    def backward_input(
        self, params: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any], *where: Any
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the inputs (None where there is none), and what the second half gets."""
        given = [cotangents[i] for i in self._cotangents]
        flat = list(self._call_input(*where, *params, *saved, *given))
        inward = unflatten(self._kinds[self._sizes[0] :], flat[: self._inward])
        return inward, flat[self._inward :]

    def backward_weight(
        self,
        params: Sequence[Any],
        saved: Sequence[Any],
        cotangents: Sequence[Any],
        kept: Sequence[Any],
        *where: Any,
    ) -> list[Any]:
        """Gradients of the parameters; None where there is none."""
        kinds = self._kinds[: self._sizes[0]]
        if all(kind is None for kind in kinds):
            return list(kinds)
        given = [cotangents[i] for i in self._cotangents]
        flat = self._call_weight(*where, *params, *saved, *given, *kept[: self._kept])
        return unflatten(kinds, flat)


@dataclasses.dataclass(frozen=True)
class DevicePeak:
    """Tells the bytes of activations that are there at once on the device of a stage.

    Attributes:
        chunks: The virtual stages of the stage.
        schedule: The schedule.
        stage: The stage.
        known: By chunk, what of it runs again and what lies elsewhere, what it has there.
    """

    chunks: Sequence[StageVjp]
    schedule: Schedule
    stage: int
    known: dict[Any, StageMemory] = dataclasses.field(default_factory=dict)

    def __call__(self, again: Sequence[Collection[str]]) -> int:
        """The bytes, on whichever device of a slice has the most.

        Args:
            again: Per chunk, the forward operations that run again.
        """
        elsewhere = [one.elsewhere() for one in self.chunks]
        devices = {
            tuple(one[k % len(one)] for one in elsewhere) for k in range(max(map(len, elsewhere)))
        }
        return max(self._on(again, one) for one in devices)

    def _on(self, again: Sequence[Collection[str]], elsewhere: Sequence[frozenset[int]]) -> int:
        held = []
        for chunk, (names, sums) in enumerate(zip(again, elsewhere, strict=True)):
            key = chunk, frozenset(names), sums
            if key not in self.known:
                self.known[key] = self.chunks[chunk].held(names, sums)
            held.append(self.known[key])
        return most_held(held, self.schedule, self.stage)


def _of_sizes(tensor: Any, known: set[str]) -> bool:
    """Whether integers follow from constants and sizes of what is known alone.

    DTensor has to see that: to sum along dims that it is handed, it takes whole operands.

    Args:
        tensor: The tensor.
        known: Names of operations that the second half is fed, or runs again.
    """
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        sized = operation.type in _SIZES and all(t.op.name in known for t in operation.inputs)
        if sized:
            continue
        integers = all(t.dtype.is_integer for t in operation.outputs)
        if operation.type == "Placeholder" or operation.op_def.is_stateful or not integers:
            return False
        waiting.extend(t.op for t in operation.inputs)
    return True


def _backward_operations(
    fetches: Sequence[Any], feeds: Sequence[Any], forward: set[str]
) -> set[str]:
    """Operations behind `fetches` that are neither fed nor part of the forward pass."""
    fed = {t.op.name for t in feeds}
    found: set[str] = set()
    waiting = [t.op for t in fetches]
    while waiting:
        operation = waiting.pop()
        if operation.name in found | fed | forward:
            continue
        found.add(operation.name)
        waiting.extend(t.op for t in operation.inputs)
    return found

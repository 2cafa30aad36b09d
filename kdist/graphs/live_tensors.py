"""How much memory an executed graph may need at once, whatever the order in which it runs.

A tensor lives from the start of the operation that makes it to the end of the last one that reads
it. Two tensors can never be alive together if the edges of the graph (data, control, transfers)
make the last reader of one finish before the other is made. So what can be alive together is an
*antichain* of that order, and the heaviest one bounds the peak of every schedule that TensorFlow
may choose. A gate that is missing shows, even if this run was lucky. Pure: no device is touched.

The model:

- Operations that pass on the buffer that they were given (`VIEWS`) own no memory; reading a
  variable owns none either, it is counted with the variables.
- Calls of functions take time: what they read and what they return is there together. Other
  operations take none: their results take the place of what they read.
- What happens inside a call is not looked at; its results are its own.
- A tensor sent to another device is a copy there, unless the devices share memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from kdist.graphs.antichain import heaviest_antichain

import numpy as np

Kind = Literal["gradient", "gathered", "activation", "other"]
KINDS: tuple[Kind, ...] = ("gradient", "gathered", "activation", "other")

VIEWS = frozenset(
    {"Identity", "Reshape", "Squeeze", "ExpandDims", "Bitcast", "StopGradient", "PreventGradient"}
    | {"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", "EnsureShape", "Snapshot"}
)
"""Operations whose first output is (a view of) their first input."""
EACH = "IdentityN"
"""The operation of which each output is the input of the same number."""
STORED = frozenset({"ReadVariableOp", "VarHandleOp", "_Arg", "Const", "Placeholder"})
"""Operations whose outputs belong to variables, to the caller or to the graph."""
RECEIVES = frozenset({"_Recv", "_HostRecv"})
MOVES = VIEWS | frozenset(
    {"ConcatV2", "Pack", "Unpack", "Split", "SplitV", "StridedSlice", "Slice", "Transpose", "Cast"}
)
"""Operations that only move or convert values."""
SUMS = frozenset({"AddN", "UnsortedSegmentSum"})
ADDS = frozenset({"Add", "AddV2"})
"""What adds a micro-batch's gradients to those so far, outside the model's programs."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One executed operation.

    Attributes:
        name: Its name.
        kind: Its type, such as "MatMul".
        device: TensorFlow device string.
        inputs: What it reads: (name of an operation, number of its output).
        waits: Names of operations that must be done before it.
        nbytes: Bytes of each output.
        call: Whether it runs a function.
    """

    name: str
    kind: str
    device: str
    inputs: tuple[tuple[str, int], ...] = ()
    waits: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    call: bool = False


Output = tuple[str, int]
"""Name of an operation, and number of its output."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A buffer that an operation makes.

    Attributes:
        output: The output that it is.
        kind: What it is for.
        nbytes: Its bytes.
        device: Where it is.
        readers: Names of the operations that read it, or a view of it.
    """

    output: Output
    kind: Kind
    nbytes: int
    device: str
    readers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most that may be alive at once on a device.

    Attributes:
        nbytes: Their bytes.
        tensors: They, heaviest first.
    """

    nbytes: int
    tensors: tuple[Tensor, ...]


class LiveTensors:
    """Which buffers of a graph may be alive at once.

    Args:
        ops: The operations of all devices, receiving ones with what is sent as their input.
        gradients: Outputs that are gradients of parameters.
        parameters: Names of the operations that read a parameter's variable.
        writes: Names of the operations that assign one.
        shared_memory: Whether a transfer passes a reference, as between CPU devices of a process.
        programs: Names of calls of the model's programs. What their operations make, gradients and
            gathered parameters apart, are activations.
        closed: Names of calls of which it is not known what happens inside.

    Attributes:
        opened: Gives the same step with what happens inside calls, where that is known.
    """

    def __init__(
        self,
        ops: Iterable[Op],
        gradients: Iterable[Output],
        parameters: Iterable[str],
        *,
        writes: Iterable[str] = (),
        shared_memory: bool = False,
        programs: Collection[str] = (),
        closed: Collection[str] = (),
    ) -> None:
        self.closed = closed
        self.ops = _in_order({op.name: op for op in ops})
        self.parameters, self.writes = tuple(parameters), tuple(writes)
        self.opened: Callable[[], LiveTensors] = lambda: self
        self._views = VIEWS | RECEIVES if shared_memory else VIEWS
        gradients = list(gradients)
        self._kinds = kinds(self.ops.values(), gradients, self.parameters, self.writes)
        self._note_activations(set(programs), gradients)
        self.tensors = self._tensors()
        self._orders: dict[str, tuple[list[Tensor], np.ndarray]] = {}

    @property
    def devices(self) -> list[str]:
        """The devices that hold buffers."""
        return sorted({t.device for t in self.tensors})

    def peak(self, device: str, of: Iterable[Kind] = KINDS) -> Peak:
        """The most that may be alive at once on a device.

        Args:
            device: TensorFlow device string.
            of: The kinds to count.
        """
        mine, after = self._order(device)
        wanted = set(of)
        weights = [t.nbytes if t.kind in wanted else 0 for t in mine]
        alive = [mine[i] for i in heaviest_antichain(weights, after)]
        alive.sort(key=lambda t: (-t.nbytes, t.output))
        return Peak(sum(t.nbytes for t in alive), tuple(alive))

    def _note_activations(self, programs: set[str], gradients: list[Output]) -> None:
        """Calls what programs make activations, but for gradients, also those of micro-batches."""
        within = {n for n in self.ops if any(outer in programs for outer in _scopes(n))}
        sums = {n for n, op in self.ops.items() if op.kind in ADDS and n not in within}
        known = dict(self._kinds)
        if within and sums:
            known |= kinds(self.ops.values(), gradients, self.parameters, self.writes, sums)
        for name in within:
            outputs = ((name, k) for k in range(len(self.ops[name].nbytes)))
            self._kinds.update((o, "activation") for o in outputs if o not in known)

    def _tensors(self) -> list[Tensor]:
        owner: dict[Output, Output | None] = {}
        readers: dict[Output, dict[str, None]] = {}
        for op in self.ops.values():
            found = [owner.get(i) for i in op.inputs]
            for buffer in found:
                if buffer is not None:
                    readers[buffer][op.name] = None
            for k in range(len(op.nbytes)):
                if op.kind == EACH:
                    owner[op.name, k] = found[k]
                elif op.kind in self._views:
                    owner[op.name, k] = found[0] if found else None
                elif op.kind in STORED:
                    owner[op.name, k] = None
                else:
                    owner[op.name, k] = (op.name, k)
                    readers[op.name, k] = {}
        return [
            Tensor(o, self._kinds.get(o, "other"), nbytes, self.ops[o[0]].device, tuple(names))
            for o, names in readers.items()
            if (nbytes := self.ops[o[0]].nbytes[o[1]])
        ]

    def _order(self, device: str) -> tuple[list[Tensor], np.ndarray]:
        """A device's tensors, and in row i, column j whether the j-th is made after i has gone."""
        if device not in self._orders:
            self._orders[device] = self._ordered(device)
        return self._orders[device]

    def _ordered(self, device: str) -> tuple[list[Tensor], np.ndarray]:
        mine = [t for t in self.tensors if t.device == device]
        makers = {name: n for n, name in enumerate(dict.fromkeys(t.output[0] for t in mine))}
        ends = [t.readers or (t.output[0],) for t in mine]
        events = {name: n for n, name in enumerate(dict.fromkeys(itertools.chain(*ends)))}
        bit = {name: 1 << n for name, n in events.items()}
        done = self._done_before(bit)
        before = [done[name] | (0 if self.ops[name].call else bit.get(name, 0)) for name in makers]
        made_after = _matrix(before, len(events)).T
        of = np.array([makers[t.output[0]] for t in mine], int)
        after = np.empty((len(mine), len(makers)), bool)
        for i, names in enumerate(ends):
            np.logical_and.reduce(made_after[[events[n] for n in names]], out=after[i])
            after[i, of[i]] = False
        return mine, after[:, of]

    def _done_before(self, bit: Mapping[str, int]) -> dict[str, int]:
        """Per operation, which events must be over before it starts."""
        done: dict[str, int] = {}
        for op in self.ops.values():
            before = [
                done[n] | bit.get(n, 0)
                for n in dict.fromkeys(name for name, _ in op.inputs)
                if n in done
            ]
            if op.kind == "Merge" and before:
                # It takes whichever input comes.
                before = [functools.reduce(int.__and__, before)]
            before += [done[n] | bit.get(n, 0) for n in op.waits if n in done]
            done[op.name] = functools.reduce(int.__or__, before, 0)
        return done


def _scopes(name: str) -> Iterator[str]:
    """What a name begins with, up to a slash, and the name."""
    parts = name.split("/")
    return ("/".join(parts[: n + 1]) for n in range(len(parts)))


def _matrix(rows: Sequence[int], count: int) -> np.ndarray:
    """Bits of integers as rows of bools."""
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(rows), width), axis=1, bitorder="little")
    return unpacked[:, :count].astype(bool)


def _in_order(ops: Mapping[str, Op]) -> dict[str, Op]:
    """Operations, each after those that it reads and waits for; loops are cut where they begin."""
    found: dict[str, Op] = {}
    entered: set[str] = set()
    for start in ops:
        stack = [start]
        while stack:
            name = stack[-1]
            op = ops[name]
            if name in found:
                stack.pop()
            elif name in entered:
                found[name] = ops[stack.pop()]
            else:
                entered.add(name)
                needs = [n for n, _ in op.inputs] + list(op.waits)
                stack += [n for n in needs if n in ops and n not in entered]
    return found


def kinds(
    ops: Iterable[Op],
    gradients: Iterable[Output],
    parameters: Iterable[str],
    writes: Iterable[str] = (),
    sums: Collection[str] = (),
) -> dict[Output, Kind]:
    """What outputs are for.

    Gradients are the given ones, what they are summed and put together from, and what is made of
    them by moving and adding. Gathered parameters are what is made of parameters, or of their new
    values, by moving alone, with a part from another device.

    Args:
        ops: In order.
        gradients: See `LiveTensors`.
        parameters: See `LiveTensors`.
        writes: See `LiveTensors`.
        sums: Names of operations that add gradients, beside those of `SUMS`.

    Returns:
        The kinds of those that are not "other".
    """
    ops = list(ops)
    found: dict[Output, Kind] = dict.fromkeys(gradients, "gradient")
    constant = {op.name for op in ops if op.kind == "Const"}
    through = MOVES | SUMS | RECEIVES
    for op in reversed(ops):
        if op.kind == EACH:
            count = range(len(op.nbytes))
            found.update((op.inputs[k], "gradient") for k in count if (op.name, k) in found)
        adds = op.kind in SUMS or op.name in sums
        if (op.kind in through or adds) and any(
            (op.name, k) in found for k in range(len(op.nbytes))
        ):
            found.update((i, "gradient") for i in op.inputs[:1] if op.kind in VIEWS)
            if adds or op.kind in {"ConcatV2", "Pack"}:
                found.update((i, "gradient") for i in op.inputs if i[0] not in constant)
    local: set[Output] = {(name, 0) for name in parameters}
    local |= _new_values(ops, writes, constant)
    for op in ops:
        given = [i for i in op.inputs if i[0] not in constant]
        outputs = [(op.name, k) for k in range(len(op.nbytes))]
        if op.kind == EACH:
            local.update(o for o, i in zip(outputs, op.inputs) if i in local)
            found.update((o, found[i]) for o, i in zip(outputs, op.inputs) if i in found)
        elif op.kind in through and any(found.get(i) == "gradient" for i in given):
            found.update(dict.fromkeys(outputs, "gradient"))
        elif op.kind in MOVES | RECEIVES and given:
            first = _moved(op, given)
            if not all(i in local or found.get(i) == "gathered" for i in first):
                continue
            if op.kind in RECEIVES or any(found.get(i) == "gathered" for i in first):
                found.update(dict.fromkeys(outputs, "gathered"))
            else:
                local.update(outputs)
    return found


def _new_values(ops: list[Op], writes: Iterable[str], constant: set[str]) -> set[Output]:
    """What is computed, and then moved alone, until it is assigned to parameters."""
    by_name = {op.name: op for op in ops}
    found: set[Output] = set()
    # Of an assignment the first input is the variable.
    stack = [by_name[name].inputs[1] for name in writes if name in by_name]
    seen = set(stack)
    while stack:
        output = stack.pop()
        op = by_name.get(output[0])
        if op is None or op.kind not in MOVES | RECEIVES:
            found.add(output)
            continue
        parts = _moved(op, [i for i in op.inputs if i[0] not in constant])
        stack += [i for i in parts if i not in seen]
        seen.update(parts)
    return found


def _moved(op: Op, given: list[Output]) -> list[Output]:
    """What an operation of `MOVES` moves: not the sizes and places that it is told."""
    return given if op.kind in ("ConcatV2", "Pack") else given[:1]

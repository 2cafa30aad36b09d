"""Lowering a traced function whatever is in it: what DTensor cannot expand becomes an island."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.dtensor import limits
from kdist.dtensor.body import TAG, Body, data_inputs, topological
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.crossed_sums import uncross
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.islands import CannotCut, WithoutIslands, with_neighbours
from kdist.dtensor.kept_layouts import keep_layouts
from kdist.dtensor.lowered_program import Function, LoweredProgram
from kdist.dtensor.lowering import LAID_OUT, lower
from kdist.dtensor.rewrites import rewrite
from kdist.dtensor.sliced_sequences import gather_for_slices
from kdist.dtensor.unmerged_products import unmerge_products
from kdist.dtensor.window_parts import of_parts
from kdist.dtensor.windows import StandIns

import tensorflow as tf
from tensorflow.experimental import dtensor

MOST_ATTEMPTS = 12
"""Times that a function is lowered, one island more each time, before it is given up."""
ADDED = "/DTensor"
"""Comes after the name of an operation in those of the collectives that DTensor adds for it."""
MOST_DIMS = 8
"""Of a tensor that TensorFlow can slice."""
LOOPED = "collectives in the body of a loop or branch"


def expand(
    concrete: Any,
    mesh: dtensor.Mesh,
    layouts: Sequence[dtensor.Layout],
    layers: Sequence[str] = (),
    alltoall: bool = True,
    along_sequence: bool = False,
    channels: bool = False,
) -> LoweredProgram:
    """Lowers a concrete function; see `lower`.

    Operations that are known not to expand are rewritten, or become islands, before; those that
    DTensor names when it fails become islands then.

    Args:
        concrete: The concrete function.
        mesh: See `lower`.
        layouts: Of each flat input, and of each capture.
        layers: Paths of the model's layers, to say which causes what.
        alltoall: Whether all-to-alls may stay; else what causes one becomes an island too.
        along_sequence: Whether tensors are cut along the sequence by themselves.
        channels: Whether channels of convolutions may be cut.

    Raises:
        CannotCut: An operation can be no island, or a convolution is none after `MOST_ATTEMPTS`.
        tf.errors.OpError, ValueError: DTensor still fails after `MOST_ATTEMPTS`.
    """
    work = _Expansion(concrete, mesh, layouts, along_sequence, channels)
    for attempt in range(MOST_ATTEMPTS):
        last = attempt == MOST_ATTEMPTS - 1
        inside = with_neighbours(work.body, work.islands)
        cut = work.without(inside)
        function = Function.of(concrete) if cut is None else cut.function
        given = [*layouts] if cut is None else cut.layouts(layouts)
        try:
            program = lower(function, mesh, given, layers)
        except (UnicodeDecodeError, tf.errors.OpError, ValueError) as error:
            if last or not limits.is_about_lowering(error) or not work.learns(error, inside, given):
                raise
            continue
        if work.uncrosses(program):
            if last:  # it would be too large
                raise CannotCut("an einsum has operands that are cut crosswise")
            continue
        failed = work.put_back(program)
        if failed and last:
            raise CannotCut("; ".join(f"{name}: {why}" for name, why in failed.items()))
        if failed:
            continue
        if cut is not None:
            program = cut.joined(program, layers)
        found = dict(_with_collectives(work.body, program))
        found |= _of_many_dims(work.body, program, inside)
        if not alltoall:
            names = work.body.inputs if cut is None else [*cut.taken, *cut.made]
            found |= _moving(work.body, program, inside, names)
        if not found:
            return program
        work.islands |= work.stand_ins.left(found, work.islands)
    return program


class _Expansion:
    """A traced function, and what attempts to lower it have shown.

    Args:
        concrete: The function.
        mesh: See `lower`.
        layouts: Of each flat input, and of each capture.
        along_sequence: See `expand`.
        channels: See `expand`.

    Attributes:
        body: The function, rewritten.
        islands: Operations that become islands, with reasons.
        stand_ins: What stands for operations that look at windows.
    """

    def __init__(
        self,
        concrete: Any,
        mesh: dtensor.Mesh,
        layouts: Sequence[dtensor.Layout],
        along_sequence: bool,
        channels: bool,
    ) -> None:
        self.body = body = Body(concrete)
        self._mesh, self._layouts = mesh, layouts
        rewritten = rewrite(body) + unmerge_products(body, layouts)
        rewritten += gather_for_slices(body, mesh) if along_sequence else 0
        self.islands = limits.unsupported(body)
        self.stand_ins = StandIns(body)
        if channels:
            self.stand_ins.stand(self.islands)
        self._changed = bool(rewritten or body.said or body.handles)

    def without(self, inside: dict[str, str]) -> WithoutIslands | None:
        """The function without what is in islands; None: it is as it was traced."""
        if inside or self._changed or self.stand_ins.kinds:
            return WithoutIslands(self.body, inside, self._mesh)
        return None

    def learns(self, error: Exception, inside: dict[str, str], given: Any) -> bool:
        """Whether an error of DTensor says what is to be done otherwise.

        Args:
            error: What ended the attempt.
            inside: What was in islands.
            given: Layouts of what was lowered.
        """
        body, mesh = self.body, self._mesh
        found = _named(body, inside, error, mesh, given) or _searched(
            body, inside, error, mesh, self._layouts
        )
        if found and not self.stand_ins.stand_for(found, self.islands):
            left = self.stand_ins.left(found, self.islands)
            kept = keep_layouts(body, mesh, left, error)
            self._changed |= bool(kept)
            self.islands.update({name: why for name, why in left.items() if name not in kept})
        return bool(found)

    def uncrosses(self, program: LoweredProgram) -> bool:
        """Whether einsums would be too large, and are not once it is lowered again."""
        found = uncross(self.body, program.definition, self._mesh)
        self._changed |= found
        return found

    def put_back(self, program: LoweredProgram) -> dict[str, str]:
        """Puts operations on windows back into a program; those that cannot be, with reasons."""
        failed = of_parts(self.body, program) | self.stand_ins.put_back(program.definition)
        if failed and not self.stand_ins.stand_for(failed, self.islands):
            self.islands |= self.stand_ins.left(failed, self.islands)
        return failed


def _with_collectives(body: Body, program: LoweredProgram) -> Iterator[tuple[str, str]]:
    """The loops and branches that devices would have to run in step."""
    for node in program.definition.node_def:
        names = {f.name for value in node.attr.values() for f in (value.func, *value.list.func)}
        if node.name in body.nodes and _reaches_collectives(program, names):
            yield node.name, LOOPED


def _of_many_dims(body: Body, program: LoweredProgram, inside: dict[str, str]) -> dict[str, str]:
    """The operations whose tensors DTensor cuts, and have more dims than TensorFlow slices."""
    nodes = [node for node in program.definition.node_def if node.op == "Slice"]
    shapes = [(node.name, node.attr[SHAPES].list.shape) for node in nodes if SHAPES in node.attr]
    deep = [name.partition(ADDED)[0] for name, (shape, *_) in shapes if len(shape.dim) > MOST_DIMS]
    # Reshapes that follow each other are one, of both names.
    names = [one for name in deep for one in re.split("[.;]", name)]
    known = [name for name in names if name in body.nodes and name not in inside]
    return dict.fromkeys(known, f"a tensor of more than {MOST_DIMS} dims, which cannot be sliced")


def _moving(
    body: Body, program: LoweredProgram, inside: dict[str, str], given: Sequence[str]
) -> dict[str, str]:
    """The operations whose operands, or results, an all-to-all moves.

    Args:
        body: The traced function.
        program: What DTensor made of it.
        inside: What is in islands.
        given: References of what was lowered took as inputs.
    """
    readers = body.readers()
    found: list[str] = []
    for one in program.collectives:
        name = one.node.partition(ADDED)[0]
        number = name.removeprefix(LAID_OUT)
        if one.kind == "all-to-all":
            found += [name] if number == name else _users(body, readers, given[int(number)])
    known = [n for n in found if n in body.nodes and n not in inside and _may_fail(body.nodes[n])]
    return dict.fromkeys(known, limits.RULED_OUT)


def _users(body: Body, readers: Mapping[str, Sequence[str]], reference: str) -> list[str]:
    """The operations that take a tensor, or copies of it."""
    found: list[str] = []
    waiting = [reference]
    while waiting:
        for name in readers.get(waiting.pop(), ()):
            copies = body.nodes[name].op == "Identity"
            (waiting if copies else found).append(f"{name}:output:0" if copies else name)
    return found


def _reaches_collectives(program: LoweredProgram, names: set[str]) -> bool:
    """Whether functions have collectives, or call others that have."""
    seen: set[str] = set()
    waiting = [name for name in names if name]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in program.bodies:
            continue
        seen.add(name)
        for node in program.bodies[name].node_def:
            if node.op in COLLECTIVES:
                return True
            for value in node.attr.values():
                waiting += [f.name for f in (value.func, *value.list.func) if f.name]
    return False


def _named(
    body: Body, inside: dict[str, str], error: Exception, mesh: dtensor.Mesh, layouts: Any
) -> dict[str, str]:
    """The operations that an error of DTensor is about, and those that are like it."""
    failed = limits.failed_operation(error)
    if failed is None:
        return {}
    kind, reason = failed
    kinds = {kind, f"Stateless{kind}"}
    outside = {n: node for n, node in body.nodes.items() if n not in inside and _may_fail(node)}
    found = [name for name, node in outside.items() if node.op in kinds]
    if not found:  # in the body of a loop, or of a branch
        found = [
            name
            for name, node in outside.items()
            if any(one.op in kinds for f in body.called(node) for one in f.node_def)
        ]
        return dict.fromkeys(found, f"{kind}: {reason}")
    if limits.UNKNOWN in reason:  # of whatever shape
        return dict.fromkeys(found, f"{kind}: {reason}")
    alike: dict[Any, list[str]] = {}
    for name in found:
        alike.setdefault(_likeness(body, name), []).append(name)
    if len(alike) > 1:
        number = _number_of_failed(body, inside, {n: i for i, n in enumerate(found)}, mesh, layouts)
        if number is not None:
            found = alike[_likeness(body, found[number])]
    return dict.fromkeys(found, f"{kind}: {reason}")


def _searched(
    body: Body, inside: dict[str, str], error: Exception, mesh: dtensor.Mesh, layouts: Any
) -> dict[str, str]:
    """The operation after which lowering fails, where the error names none, and its likes.

    It is found by halving. Equal layers have one each: all those that compute the same of what
    comes from the same are taken at once, so that the search does not grow with the layers.
    """
    order = [name for name in topological(body.nodes) if name not in inside]
    works, fails = 0, len(order)
    while fails - works > 1:
        middle = (works + fails) // 2
        rest = with_neighbours(body, {**inside, **dict.fromkeys(order[middle:], "")})
        cut = WithoutIslands(body, rest, mesh)
        try:
            lower(cut.function, mesh, cut.layouts(layouts))
            works = middle
        except (UnicodeDecodeError, tf.errors.OpError, ValueError):
            fails = middle
    if not _may_fail(body.nodes[order[works]]):
        return {}
    wanted = _in_place(body, order[works])
    alike = [name for name in order if _in_place(body, name) == wanted]
    return dict.fromkeys(alike, limits.explain(error) or "an operation (its error cannot be read)")


def _may_fail(node: Any) -> bool:
    """Whether an operation computes something; what does not is blamed for others."""
    return node.op not in ("Identity", "NoOp", "Const", *limits.LAYOUTS)


def _likeness(body: Body, name: str) -> Any:
    """What operations have in common that fail for one reason: type, attributes, shapes."""
    node = body.nodes[name]
    attributes = sorted(
        (key, value.SerializeToString(deterministic=True))
        for key, value in node.attr.items()
        if not key.startswith("_")
    )
    specs = [body.specs[one] for one in data_inputs(node)]
    return node.op, tuple(attributes), tuple((str(s.shape), s.dtype) for s in specs)


def _in_place(body: Body, name: str) -> Any:
    """The same of an operation and of those whose results it takes."""
    taken = [one.partition(":")[0] for one in data_inputs(body.nodes[name])]
    return [_likeness(body, one) for one in [name, *taken] if one in body.nodes]


def _number_of_failed(
    body: Body, inside: dict[str, str], numbers: dict[str, int], mesh: dtensor.Mesh, layouts: Any
) -> int | None:
    """Lowers once more, with numbers on the operations in question, to see at which it fails."""
    try:
        lower(WithoutIslands(body, inside, mesh, numbers).function, mesh, layouts)
    except (UnicodeDecodeError, tf.errors.OpError, ValueError) as error:
        return limits.failed_number(error, TAG)
    return None

"""Results of reductions that keep the layout of what they are computed from.

DTensor lays a result out as its readers like it best. A reduction cannot give one that is whole of
an operand that is cut: DTensor asks for a scatter of what is cut already, and fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kdist.dtensor.body import Body

from tensorflow.core.framework import node_def_pb2
from tensorflow.experimental import dtensor

REDUCTIONS = ("Max", "Mean", "Min", "Prod", "Sum")
_HAS = re.compile(r"not more sharded than the original_layout sharding_specs:([^: ]*), mesh:")


def keep_layouts(
    body: Body, mesh: dtensor.Mesh, failed: Iterable[str], error: Exception
) -> set[str]:
    """Lays out what reductions give as it is, whatever its readers like best.

    Args:
        body: A traced function; changed.
        mesh: The mesh of a slice.
        failed: Names of operations that DTensor could not expand.
        error: Its error, which says how results are laid out.

    Returns:
        Those that were laid out so, now and not before: they may be tried again.
    """
    found = _HAS.search(str(error))
    if found is None:
        return set()
    layout = dtensor.Layout(found[1].split(","), mesh)
    readers = list(body.nodes)
    names = [name for name in failed if _may_keep(body, name, layout)]
    body.redirect({_result(name): _kept(body, name, layout) for name in names}, readers)
    return set(names)


def _may_keep(body: Body, operation: str, layout: dtensor.Layout) -> bool:
    if body.nodes[operation].op not in REDUCTIONS or _name(operation) in body.nodes:
        return False
    return body.specs[_result(operation)].shape.rank == layout.rank


def _result(operation: str) -> str:
    return f"{operation}:output:0"


def _name(operation: str) -> str:
    return f"{operation}/kept"


def _kept(body: Body, operation: str, layout: dtensor.Layout) -> str:
    """Adds a re-layout that changes nothing; returns its result."""
    given, name = _result(operation), _name(operation)
    spec = body.specs[given]
    node = node_def_pb2.NodeDef(name=name, op="Relayout", input=[given])
    node.attr["T"].type = spec.dtype.as_datatype_enum
    node.attr["layout"].s = layout.to_string().encode()
    body.nodes[name] = node
    body.note(_result(name), spec.shape, spec.dtype)
    return _result(name)

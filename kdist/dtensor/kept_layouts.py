"""Results of operations that keep the layout of what they are computed from.

DTensor lays a result out as its readers like it best. A reduction cannot give one that is whole of
an operand that is cut: DTensor asks for a scatter of what is cut already, and fails. A
transposition cannot give another cut than its operand's, moved with the dims.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kdist.dtensor.body import Body, data_inputs

from tensorflow.experimental import dtensor

REDUCTIONS = ("Max", "Mean", "Min", "Prod", "Sum")
_HAS = re.compile(r"not more sharded than the original_layout sharding_specs:([^: ]*), mesh:")
_TAKES = re.compile(r"TransposeOp.*\s+operand layout: sharding_specs:([^: ]*), mesh:")


def keep_layouts(
    body: Body, mesh: dtensor.Mesh, failed: Iterable[str], error: Exception
) -> set[str]:
    """Lays out what operations give as what they take is, whatever its readers like best.

    Args:
        body: A traced function; changed.
        mesh: The mesh of a slice.
        failed: Names of operations that DTensor could not expand.
        error: Its error, which says how results or operands are laid out.

    Returns:
        Those that were laid out so, now and not before: they may be tried again.
    """
    found = _HAS.search(str(error)) or _TAKES.search(str(error))
    if found is None:
        return set()
    readers = list(body.nodes)
    laid_out = {name: _layout(body, name, found[1].split(",")) for name in failed}
    layouts = {name: dtensor.Layout(dims, mesh) for name, dims in laid_out.items() if dims}
    kept = {
        _result(body, name): body.lay_out(_result(body, name), of, _name(name))
        for name, of in layouts.items()
    }
    body.redirect(kept, readers)
    return set(layouts)


def _layout(body: Body, operation: str, said: list[str]) -> list[str] | None:
    """How the result of an operation is laid out of itself; None where it was laid out before.

    Args:
        body: The traced function.
        operation: Name of a reduction or transposition.
        said: What an error says of it: a reduction's result, or a transposition's operand.
    """
    node = body.nodes[operation]
    if node.op not in (*REDUCTIONS, "Transpose") or _name(operation) in body.nodes:
        return None
    if body.specs[_result(body, operation)].shape.rank != len(said):
        return None
    if node.op in REDUCTIONS:
        return said
    order = body.constant(data_inputs(node)[1])
    return None if order is None else [said[dim] for dim in order]


def _result(body: Body, operation: str) -> str:
    return f"{operation}:{'y' if body.nodes[operation].op == 'Transpose' else 'output'}:0"


def _name(operation: str) -> str:
    return f"{operation}/kept"

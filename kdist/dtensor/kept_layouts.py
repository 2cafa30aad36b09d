"""Results of reductions that keep the layout of what they are computed from.

DTensor lays a result out as its readers like it best. A reduction cannot give one that is whole of
an operand that is cut: DTensor asks for a scatter of what is cut already, and fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kdist.dtensor.body import Body

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
    kept = {_result(name): body.lay_out(_result(name), layout, _name(name)) for name in names}
    body.redirect(kept, readers)
    return set(names)


def _may_keep(body: Body, operation: str, layout: dtensor.Layout) -> bool:
    if body.nodes[operation].op not in REDUCTIONS or _name(operation) in body.nodes:
        return False
    return body.specs[_result(operation)].shape.rank == layout.rank


def _result(operation: str) -> str:
    return f"{operation}:output:0"


def _name(operation: str) -> str:
    return f"{operation}/kept"

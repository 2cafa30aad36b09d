"""Functions that a SavedModel calls and TensorFlow did not write.

kdist puts functions together node by node (`kdist.dtensor.stitching`); TensorFlow's context knows
them by name, and a graph that calls them has no Python object of them, which is what saving looks
at. Uses `Context.get_function_def`, by `dtensor_internals`, and
`fingerprinting_utils.write_fingerprint`; `tests/_compat/test_saved_functions.py` fails when one of
them moves, or when TensorFlow writes such functions itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdist._compat import dtensor_internals

from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model import fingerprinting_utils

FILE = "saved_model.pb"


def complete(folder: Path) -> int:
    """Adds, to a SavedModel, the definitions of functions that its functions call.

    Args:
        folder: Of the SavedModel, written by this process.

    Returns:
        How many.
    """
    saved = saved_model_pb2.SavedModel.FromString((folder / FILE).read_bytes())
    library = saved.meta_graphs[0].graph_def.library
    known = {one.signature.name for one in library.function}
    waiting = [name for one in library.function for name in called(one)]
    added = 0
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        definition = dtensor_internals.function_def(name)
        library.function.append(definition)
        waiting += called(definition)
        added += 1
    if added:
        (folder / FILE).write_bytes(saved.SerializeToString(deterministic=True))
        fingerprinting_utils.write_fingerprint(str(folder))
    return added


def called(definition: Any) -> Iterator[str]:
    """Names of the functions that a `FunctionDef` calls."""
    for node in definition.node_def:
        for value in node.attr.values():
            if value.HasField("func"):
                yield value.func.name
            yield from (one.name for one in value.list.func)

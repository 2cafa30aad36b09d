"""Every use of TensorFlow internals for reading the functions that a traced graph calls."""

from __future__ import annotations

from typing import Any


def function_graph(graph: Any, name: str) -> Any:
    """The traced graph of a function that operations of a graph call, with its static shapes.

    Args:
        graph: The graph that the calling operation is in.
        name: The function's name, as in the operation's attribute.

    Returns:
        A `FuncGraph` with `inputs` and `outputs`, or None if the function was not traced in this
        process (it comes from a file, for example).
    """
    while graph is not None:
        found = graph._functions.get(name)
        if found is not None:
            return getattr(found, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None

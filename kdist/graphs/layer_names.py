"""Which Keras layer a node of a graph serves, read from its name."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Sequence

ADDED = re.compile(r"/DTensor(\w+?)Op(?:_|/|$)")
"""What DTensor appends to the name of the node that it adds an operation for."""

BACKWARD = "gradient_tape/"
"""In the names of nodes that a gradient tape made."""

_SUFFIX = re.compile(r"_\d+$")


def layer_of(node: str, layers: Collection[str] = ()) -> str:
    """The Keras layer that a node of a traced or lowered program serves.

    Args:
        node: Node name.
        layers: Paths of the model's layers. TensorFlow numbers a scope that it has seen before
            (`dense_1` for `dense`); with the paths such a scope is recognised.

    Returns:
        The longest of the paths that the node lies under, or the one that ends most like the
        scopes around it; without paths, the node's scope; empty where there is none.
    """
    added = ADDED.search(node)
    operation = node[: added.start()] if added else node
    parts = operation.replace(BACKWARD, "").split("/")
    if not layers:
        return "/".join(parts[:-1])
    known = _by_last_name(tuple(layers))
    for end in range(len(parts), 0, -1):
        last = parts[end - 1]
        paths = known.get(last, []) + known.get(_SUFFIX.sub("", last), [])
        best = max(((_match(parts[:end], p.split("/")), p) for p in paths), default=((0, 0), ""))
        if best[0] > (0, 0):
            return best[1]
    return _by_last_names(parts[:-1], known)


def _by_last_names(scopes: Sequence[str], known: dict[str, list[str]]) -> str:
    """The layer whose path ends most like the innermost scopes that end like any; "" if several.

    Layers that something else than their model calls, such as a stage, lie not under its scope.
    """
    for end in range(len(scopes), 0, -1):
        paths = known.get(_SUFFIX.sub("", scopes[end - 1])) or known.get(scopes[end - 1], [])
        likeness = [_alike_ends(scopes[:end], path.split("/")) for path in paths]
        if paths:
            best = max(likeness)
            return paths[likeness.index(best)] if likeness.count(best) == 1 else ""
    return ""


def _alike_ends(scopes: Sequence[str], names: Sequence[str]) -> int:
    """With how many names of a path scopes end."""
    pairs = zip(reversed(scopes), reversed(names))
    same = (name in (scope, _SUFFIX.sub("", scope)) for scope, name in pairs)
    return sum(1 for _ in itertools.takewhile(bool, same))


def together(layers: Iterable[str]) -> str:
    """How several layers that are served by one node are told: `block/query+key+value`.

    Args:
        layers: Their paths; empty ones count for nothing.
    """
    paths = [path.split("/") for path in dict.fromkeys(layers) if path]
    if len(paths) < 2:
        return "".join(map("/".join, paths))
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    ends = "+".join("/".join(path[shared:]) for path in paths)
    return "/".join([*paths[0][:shared], ends])


@functools.lru_cache(maxsize=16)
def _by_last_name(layers: tuple[str, ...]) -> dict[str, list[str]]:
    """Paths of layers, by the layer's own name."""
    found: dict[str, list[str]] = {}
    for path in filter(None, layers):
        found.setdefault(path.rpartition("/")[2], []).append(path)
    return found


def _match(scopes: Sequence[str], names: Sequence[str]) -> tuple[int, int]:
    """How well scopes end in a path: its length and its numbered scopes; (0, 0) if they do not.

    Keras opens a layer's scope once before the layer runs, so TensorFlow numbers the scope of the
    operations: `dense_1` is the layer `dense`, and is `dense_1` only if there is no `dense`.
    """
    if len(scopes) < len(names):
        return (0, 0)
    numbered = 0
    for scope, name in zip(scopes[-len(names) :], names, strict=True):
        if _SUFFIX.sub("", scope) == name and scope != name:
            numbered += 1
        elif scope != name:
            return (0, 0)
    return (len(names), numbered)


def operation_of(node: str, traced: Collection[str]) -> str:
    """The traced operation that a node of a lowered program was made for.

    Args:
        node: Its name: that of the operation, or what DTensor made of that by numbers and scopes.
        traced: Names of operations.

    Returns:
        The operation; the node itself if it shows none.
    """
    name = node
    while name and name not in traced:
        shorter = _SUFFIX.sub("", name)
        name = name.rpartition("/")[0] if shorter == name else shorter
    return name or node

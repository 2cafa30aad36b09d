"""Layouts: which mesh axes cut which dims of a tensor, and who holds which part.

A layout has one entry a dim: None (not cut), the name of a mesh axis, or a tuple of names, the
first being the major one. It is a *declaration*; nothing here touches a device or a tensor.

```
layout (None, "model") of a (6, 8) kernel on model=2      layout ("model", None)

      dim 1 ->                                                  dim 1 ->
dim 0 +--------+--------+                                 dim 0 +-----------------+
  |   | model 0| model 1|                                   |   |     model 0     |
  v   |  6 x 4 |  6 x 4 |                                   v   +-----------------+
      +--------+--------+                                       |     model 1     |
                                                                +-----------------+
```
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist.display.warn import warn
from kdist.sharding.dims import (
    Dims,
    WeightFit,
    axes_of,
    check_dims,
    clean_dims,
    cut_of,
    inner_dims,
    named_dims,
)
from kdist.sharding.mesh import Topology
from kdist.sharding.strategy import parse_strategy

import keras

__all__ = [
    "WeightLayout",
    "closest_names",
    "is_activation_pattern",
    "match_pattern",
    "parse_strategy",
    "read_layout_map",
    "resolve_layouts",
]


@dataclass(frozen=True)
class WeightLayout:
    """How a weight is cut over a mesh.

    `("model",)` as an entry is the same as `"model"`, and `()` the same as None.

    Attributes:
        dims: One entry a dim: None, a mesh axis, or a tuple of mesh axes, major first.

    Raises:
        ValueError: For an entry of another form, or an axis that stands twice.

    Example:
    ```python
    layout = WeightLayout((None, "model"))
    layout.shard_shape((6, 8), topology)  # (6, 4) on model=2
    ```
    """

    dims: Dims

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", clean_dims(self.dims, "a weight layout"))

    @classmethod
    def replicated(cls, rank: int) -> "WeightLayout":
        """The layout of a weight of `rank` dims that every device holds whole."""
        return cls((None,) * rank)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that cuts the weight, dim by dim, major first."""
        return tuple(axis for dim in self.dims for axis in axes_of(dim))

    @property
    def is_replicated(self) -> bool:
        """Whether no axis is named: every device holds the whole."""
        return not self.axes

    def inner(self, topology: Topology) -> "WeightLayout":
        """The same layout without the data axis: the layout inside one slice."""
        return WeightLayout(inner_dims(self.dims, topology))

    def data_dim(self, topology: Topology) -> int | None:
        """The index of the dim that the data axis cuts, None where it cuts none."""
        for index, dim in enumerate(self.dims):
            if topology.data_axis in {topology.canonical(axis) for axis in axes_of(dim)}:
                return index
        return None

    def shard_shape(self, shape: Sequence[int], topology: Topology) -> tuple[int, ...]:
        """The shape of the part that one device holds.

        Args:
            shape: The whole weight's shape.
            topology: The mesh.

        Raises:
            ValueError: If the rank differs or a dim does not divide.
        """
        check_dims(self.dims, shape, topology, "a weight")
        cuts = (cut_of(dim, topology) for dim in self.dims)
        return tuple(size // cut for size, cut in zip(shape, cuts, strict=True))

    def slice_of(
        self, shape: Sequence[int], topology: Topology, coordinate: Mapping[str, int]
    ) -> tuple[slice, ...]:
        """Which part of the whole the device at a coordinate holds.

        Args:
            shape: The whole weight's shape.
            topology: The mesh.
            coordinate: Axis name to index, for at least the axes of this layout.

        Returns:
            One `slice(start, stop)` a dim. Where several axes cut one dim, the first is major.

        Raises:
            ValueError: For a missing or out-of-range index, or as `shard_shape`.

        Example:
        ```python
        WeightLayout((None, "model")).slice_of((6, 8), topology, {"model": 1})
        # (slice(0, 6), slice(4, 8)) on model=2
        ```
        """
        sizes = self.shard_shape(shape, topology)
        place = {topology.canonical(axis): index for axis, index in coordinate.items()}
        parts = []
        for dim, size in zip(self.dims, sizes, strict=True):
            position = 0
            for axis in map(topology.canonical, axes_of(dim)):
                if not 0 <= place.get(axis, -1) < topology.axis_size(axis):
                    raise ValueError(
                        f"A coordinate gives an index from 0 to {topology.axis_size(axis) - 1} for "
                        f"axis {axis!r}, which cuts this weight. Received: "
                        f"coordinate={dict(coordinate)}"
                    )
                position = position * topology.axis_size(axis) + place[axis]
            parts.append(slice(position * size, (position + 1) * size))
        return tuple(parts)


def is_activation_pattern(pattern: str) -> bool:
    """Whether a pattern is for a layer's output: Keras matches `<layer path>/output`."""
    return pattern.removesuffix("$").endswith("output")


def match_pattern(patterns: Iterable[str], path: str) -> str | None:
    """The pattern that a path takes its layout from, as `LayoutMap` chooses it.

    A pattern equal to the path wins; else the one pattern that `re.fullmatch`es it.

    Args:
        patterns: Regular expressions.
        path: A variable's path, or `<layer path>/output`.

    Raises:
        ValueError: If several match and none equals the path, or one is no regular expression.
    """
    patterns = list(patterns)
    if path in patterns:
        return path
    # The re module caches compiled patterns, so there is nothing to keep here.
    found = [pattern for pattern in patterns if _fullmatch(pattern, path)]
    if len(found) > 1:
        raise ValueError(
            f"Several patterns match {path!r}: {found}. Make each path match one pattern at most, "
            "or add the path itself as a key, which wins over patterns. "
            f"Received: patterns={patterns}"
        )
    return found[0] if found else None


def read_layout_map(layout_map: Any, topology: Topology) -> dict[str, Dims]:
    """Reads the patterns of a layout map, without any variable.

    Args:
        layout_map: None, a dict from regex to tuple or `keras.distribution.TensorLayout`, or a
            `keras.distribution.LayoutMap`.
        topology: The mesh.

    Returns:
        Pattern to layout, axes under the mesh's own names.

    Raises:
        ValueError: For another type, a pattern that is no regular expression, a layout of another
            form or made for another mesh, or an axis that the mesh lacks.
    """
    if layout_map is None:
        return {}
    if not isinstance(layout_map, Mapping):
        raise ValueError(
            "A layout map is a dict from regex to tuple, or a keras.distribution.LayoutMap. "
            f"Received: layout_map={layout_map!r}"
        )
    _check_meshes(layout_map, topology)
    result = {}
    for pattern in layout_map:
        if not isinstance(pattern, str):
            raise ValueError(
                f"The keys of a layout map are regular expressions. Received: key={pattern!r}"
            )
        _fullmatch(pattern, "")
        value = layout_map[pattern]
        what = f"layout_map[{pattern!r}]"
        if isinstance(value, keras.distribution.TensorLayout):
            value = value.axes
        result[pattern] = named_dims(value, topology, what)
    return result


def resolve_layouts(
    variables: Sequence[tuple[str, Sequence[int]]],
    layout_map: Any,
    topology: Topology,
    fit: WeightFit | None = None,
    again: bool = False,
) -> tuple[list[WeightLayout], dict[str, Dims]]:
    """Gives every variable its layout.

    Args:
        variables: (path, shape) of each. Two networks in one model may have weights of one path.
        layout_map: As `read_layout_map` takes it. A variable that nothing matches is replicated.
        topology: The mesh.
        fit: What becomes of a dim that does not divide; an error by default.
        again: The map has been resolved for this model before. A pattern that applies to nothing
            is no mistake of the map then: its layer was taken away.

    Returns:
        The layout of every variable, in their order; and pattern to layout for the patterns that
        end in `output`, which are for the outputs of layers (`<layer path>/output`), not for
        variables.

    Raises:
        ValueError: As `read_layout_map` and `match_pattern`; if a layout does not fit a variable;
            if a pattern of a dict applies to no variable. (For a `LayoutMap` that is a warning:
            KerasHub's maps carry patterns for several variants of a model.)

    Example:
    ```python
    layouts, outputs = resolve_layouts(
        [("up/kernel", (6, 8))], {".*up/kernel": (None, "model")}, topology
    )
    layouts[0].dims  # (None, "model")
    ```
    """
    patterns = read_layout_map(layout_map, topology)
    outputs = {p: dims for p, dims in patterns.items() if is_activation_pattern(p)}
    for_weights = {p: dims for p, dims in patterns.items() if p not in outputs}
    fit = fit or WeightFit(topology)
    layouts: list[WeightLayout] = []
    used = set()
    for path, shape in variables:
        pattern = match_pattern(for_weights, path)
        if pattern is None:
            layouts.append(WeightLayout.replicated(len(shape)))
            continue
        used.add(pattern)
        layouts.append(WeightLayout(fit(for_weights[pattern], shape, f"{path!r}")))
    unused = [] if again else [pattern for pattern in for_weights if pattern not in used]
    if unused and isinstance(layout_map, keras.distribution.LayoutMap):
        warn(f"These patterns of the LayoutMap apply to no variable of the model: {unused}")
    elif unused:
        closest = closest_names(unused[0], [path for path, _ in variables])
        raise ValueError(
            f"The pattern {unused[0]!r} applies to no variable. It must match a whole path "
            f"(re.fullmatch), such as one of the closest: {closest}. Correct or remove it. "
            f"Received: patterns without a variable={unused}"
        )
    return layouts, outputs


def closest_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three of `names` that look most like a pattern."""
    plain = re.sub(r"[.*+?^$\\()\[\]|]+", "", pattern)

    def likeness(name: str) -> float:
        # Most patterns are the end of a path: a long path must not lose for what stands before.
        tails = (name, name[-len(plain) :])
        return max(difflib.SequenceMatcher(None, plain, tail).ratio() for tail in tails)

    return sorted(dict.fromkeys(names), key=likeness, reverse=True)[:3]


def _check_meshes(layout_map: Mapping[str, Any], topology: Topology) -> None:
    """Checks that Keras layouts which carry a mesh carry the one that is trained on."""
    found = [getattr(layout_map, "device_mesh", None)]
    found += [getattr(layout, "device_mesh", None) for layout in layout_map.values()]
    for device_mesh in {id(found_mesh): found_mesh for found_mesh in found}.values():
        if device_mesh is None:
            continue
        try:
            other = Topology.from_mesh(device_mesh, available=topology.devices)
            # Which device is the host depends on what else there is beside a mesh.
            same = dataclasses.replace(other, host=topology.host) == topology
        except ValueError:
            same = False
        if not same:
            raise ValueError(
                "The layout map was made for another mesh than the one to train on, which has "
                f"{topology.describe_axes()}: make it with LayoutMap(mesh). "
                f"Received: device_mesh={device_mesh!r}"
            )


def _fullmatch(pattern: str, path: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error as error:
        raise ValueError(
            f"{pattern!r} is no regular expression ({error}); escape special characters with a "
            f"backslash. Received: pattern={pattern!r}"
        ) from error

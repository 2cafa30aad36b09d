"""What users say about where tables are: on the host (`kdist.place`), split by hand (`shard`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from kdist._compat import keras_models
from kdist.config.settings import Setting, check_not_placed
from kdist.sharding.axes import PIPE_NAME
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import TableSplit

import keras

Where = Literal["host", "device"]
WHERE = ("host", "device")
ON_HOST = "on the host"
BY_HAND = "split by hand"


@dataclasses.dataclass(frozen=True)
class TablePlace:
    """Where a table is; see `place`."""

    where: Where
    prefetch: bool = False


host_setting: Setting[TablePlace] = Setting("kdist.place")


def place(
    layer: keras.layers.Layer, where: Where = "host", *, prefetch: bool = False
) -> keras.layers.Layer:
    """Keeps the table of an embedding in host memory.

    The table, its look-ups, the update of it and the optimizer's state are on the host. Devices get
    the rows that their part of a batch looks up, each once, and send gradients of rows back; none
    ever holds the table. Numbers are those of Keras on one device. The host is a CPU outside the
    mesh; see `Plan.host_tables`. It takes effect in `kdist.parallelize`. The idea is that of
    MindSpore's `primitive_target="CPU"` for `EmbeddingLookup`.

    Which rows are looked up has to follow from the model's inputs, not from weights or random
    numbers: rows are fetched before the model's program runs.

    Args:
        layer: A `keras.layers.Embedding`, built or not. A subclass may have a `call` of its own,
            which looks rows up by `super().call(ids)`, as often as it likes; a
            `keras.layers.ReversibleEmbedding` has `tie_weights=False`.
        where: "host", or "device" to take that back.
        prefetch: Whether `fit` looks up the rows of the next batch, and sends them, while it
            computes this one; those that this step changes are sent again after its update, so
            numbers stay the same. It goes with `compile(steps_per_execution=...)` above 1: the
            steps of one execution know their next batch. And with an optimizer that changes in a
            step no other rows than its batch looked up: see `kdist.lazy`.

    Returns:
        The layer.

    Raises:
        ValueError: The layer has no table, or uses it for more than look-ups, or `where` is not
            listed. What else cannot be on the host is refused by `kdist.parallelize`, and what
            `prefetch` does not go with by `fit`.

    Example:
        >>> table = kdist.place(keras.layers.Embedding(100_000, 64), "host")
        >>> model = keras.Sequential([keras.Input((8,), dtype="int32"), table])
        >>> model = kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    """
    if where not in WHERE:
        raise ValueError(f"A table is on the 'host' or the 'device'. Received: where={where!r}")
    if not isinstance(prefetch, bool) or (prefetch and where != "host"):
        raise ValueError(
            "prefetch is True or False, of a table on the host. "
            f"Received: prefetch={prefetch!r}, where={where!r}"
        )
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(
            "kdist.place takes a keras layer with a table. "
            f"Received: {layer!r} of type {type(layer).__name__}"
        )
    check_not_placed(layer, "kdist.place")
    if where == "host":
        _check_layer(layer, ON_HOST)
    host_setting.set(layer, TablePlace(where, prefetch))
    return layer


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows, or columns, of a table on each device of an axis; see `kdist.shard`.

    Attributes:
        rows: Of each device; empty if columns are split.
        axis: As the user names it.
        local_columns: Whether column j of all ids is of part j.
        columns: Of each device; empty if rows are split.

    Raises:
        ValueError: Sizes that are no integers from 0 on, or an axis that is no name.
    """

    rows: tuple[int, ...]
    axis: str = "model"
    local_columns: bool = False
    columns: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each part."""
        return self.columns or self.rows

    @property
    def what(self) -> str:
        """What is split."""
        return "columns" if self.columns else "rows"

    def __post_init__(self) -> None:
        numbers = isinstance(self.sizes, list | tuple) and bool(self.sizes)
        if not numbers or not all(type(n) is int and n >= 0 for n in self.sizes):
            raise ValueError(
                f"A split has the {self.what} of each device, integers from 0 on such as "
                f"(10, 20, 30, 4). Received: {self.what}={self.sizes!r}"
            )
        if not isinstance(self.axis, str):
            raise ValueError(f"A split is over one axis of the mesh. Received: axis={self.axis!r}")
        if not isinstance(self.local_columns, bool):
            raise ValueError(
                f"local_columns is True or False. Received: local_columns={self.local_columns!r}"
            )
        object.__setattr__(self, self.what, tuple(self.sizes))
        if self.local_columns and (self.columns or 0 in self.rows):
            raise ValueError(
                "With local_columns each part has a column of ids, so each has rows. Leave "
                "local_columns out, or parts of columns or of 0 rows. "
                f"Received: {self.what}={self.sizes}"
            )

    def on(self, layer: keras.layers.Embedding, topology: Topology, alltoall: bool) -> TableSplit:
        """What it is on a mesh.

        Args:
            layer: Whose table it splits.
            topology: The mesh.
            alltoall: Whether devices may send each other blocks of unequal size.

        Raises:
            ValueError: The mesh has no such axis, it cuts the model into stages, or the numbers of
                rows or of devices do not fit.
        """
        axis, where = topology.canonical(self.axis), f"layer {layer.path or layer.name!r}"
        if axis == PIPE_NAME:
            raise ValueError(
                "The axis 'pipe' cuts the model into stages. Split the table over another axis: "
                f"{topology.describe_axes()}. Received: axis='pipe' for {where}"
            )
        size = topology.axis_size(axis)
        received = f"{self.what}={self.sizes}, for {where}"
        if len(self.sizes) != size:
            raise ValueError(
                f"A split has as many parts as its axis has devices: {size} on {axis!r}. "
                f"Received: {len(self.sizes)} parts, {received}"
            )
        total = layer.output_dim if self.columns else layer.input_dim
        if sum(self.sizes) != total:
            raise ValueError(
                f"The parts of a split are the whole table: {total} {self.what}. "
                f"Received: {sum(self.sizes)} {self.what}, {received}"
            )
        cuts_batch = axis == topology.data_axis
        return TableSplit(axis, cuts_batch, alltoall, self.local_columns, int(bool(self.columns)))


split_setting: Setting[Split] = Setting("kdist.shard")


def split_by_hand(
    layer: Any, rows: Sequence[int], axis: str, local_columns: bool
) -> keras.layers.Layer:
    """Declares how many rows of a table each device of an axis holds; see `kdist.shard`."""
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(f"manual_split is of an embedding. Received: {layer!r}")
    split = Split(rows if isinstance(rows, tuple) else tuple(rows), axis, local_columns)
    _check_layer(layer, BY_HAND)
    split_setting.set(layer, split)
    return layer


def _check_layer(layer: keras.layers.Layer, what: str) -> None:
    """Refuses layers that do anything but look rows up in a table that is `what`."""
    received = f"Received: layer {layer.name!r} of type {type(layer).__name__}"
    if not isinstance(layer, keras.layers.Embedding):
        others = keras_models.flat_layers(layer)[1:]
        inside = [one for one in others if isinstance(one, keras.layers.Embedding)]
        fix = f"Name these one by one: {[one.path or one.name for one in inside]}"
        raise ValueError(
            f"Only a table of which layers look rows up can be {what}: that of a "
            f"keras.layers.Embedding. {fix if inside else 'Leave this layer as it is'}. "
            f"{received}"
        )
    if getattr(layer, "tie_weights", False):
        raise ValueError(
            f"A table that is {what} is used row by row. This one is used whole a second time: "
            "call(..., reverse=True) multiplies by it. Use tie_weights=False, or leave it whole "
            f"on the device. {received}"
        )


def split_layers(model: keras.Model) -> dict[keras.layers.Embedding, Split]:
    """The layers of a model whose tables are split by hand.

    Raises:
        ValueError: One of them has a table that cannot be split, or that is on the host too.
    """
    layers = keras_models.flat_layers(model)
    given = {id(target): split for target, split in split_setting.given()}
    own = {
        id(one): Split(one.split_rows, one.split_axis, one.local_columns, one.split_columns)
        for one in layers
        if getattr(one, "split_axis", None)
    }
    found = {one: {**own, **given}.get(id(one)) for one in layers}
    placed = {id(one) for one in host_layers(model)}
    for layer in [one for one, split in found.items() if split is not None]:
        if id(layer) in placed:
            raise ValueError(
                "A table is on the host or split over devices, not both. Leave out kdist.place or "
                f"manual_split. Received: both for layer {layer.path or layer.name!r}"
            )
        _check_table(layer, BY_HAND)
    return {layer: split for layer, split in found.items() if split is not None}


def host_layers(model: keras.Model) -> dict[keras.layers.Embedding, TablePlace]:
    """The layers of a model whose tables are on the host.

    Raises:
        ValueError: One of them has a table that cannot be there.
    """
    given = {id(target): place for target, place in host_setting.given()}
    placed = {}
    for layer in keras_models.flat_layers(model):
        own = TablePlace("host", layer.prefetch) if getattr(layer, "on_host", False) else None
        found = given.get(id(layer), own)
        if found is not None and found.where == "host":
            placed[layer] = found
    for layer in placed:
        _check_table(layer, ON_HOST)
    return placed


WHOLE_INSTEAD = {
    ON_HOST: "kdist.place, HostEmbedding or placement='host'",
    BY_HAND: "manual_split, SplitEmbedding or placement='split'",
}
"""Where a table is -> what says so."""


def _check_table(layer: keras.layers.Embedding, what: str) -> None:
    """Refuses a table that other rows than those looked up matter of, and one that is encoded."""
    call = ""
    if not layer.built:
        why, fix = "is not built", "Build the model, or call it once, first"
    elif getattr(layer, "tie_weights", False):
        why, fix = "is also used whole, by call(..., reverse=True)", "Use tie_weights=False"
    elif layer.quantization_mode:
        why, call = f"is quantized to {layer.quantization_mode}", "quantize"
    elif layer.lora_enabled:
        why, call = "has LoRA, which adds its factors up to another whole table", "enable_lora"
    else:
        return
    if call:
        fix = (
            f"Keep this table whole on the devices, without {WHOLE_INSTEAD[what]}, or do not call "
            f"{call} for its layer. Neither can be taken back in a model that is parallel already: "
            "build it again"
        )
    raise ValueError(
        f"A table that is {what} is used row by row, and this one {why}. {fix}. "
        f"Received: layer {layer.path or layer.name!r}"
    )

"""Placing a model's weights on a mesh: from layout map and declarations to local variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.config.idle_layouts import idle_axis, no_sequence
from kdist.config.parallel import ParallelConfig
from kdist.config.shard import ResolvedShard, declarations, resolve_declaration
from kdist.config.tables import Split, TablePlace, host_layers, split_layers
from kdist.config.without_effect import WithoutEffect
from kdist.display.warn import warn
from kdist.dtensor.adapters import adapter_layouts
from kdist.dtensor.along_sequence import End, ends
from kdist.dtensor.channels import ConvInParts, convolutions_in_parts
from kdist.dtensor.limits import RULED_OUT
from kdist.dtensor.lowered_program import Island
from kdist.dtensor.relayout import SliceTrace
from kdist.layers.relayout import Relayout
from kdist.layers.tables import TableConfig
from kdist.plan.auto_tables import chosen
from kdist.sharding.dims import Dims, WeightFit, inner_dims
from kdist.sharding.layout import WeightLayout, match_pattern, read_layout_map, resolve_layouts
from kdist.sharding.merged_axes import Cut, inner_axes_of, merged_axes
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Group, Placement, place, place_on_host, place_split
from kdist.sharding.strategy import parse_strategy
from kdist.storage.fetched_table import FetchedTable
from kdist.storage.variables import Stored, distribute, stored

import keras
import tensorflow as tf

SHOWN = 3
"""Islands that a note names."""

TOLD_SIZES = 2
"""Sizes of a dim that does not divide which a warning names; the plan has all."""


class ModelLayouts:
    """The resolved layouts of a built model.

    Attributes:
        topology: The mesh, with the axes merged that cut a dim together.
        compute: The mesh as programs see it: the same, or with the data axis inside.
        weights: Layout of each weight, by identity of the variable.
        layers: What `kdist.shard` declared, resolved, with its layer.
        outputs: Layout of the output of layers that an activation pattern matches.
        model_layers: Every layer of the model.
        sequence: Layers between which tensors are cut along the sequence, if that is wanted.
        any_cut: Whether any weight is cut.
        uncut: Declared cuts of activations that a traced program left out.
        islands: Operations that run on gathered operands, as notes name them.
        fetched_layers: The layers whose tables are on the host, or split by hand.
        prefetched: Those of them whose rows are looked up a step ahead.
        on_host: Identities of tables on the host.
        split: By identity of a table that is split by hand, sizes of its parts, and how.
        chosen: Large tables with `placement="auto"`, and where they go.
        idle: Inner axes that cut nothing, and `sequence_parallel` that does not, as far as programs
            are traced.
        left_whole: A line for each dim of a weight that its layout cuts and that does not divide.
    """

    def __init__(
        self,
        model: keras.Model,
        config: ParallelConfig,
        topology: Topology,
        data_inside: bool = False,
        again: bool = False,
    ) -> None:
        """Resolves them.

        Args:
            model: The model.
            config: What `parallelize` was given.
            topology: The mesh.
            data_inside: Whether programs compute over the whole batch.
            again: Whether the model had layouts before, and has changed.
        """
        self.topology = topology
        self.compute = topology.with_data_inside() if data_inside else topology
        fit = WeightFit(topology, replicate=config.indivisible == "replicate")
        pairs = [(v.path, tuple(v.shape)) for v in model.weights]
        layouts, patterns = resolve_layouts(pairs, config.layout_map, topology, fit, again)
        self.weights: dict[int, WeightLayout] = dict(zip(map(id, model.weights), layouts))
        self.layers: list[tuple[keras.layers.Layer, ResolvedShard]] = [
            (layer, resolve_declaration(layer, declared, self.compute, fit))
            for layer, declared in declarations(model)
        ]
        for layer, resolved in self.layers:
            self._add_declared(layer, resolved)
        self.model_layers = keras_models.flat_layers(model)
        self._add_adapters(read_layout_map(config.layout_map, topology))
        hosted, split = host_layers(model), split_layers(model)
        self.chosen = {} if data_inside else self._chosen(model, [*hosted, *split])
        for layer, table in self.chosen.items():
            if table.placement == "host":
                hosted[layer] = TablePlace("host")
            else:
                split[layer] = Split(table.rows or (), table.axis, columns=table.columns or ())
        self.on_host = {id(layer.embeddings) for layer in hosted}
        self.prefetched = [layer for layer, place in hosted.items() if place.prefetch]
        self.split = {
            id(layer.embeddings): (one.sizes, one.on(layer, topology, config.enable_alltoall))
            for layer, one in split.items()
        }
        self.fetched_layers = [*hosted, *split]
        self._refuse_cut_tables()
        self.outputs = _match_outputs(model, patterns, again)
        self.sequence = list(self._ends()) if config.sequence_parallel else []
        # None: it is not wanted.
        self._along: bool | None = False if config.sequence_parallel else None
        self.uncut: list[WithoutEffect] = []
        self.idle: list[WithoutEffect] = []
        self.moves_gathered = False  # all-to-alls, which DTensor could not differentiate
        self.islands: dict[str, bool] = {}  # by title: whether one that the setting rules out
        self.left_whole = tuple(fit.notes)
        self.any_cut = any(not layout.is_replicated for layout in self.weights.values())
        cuts = list(self._cuts(model))
        self._cut_over = {a for _, dims in cuts for d in dims for a in inner_axes_of(d, topology)}
        self._cut_over.update(table.axis for _, table in self.split.values())
        merged = merged_axes(cuts, self.compute)
        self.topology = topology.with_merged(merged)
        self.compute = self.compute.with_merged(merged)

    def _chosen(self, model: keras.Model, layers: Iterable[Any]) -> dict[Any, TableConfig]:
        cut = {key for key, layout in self.weights.items() if not layout.is_replicated}
        return chosen(model, self.topology, cut | {id(one.embeddings) for one in layers})

    def _refuse_cut_tables(self) -> None:
        for layer in self.fetched_layers:
            layout = self.weights[id(layer.embeddings)]
            if not layout.is_replicated:
                raise ValueError(
                    "A table on the host is whole there, and one that is split by hand is cut so "
                    "alone. Leave it out of the layout map and of shard(weights=...), or leave "
                    "kdist.place and manual_split out. "
                    f"Received: {layer.embeddings.path!r} with layout {layout.dims}"
                )

    def _ends(self) -> Iterator[End]:
        tables = set(map(id, self.fetched_layers))
        layers = [layer for layer in self.model_layers if id(layer) not in tables]
        return ends(layers, lambda variable: self.read(id(variable)))

    def read(self, key: int) -> Dims:
        """Layout in which operations read a weight, by identity of the variable.

        Not cut by the data axis: what that slices is gathered first.
        """
        return inner_dims(self.weights[key].dims, self.topology)

    def convolutions_in_parts(self) -> list[ConvInParts]:
        """See `kdist.dtensor.channels`."""
        return [*convolutions_in_parts(self.model_layers, lambda v: self.read(id(v)))]

    def learn(self, trace: SliceTrace) -> None:
        """Notes what a traced program cuts, and what it should and does not."""
        self.tell_uncut(trace.uncut)
        self._cut_over |= trace.cut_over
        axes = self.topology.inner_axes
        idle = [(name, size) for name, size in axes if size > 1 and name not in self._cut_over]
        self.idle = [idle_axis(name, size) for name, size in idle]
        if self._along is not None and axes:
            self._along |= trace.along_sequence
            self.idle += [] if self._along else [no_sequence()]

    def tell_uncut(self, found: Iterable[WithoutEffect]) -> None:
        """Notes declared cuts that a trace left out; warns of each for its first two sizes.

        A loop that makes text a word at a time comes with one size after the other.
        """
        for note in found:
            n = next((n for n, one in enumerate(self.uncut) if one.joined(note)), None)
            if n is None:
                self.uncut.append(note)
                warn(str(note))
            elif (both := self.uncut[n].joined(note)) and both != self.uncut[n]:
                self.uncut[n] = both
                if len(both.sizes) <= TOLD_SIZES:
                    warn(str(both))

    def _cuts(self, model: keras.Model) -> Iterator[Cut]:
        """Every tensor whose layout is known before the model is traced."""
        if self.compute.rows_axis is not None:
            yield "the batch", (self.compute.rows_axis,)
        for variable in model.weights:
            yield repr(variable.path), self.read(id(variable))
        for layer, resolved in self.layers:
            yield from ((f"an input of layer {layer.name!r}", dims) for dims in resolved.inputs)
            yield from ((f"an output of layer {layer.name!r}", dims) for dims in resolved.outputs)
        for layer, dims in self.outputs:
            yield f"the output of layer {layer.name!r}", dims
        for layer in self.model_layers if self.compute.inner_size > 1 else ():
            if isinstance(layer, Relayout):
                what = f"the output of layer {layer.name!r}"
                yield (
                    what,
                    parse_strategy(layer.layout, self.compute, operand=what, batch_dim=True),
                )

    def tell_islands(self, found: Iterable[Island]) -> None:
        """Notes operations that run on gathered operands; warns once a model, of the first."""
        first = not self.islands
        self.islands.update((one.title, RULED_OUT in one.reason) for one in found)
        if first and self.islands:
            warn(self.island_note())

    def island_note(self) -> str:
        """What runs on gathered operands, in one line; "" if nothing does."""
        if not self.islands:
            return ""
        unknown = [title for title, ruled_out in self.islands.items() if not ruled_out]
        moving = [title for title, ruled_out in self.islands.items() if ruled_out]
        causes = [f"DTensor cannot expand {_shown(unknown)}."] if unknown else []
        if moving:
            causes.append(
                f"enable_alltoall=False rules out the all-to-all of {_shown(moving)}: set it to "
                "True to have that cut too."
            )
        return (
            f"{' '.join(causes)} Each device runs that whole, on gathered operands; everything "
            "else stays cut over the inner axes. kdist.inspect(model) says what it costs."
        )

    def _add_declared(self, layer: keras.layers.Layer, resolved: ResolvedShard) -> None:
        for variable in layer.weights:
            layout = resolved.weights.get(variable.path)
            if layout is None:
                continue
            mapped = self.weights[id(variable)]
            if not mapped.is_replicated and mapped != layout:
                raise ValueError(
                    f"The weight {variable.path!r} is cut by the layout map and, differently, by "
                    f"kdist.shard on layer {layer.name!r}. Keep one of them. Received: layout_map "
                    f"gives {mapped.dims}, shard gives {layout.dims}"
                )
            self.weights[id(variable)] = layout

    def _add_adapters(self, patterns: Mapping[str, Any]) -> None:
        """Cuts factors of LoRA like their weight over inner axes, if the map does not name them."""
        inner = {key: self.read(key) for key in self.weights}
        for variable, dims in adapter_layouts(self.model_layers, inner):
            known = self.weights[id(variable)]
            if known.is_replicated and match_pattern(patterns, variable.path) is None:
                self.weights[id(variable)] = WeightLayout(dims)


def _shown(titles: Sequence[str]) -> str:
    """The first titles of many."""
    more = f" and {len(titles) - SHOWN} more" if len(titles) > SHOWN else ""
    return ", ".join(titles[:SHOWN]) + more


def _match_outputs(
    model: keras.Model, patterns: dict[str, Dims], again: bool
) -> list[tuple[keras.layers.Layer, Dims]]:
    """Layers whose `<path>/output` an activation pattern of the layout map matches."""
    found, used = [], set()
    for layer in keras_models.flat_layers(model)[1:]:
        pattern = match_pattern(patterns, f"{layer.path}/output")
        if pattern is not None:
            used.add(pattern)
            found.append((layer, patterns[pattern]))
    unused = [p for p in patterns if p not in used]
    if unused and not again:
        warn(f"These activation patterns of the layout map match no layer's output: {unused}")
    return found


def placements(
    model: keras.Model,
    layouts: ModelLayouts,
    topology: Topology,
    groups: Mapping[int, Sequence[Group]] | None = None,
) -> list[tuple[keras.Variable, Placement]]:
    """Where each weight of the model goes.

    Args:
        model: The model.
        layouts: Its layouts.
        topology: The mesh.
        groups: By identity of a weight, the slices of each stage that uses it; by default every
            slice uses every weight.
    """
    placed = []
    for variable in model.weights:
        layout = layouts.weights[id(variable)]
        itemsize = tf.as_dtype(variable.dtype).size
        where = () if groups is None else groups[id(variable)]
        if id(variable) in layouts.on_host:
            placement = place_on_host(variable.path, variable.shape, itemsize, topology, where)
        elif id(variable) in layouts.split:
            placement = place_split(
                variable.path,
                variable.shape,
                itemsize,
                *layouts.split[id(variable)],
                topology,
                groups=where,
            )
        else:
            placement = place(
                variable.path, variable.shape, itemsize, layout, topology, groups=where
            )
        placed.append((variable, placement))
    return placed


def place_weights(
    placed: list[tuple[keras.Variable, Placement]], topology: Topology
) -> dict[int, Stored]:
    """Moves the weights to their devices; those that are there already stay.

    Another model's level may have spread those over slices; this one's may move them.

    Raises:
        ValueError: A weight belongs to a model that was parallelized over another mesh.
    """
    for variable, placement in placed:
        entry: Any = stored(variable)
        if entry is None:
            continue
        if entry.topology != topology or not entry.placement.computes_like(placement):
            if entry.topology == topology:
                raise ValueError(
                    "A weight is stored in one way, and another model has it by its layouts. Make "
                    "models that share weights parallel with the same layouts and stages "
                    "(kdist.layout_map_for keeps the layouts of weights that are stored). "
                    f"Received: {variable.path!r}, stored as {_described(entry.placement)}, now "
                    f"{_described(placement)}"
                )
            raise ValueError(
                "A weight can live on one mesh only. Build a new model, and load the weights of "
                f"this one into it, to change the mesh or layout. Received: {variable.path!r}"
            )
    return {
        id(variable): stored(variable) or _distributed(variable, placement, topology)
        for variable, placement in placed
    }


def _described(placement: Placement) -> str:
    """What must be the same in two models that share a weight."""
    where = f" on slices {placement.slices}" if placement.groups else ""
    kind = " on the host" if placement.on_host else " split by hand" if placement.split else ""
    return f"{placement.layout.dims}{kind}{where}"


def _distributed(variable: keras.Variable, placement: Placement, topology: Topology) -> Stored:
    kind = FetchedTable if placement.fetched else Stored
    return distribute(variable, placement, topology, kind)

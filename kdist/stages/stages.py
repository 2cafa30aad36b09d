"""One model cut into the stages of one pipeline: what each computes, which variables it uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.config.pipeline import PipelineConfig
from kdist.config.settings import Setting, check_not_placed
from kdist.pipeline.graph import Graph
from kdist.pipeline.partition import Partition, partition
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.work import WeightUse
from kdist.plan.boundaries import BoundaryTensor
from kdist.program.vjp import differentiable
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Group
from kdist.stages.asked_logits import asked_logits, makes_logits
from kdist.stages.layer_lists import chained, with_lists
from kdist.stages.measured_costs import LayerCosts, measure
from kdist.stages.model_graph import EXAMPLES, ModelGraph, graph_of
from kdist.storage.fetched_table import is_fetched

import keras
import tensorflow as tf

stage_setting: Setting[int] = Setting("kdist.set_stage")
"""What `set_stage` said."""


def set_stage(layer: Any, stage: int) -> Any:
    """Fixes the pipeline stage of a layer, and of all layers inside it.

    It is the stage of the layer's first call; later calls (of a tied head) follow their neighbours,
    or are named "layer#1" in `PipelineConfig(stages={...})`, whose patterns go before this. Layers
    without a stage follow their neighbours. With several chunks per stage it is the virtual stage.
    The same idea is MindSpore's `Cell.pipeline_stage`. Takes effect in `kdist.parallelize`; the
    last call counts.

    Args:
        layer: A layer or nested model.
        stage: From 0 on.

    Returns:
        The layer.

    Raises:
        ValueError: For another target or stage.

    Example:
        >>> model = build_model()
        >>> for name, stage in {"up": 0, "down": 1}.items():
        ...     kdist.set_stage(model.get_layer(name), stage)  # the head follows
        >>> model = kdist.PipelineModel(model, stages=2, micro_batches=4)
    """
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise ValueError(f"A stage is an integer from 0 on. Received: stage={stage!r}")
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(
            "kdist.set_stage takes a keras layer or a nested model. "
            f"Received: {layer!r} of type {type(layer).__name__}"
        )
    check_not_placed(layer, "kdist.set_stage")
    stage_setting.set(layer, stage)
    return layer


LEAST = 0.05
"""Of the mean cost of stages: one that has less computes next to nothing."""


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """A model's cut into stages, and their schedule. Made without touching a device.

    Attributes:
        schedule: Who computes what in which order.
        described: The model's graph.
        partition: Which node is on which virtual stage.
        functional: The `Functional` that the graph describes.
        costs: What the stages were balanced by.
    """

    schedule: Schedule
    described: ModelGraph
    partition: Partition
    functional: Any
    costs: LayerCosts

    @classmethod
    def of(
        cls,
        model: keras.Model,
        config: PipelineConfig,
        topology: Topology,
        example: Any = None,
        before: StagedModel | None = None,
        whole_loss: str = "",
    ) -> StagedModel:
        """Cuts a built model.

        Args:
            model: The model.
            config: What the user wants.
            topology: The mesh.
            example: Spec of the input, for stages that are given as lists of layers and for costs
                that are measured.
            before: How the model was cut before it gained or lost weights.
            whole_loss: Why its loss is one over the whole batch, "" if it is not.

        Raises:
            ValueError: The model has no graph, or no such cut exists; or costs are to be measured
                and no batch was seen, or `set_stage` gave a stage.
        """
        schedule = config.schedule_for(topology.num_stages, whole_loss)
        if isinstance(config.stages, tuple):
            lists = config.stages
            _refuse_settings(model)
            functional = chained(model, lists, schedule.virtual_stages, example)
            described = graph_of(functional)
            graph = with_lists(described.graph, lists)
        else:
            functional = keras_models.functional_of(model)
            described = graph_of(model)
            stages = config.stages if isinstance(config.stages, dict) else {}
            graph = described.graph.assign(stages)
            graph = _with_settings(model, described, graph)
        costs = LayerCosts({node.name: node.cost for node in graph.nodes})
        if config.costs == "measured":
            costs = _measured(described, functional, config, topology, graph, example, before)
        cut = partition(costs.applied(graph), schedule.virtual_stages)
        return cls(schedule, described, cut, functional, costs)

    def scheduled(self, config: PipelineConfig, whole_loss: str) -> StagedModel:
        """The same cut with the schedule that the model's loss allows; see `of`."""
        schedule = config.schedule_for(self.schedule.num_stages, whole_loss)
        return dataclasses.replace(self, schedule=schedule)

    def idle_stages(self) -> str:
        """What to say of stages that were found by cost and compute next to nothing, "" if none."""
        cut = self.partition
        nodes, total = cut.graph.nodes, sum(cut.costs)
        least = LEAST * total / len(cut.costs)
        idle = [names for names, cost in zip(cut.stages, cut.costs) if cost < least]
        if not idle or any(node.stage is not None for node in nodes):
            return ""
        largest = max(nodes, key=lambda node: node.cost)
        return (
            f"stages found by cost: {len(idle)} of {len(cut.stages)} compute less than "
            f"{LEAST:.0%} of the mean, such as the one of {list(idle[0][:3])}, and their devices "
            "wait. A node is not cut: a layer, or a model inside that has a call of its own. Use "
            "fewer stages, or build large nodes as graphs of layers. Received: "
            f"{largest.name!r} with {largest.cost / total:.0%} of the cost"
        )

    def stage_of(self, virtual: int) -> int:
        """The stage that runs a virtual stage."""
        return virtual % self.schedule.num_stages

    def users(self) -> dict[int, tuple[int, ...]]:
        """By identity of a variable, the virtual stages that use it, ascending."""
        found: dict[int, list[int]] = {}
        named = self.partition.graph.named
        for virtual, names in enumerate(self.partition.stages):
            for name in names:
                for key in named[name].parameters:
                    stages = found.setdefault(id(self.described.variables[key]), [])
                    if virtual not in stages:
                        stages.append(virtual)
        return {key: tuple(stages) for key, stages in found.items()}

    def weight_uses(
        self,
        params: Sequence[keras.Variable],
        trained: int,
        gathered: Collection[int],
        penalties: bool,
    ) -> list[WeightUse]:
        """What each virtual stage has to do with weights, as far as the model's graph tells.

        Args:
            params: What steps take as parameters.
            trained: How many of them train: the first ones.
            gathered: Positions of those that are gathered before use.
            penalties: Whether stages compute penalties.
        """
        users, found = self.users(), []
        for virtual in range(self.schedule.virtual_stages):
            mine = [i for i, v in enumerate(params) if virtual in users.get(id(v), ())]
            looks = [i for i in mine if i in gathered]
            back, mine = looks[::-1], [i for i in mine if i < trained]
            penalized = [
                i
                for i in mine
                if params[i].regularizer
                and not is_fetched(params[i])
                and users[id(params[i])][0] == virtual
            ]
            found.append(
                WeightUse(
                    {"F": looks, "B": back, "I": back, "W": back},
                    tuple(mine),
                    tuple(penalized) if penalties else (),
                )
            )
        return found

    def groups(self, model: keras.Model, topology: Topology) -> dict[int, tuple[Group, ...]]:
        """By identity of a weight, the slices of each stage that uses it.

        A weight that no layer of the graph uses lives with the first stage.
        """
        users = self.users()
        found = {}
        for variable in model.weights:
            stages = sorted({self.stage_of(v) for v in users.get(id(variable), (0,))})
            found[id(variable)] = tuple(topology.group(stage) for stage in stages)
        return found

    def boundaries(self) -> list[list[BoundaryTensor]]:
        """The tensors that cross from each virtual stage to the next."""
        tensors = {
            name: tensor
            for source in self.described.sources.values()
            for name, tensor in zip(source.outputs, source.node.outputs, strict=True)
        }
        made = {n: s for s in self.described.sources.values() for n in s.outputs}
        found = []
        for virtual, names in enumerate(self.partition.boundaries):
            asked = self.asked_logits(virtual)
            found.append([_described(name, tensors[name]) for name in names])
            known = (n for n in names if n in asked and makes_logits(made[n].node.operation))
            # A loss starts from them or from what they made: one gradient comes back.
            found[-1] += [
                dataclasses.replace(_described(f"{n}'s logits", tensors[n]), floating=False)
                for n in known
            ]
        return found

    def asked_logits(self, virtual: int) -> frozenset[str]:
        """The tensors that a virtual stage sends on with their logits, if they have some."""
        return asked_logits(self.described, self.partition.stages, virtual)

    def describe(self) -> str:
        """The schedule and what each stage has, in a few lines."""
        schedule = self.schedule
        lines = [
            f"pipeline: {schedule.name}, {schedule.num_stages} stages, "
            f"{schedule.micro_batches} micro-batches"
        ]
        measured = self.costs.of_stages(self.partition.stages)
        if self.costs.measured is not None:
            lines.append(f"  stages by measured costs of {self.costs.rows} rows on one device")
        for virtual, names in enumerate(self.partition.stages):
            chunk = f", chunk {virtual // schedule.num_stages}" if schedule.chunks > 1 else ""
            ends = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            times = f" ({measured[virtual]})" if measured[virtual] else ""
            lines.append(f"  stage {self.stage_of(virtual)}{chunk}: {ends}{times}")
        lines += [f"  tied: {key} on stages {users}" for key, users in self.partition.tied.items()]
        return "\n".join(lines)

    def inputs_of(self, virtual: int) -> tuple[str, ...]:
        """The model's inputs that a virtual stage is given with the batch."""
        graph = self.partition.graph
        named = graph.named
        used = {tensor for name in self.partition.stages[virtual] for tensor in named[name].inputs}
        if virtual == self.schedule.virtual_stages - 1:
            used |= set(graph.outputs)
        return tuple(name for name in graph.inputs if name in used)

    def reads(self, virtual: int) -> tuple[str, ...]:
        """Tensors that a virtual stage gets from the one before."""
        return self.partition.boundaries[virtual - 1] if virtual else ()

    def writes(self, virtual: int) -> tuple[str, ...]:
        """Tensors that a virtual stage sends on."""
        last = virtual == self.schedule.virtual_stages - 1
        return () if last else self.partition.boundaries[virtual]


def _described(name: str, tensor: Any) -> BoundaryTensor:
    dtype = tf.as_dtype(keras.backend.standardize_dtype(tensor.dtype))
    return BoundaryTensor(name, tuple(tensor.shape[1:]), dtype.size, differentiable(tensor))


def stages_given(model: keras.Model) -> list[tuple[Any, int]]:
    """What `set_stage` said of layers of a model."""
    inside = {id(one) for one in keras_models.flat_layers(model)}
    return [(layer, stage) for layer, stage in stage_setting.given() if id(layer) in inside]


def _measured(
    described: ModelGraph,
    functional: Any,
    config: PipelineConfig,
    topology: Topology,
    graph: Graph,
    example: Any,
    before: StagedModel | None,
) -> LayerCosts:
    """Measures the nodes of a graph, unless that was done before."""
    fixed = [node.name for node in graph.nodes if node.stage is not None]
    if fixed:
        raise ValueError(
            "Measured costs are for stages='auto'; kdist.set_stage has given stages. Leave one of "
            f"them out. Received: costs='measured', stages of {fixed[:3]}"
        )
    known = None if before is None else before.costs
    if known is not None and set(known.measured or ()) == set(graph.named):
        return known
    if example is None:
        raise ValueError(
            "Layers are measured when the first batch shows the shapes of the inputs. Train or "
            "predict a batch first. Received: costs='measured'"
        )
    batch = keras.tree.flatten(example)[0].shape[0] or EXAMPLES
    rows = -(-batch // (topology.data_size * config.micro_batches))
    return measure(described, functional, example, rows, topology.devices[0])


def _refuse_settings(model: keras.Model) -> None:
    for layer, stage in stages_given(model):
        raise ValueError(
            "Lists of layers say the stage of every layer. Leave out kdist.set_stage, or the "
            f"lists. Received: set_stage of layer {layer.name!r} to {stage}"
        )


def _with_settings(model: keras.Model, described: ModelGraph, graph: Graph) -> Graph:
    """Fixes what `set_stage` fixed and no pattern did."""
    called = {id(described.sources[node.name].node.operation) for node in graph.nodes}
    wanted: dict[int, int] = {}
    for layer, stage in stages_given(model):
        inside = {id(one): stage for one in keras_models.flat_layers(layer)}
        if not called & set(inside) and not isinstance(layer, keras.layers.InputLayer):
            raise ValueError(
                "kdist.set_stage is for layers that the model's graph calls; what a layer calls "
                "itself is on its stage. Set the stage of the layer around it. "
                f"Received: layer {layer.name!r}, stage {stage}"
            )
        wanted.update(inside)
    found: dict[str, int] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        operation = described.sources[node.name].node.operation
        first = id(operation) not in seen
        seen.add(id(operation))
        if first and node.stage is None and id(operation) in wanted:
            found[node.name] = wanted[id(operation)]
    nodes = (dataclasses.replace(n, stage=found.get(n.name, n.stage)) for n in graph.nodes)
    return dataclasses.replace(graph, nodes=tuple(nodes))

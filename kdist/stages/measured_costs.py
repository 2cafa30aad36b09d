"""What layers cost, measured: each call of the graph alone, forward and backward, on one device.

The estimate of `layer_costs` knows classes of layers and their shapes. What a layer of another
class does, a loop or an operation of the user's own, it cannot know.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.pipeline.graph import Graph
from kdist.program.vjp import differentiable
from kdist.stages.model_graph import ModelGraph, NodeSource

import keras
import tensorflow as tf

FEWEST, MOST, ENOUGH = 3, 30, 0.05
"""How often a call runs: at least, at most, and in between until so many seconds are over."""
LEAST = 1e-7
"""Seconds that a call counts at least: what takes less is lost in the clock."""


@dataclasses.dataclass(frozen=True)
class MeasuredCost:
    """Time of one call of a layer.

    Attributes:
        forward: Seconds of the forward pass, in training.
        backward: Seconds of the gradient pass.
    """

    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """The costs that stages are balanced by, and those that they are not.

    Attributes:
        estimated: Per node, in seconds of a machine that does not exist: only ratios count.
        measured: Per node; None if nothing was measured.
        rows: Rows of the micro-batch that was measured with.
    """

    estimated: Mapping[str, float]
    measured: Mapping[str, MeasuredCost] | None = None
    rows: int = 0

    def applied(self, graph: Graph) -> Graph:
        """The graph with the costs to balance by."""
        if self.measured is None:
            return graph
        return graph.with_costs({name: cost.seconds for name, cost in self.measured.items()})

    def of_stages(self, stages: Sequence[Sequence[str]]) -> list[str]:
        """A line for each stage: measured times and share, beside the estimated share."""
        if self.measured is None:
            return ["" for _ in stages]
        estimates = [sum(self.estimated[name] for name in names) for names in stages]
        found = [[self.measured[name] for name in names] for names in stages]
        seconds = [sum(one.seconds for one in costs) for costs in found]
        return [
            f"{sum(c.forward for c in costs) * 1e3:.2f} ms forward, "
            f"{sum(c.backward for c in costs) * 1e3:.2f} ms backward: "
            f"{_share(taken, seconds)} measured, {_share(estimate, estimates)} estimated"
            for costs, taken, estimate in zip(found, seconds, estimates)
        ]


def measure(
    described: ModelGraph, functional: Any, example: Any, rows: int, device: str
) -> LayerCosts:
    """Times every node of a model's graph, calls that are alike once.

    Args:
        described: The graph.
        functional: The `Functional` that it describes.
        example: Specs of the model's inputs, for the dims that the graph leaves open.
        rows: Of a micro-batch.
        device: Where it is done.

    Returns:
        Measured costs beside the graph's own.

    Raises:
        ValueError: If a layer cannot run alone.
    """
    known: dict[str, MeasuredCost] = {}
    measured = {}
    with tf.init_scope(), tf.device(device):
        zeros = keras.tree.map_structure(lambda spec: _zeros(spec, rows), example)
        values = dict(zip(described.inputs, keras_models.flat_inputs(functional, zeros)))
        empty = seconds_of(_function(lambda: tf.constant(0.0)))
        for node in described.graph.nodes:
            source = described.sources[node.name]
            given = [values[name] for name in source.inputs]
            try:
                call = _LayerCall(source, given)
                values.update(zip(source.outputs, call.outputs()))
                key = _likeness(source.node, given) or node.name
                if key not in known:
                    known[key] = call.measured(empty)
            except (ValueError, TypeError, tf.errors.OpError) as error:
                raise ValueError(
                    f"Layer {node.name!r} cannot run alone, on zeros, to be measured. Use "
                    f"PipelineConfig(costs='estimate'). Received: costs='measured'; {error}"
                ) from error
            measured[node.name] = known[key]
    return LayerCosts({node.name: node.cost for node in described.graph.nodes}, measured, rows)


def seconds_of(call: Callable[[], Any]) -> float:
    """Least time of a call, after one that is not counted: whatever disturbs it only adds time."""
    call()
    seconds: list[float] = []
    while len(seconds) < FEWEST or (len(seconds) < MOST and sum(seconds) < ENOUGH):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class _LayerCall:
    """One node as functions of nothing: its inputs and weights are values of this object."""

    def __init__(self, source: NodeSource, given: Sequence[Any]) -> None:
        self._node = source.node
        self._variables = list(getattr(source.node.operation, "variables", []))
        self._values = list(given), [tf.convert_to_tensor(v.value) for v in self._variables]
        self._run = _function(self._forward, *self._values)

    def outputs(self) -> list[Any]:
        """What it makes of its inputs."""
        return list(self._run())

    def measured(self, empty: float) -> MeasuredCost:
        """Times it.

        Args:
            empty: Seconds that a call of a function takes that does nothing.
        """
        forward = seconds_of(self._run) - empty
        both = seconds_of(_function(self._both, *self._values)) - empty
        return MeasuredCost(max(forward, LEAST), max(both - forward, 0.0))

    def _forward(self, given: list[Any], state: list[Any]) -> list[Any]:
        node = self._node
        by_tensor = {id(t): value for t, value in zip(node.arguments.keras_tensors, given)}
        args, kwargs = node.arguments.fill_in(by_tensor)
        if keras_models.takes_training(node.operation):
            kwargs["training"] = True
        # Weights come in as tensors, so that their gradients go out; new state is dropped.
        with keras.StatelessScope(list(zip(self._variables, state))):
            return keras.tree.flatten(node.operation(*args, **kwargs))

    def _both(self, given: list[Any], state: list[Any]) -> list[Any]:
        weights = [t for v, t in zip(self._variables, state) if v.trainable]
        sources = [t for t in (*given, *weights) if t is not None and differentiable(t)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            made = [t for t in self._forward(given, state) if differentiable(t)]
        gradients = tape.gradient(made, sources) if made and sources else []
        return [*made, *(tf.convert_to_tensor(g) for g in gradients if g is not None)]


def _function(run: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    """A graph of a function, called with the same values every time."""
    # A concrete one: many functions of one name look like one that is traced again and again.
    traced = tf.function(run, autograph=False).get_concrete_function(*given)
    return lambda: traced(*given)


def _zeros(spec: Any, rows: int) -> Any:
    """An input of a micro-batch."""
    if spec is None:
        return None
    return tf.zeros((rows, *spec.shape[1:]), keras.backend.standardize_dtype(spec.dtype))


def _likeness(node: Any, given: Sequence[Any]) -> str:
    """Equal for calls that do the same work; "" if that cannot be known."""
    try:
        config = dict(node.operation.get_config())
        config.pop("name", None)
        kwargs = {k: v for k, v in node.arguments.kwargs.items() if v is not None}
        shapes = [(tuple(t.shape), t.dtype.name) for t in given]
        what = [type(node.operation).__qualname__, config, kwargs, shapes]
        return json.dumps(what, sort_keys=True, default=_refuse)
    except (NotImplementedError, TypeError):
        return ""


def _refuse(value: Any) -> Any:
    if isinstance(value, keras.KerasTensor):
        return "tensor"
    raise TypeError(type(value).__name__)


def _share(one: float, all_of_them: Sequence[float]) -> str:
    return f"{one / sum(all_of_them):.0%}" if sum(all_of_them) else "-"

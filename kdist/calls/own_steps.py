"""The steps of a model whose class says itself what a step is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kdist._compat import keras_known_rows, keras_remat
from kdist._compat.backward_places import kept_places
from kdist._compat.function_graphs import made_apart, traced_anew
from kdist.calls.layer_calls import LayerCalls
from kdist.calls.over_mesh import EveryGradient, NotOverMesh
from kdist.dtensor import sizes
from kdist.dtensor.retraced import Retrace
from kdist.runtime.by_shape import ByShape
from kdist.runtime.runner_contract import CompiledState

import tensorflow as tf


class OwnSteps:
    """`train_step`, `test_step` and `predict_step` of a model, as Keras's functions take steps.

    Args:
        parallel: The model's compiled state, of `kdist.api.parallelize`.
        calls: Runs its layers over the mesh.
        applying: Meanwhile, optimizers update its weights over the mesh.
    """

    def __init__(
        self,
        parallel: CompiledState,
        calls: LayerCalls,
        applying: Callable[[], AbstractContextManager],
    ) -> None:
        self.parallel, self.model, self.calls = parallel, parallel.model, calls
        self._applying = applying
        self.program, self.topology = parallel.program, parallel.compute

    def train(self, data: Any, known_size: bool = True) -> Any:
        """The model's `train_step` on a global batch."""
        return self._run(self.model.train_step, data, known_size)

    def test(self, data: Any, known_size: bool = True) -> Any:
        """The model's `test_step` on a global batch."""
        return self._run(self.model.test_step, data, known_size)

    def predict(self, data: Any, known_size: bool = True) -> Any:
        """The model's `predict_step` on a global batch."""
        return self._run(self.model.predict_step, data)

    def by_shape(self, function: Callable) -> ByShape:
        """A function of a batch of this model as graphs by its shape."""
        parts, devices = self.topology.data_size, self.topology.devices
        return ByShape(function, parts, devices, self.parallel.warn_once)

    def _run(self, method: Callable, data: Any, known_size: bool = True) -> Any:
        # Over inner axes a graph has the size of its batch, which one device's may not know.
        losses = [] if known_size else [lambda: keras_known_rows.unweighted_losses(self.model)]
        if self.model.run_eagerly:  # on whole weights, as all steps then
            with self._applying(), keras_remat.taken_back(self.model):
                return method(data)
        return run_over([self.calls], [self._applying, *losses], method, data)


def run_over(
    calls: Sequence[LayerCalls],
    applying: Sequence[Callable[[], AbstractContextManager]],
    step: Callable,
    *data: Any,
) -> Any:
    """Runs a step in a graph, traced again where its calls have to be traced in another way.

    Each trace is a function of its own, so that nothing of one that failed has an effect.

    Args:
        calls: Run layers over their meshes, per model.
        applying: Meanwhile, optimizers update weights over their mesh, per model.
        step: The step.
        *data: What it takes.
    """

    def within(*data: Any) -> Any:
        sizes.note([t for t in tf.nest.flatten(data) if t is not None])
        with contextlib.ExitStack() as stack:
            for one in calls:
                stack.enter_context(one.over_mesh(within.__code__))
            for update in applying:
                stack.enter_context(update())
            stack.enter_context(traced_anew(calls[0].inside))
            stack.enter_context(made_apart())
            stack.enter_context(kept_places())
            result = step(*data)
            for one in calls:
                one.settle()
            return result

    while True:
        try:
            return tf.function(within, autograph=False)(*data)
        except Retrace as reason:
            for one in calls:
                one.trace_anew(reason)
        except EveryGradient:
            for one in calls:
                one.every_gradient = True
        except NotOverMesh as reason:
            reason.note()
        calls[0].inside.clear()

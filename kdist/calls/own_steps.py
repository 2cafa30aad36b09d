"""The steps of a model whose class says itself what a step is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kdist.calls.layer_calls import LayerCalls
from kdist.calls.over_mesh import EveryGradient, TwiceDifferentiated
from kdist.dtensor import sizes
from kdist.dtensor.call import Retrace
from kdist.runtime.by_shape import ByShape

import tensorflow as tf


class OwnSteps:
    """`train_step`, `test_step` and `predict_step` of a model, as Keras's functions take steps.

    Args:
        parallel: The model's compiled state, of `kdist.api.parallelize`.
        calls: Runs its layers over the mesh.
        applying: Meanwhile, optimizers update its weights over the mesh.
    """

    def __init__(
        self, parallel: Any, calls: LayerCalls, applying: Callable[[], AbstractContextManager]
    ) -> None:
        self.parallel, self.model, self.calls = parallel, parallel.model, calls
        self._applying = applying
        self.program, self.topology = parallel.program, parallel.compute

    def train(self, data: Any, known_size: bool = True) -> Any:
        """The model's `train_step` on a global batch."""
        return self._run(self.model.train_step, data)

    def test(self, data: Any, known_size: bool = True) -> Any:
        """The model's `test_step` on a global batch."""
        return self._run(self.model.test_step, data)

    def predict(self, data: Any, known_size: bool = True) -> Any:
        """The model's `predict_step` on a global batch."""
        return self._run(self.model.predict_step, data)

    def by_shape(self, function: Callable) -> ByShape:
        """A function of a batch of this model as graphs by its shape."""
        parts, devices = self.topology.data_size, self.topology.devices
        return ByShape(function, parts, devices, self.parallel.warn_once)

    def _run(self, method: Callable, data: Any) -> Any:
        """Traces a step, again where its calls have to be traced in another way.

        Each trace is a function of its own, so that nothing of one that failed has an effect. Op by
        op a step runs on whole weights, as all do then.
        """

        def step(data: Any) -> Any:
            sizes.note([t for t in tf.nest.flatten(data) if t is not None])
            with self.calls.over_mesh(), self._applying():
                return method(data)

        if self.model.run_eagerly:
            with self._applying():
                return method(data)
        while True:
            try:
                return tf.function(step, autograph=False)(data)
            except Retrace as reason:
                self.calls.trace_anew(reason)
            except EveryGradient:
                self.calls.every_gradient = True
            except TwiceDifferentiated as reason:
                self.calls.set_apart(reason.layer, str(reason))

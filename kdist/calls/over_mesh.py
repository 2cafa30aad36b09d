"""A layer's call over the mesh: forward on every replica, with a gradient that runs there too.

To the `GradientTape` of whoever calls, it is one operation of the layer's weights and arguments.
Rows of the arguments go to the replicas and rows of the outputs come back; in the backward pass
rows of their gradients go, and gradients of the weights come, summed over the replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist._compat.custom_gradients import asked_by_graph
from kdist._compat.function_graphs import in_vectorized_loop
from kdist._compat.pass_through import PassesThrough
from kdist.calls.anchors import stand_in
from kdist.calls.functions import CallFunctions, CallInput
from kdist.calls.tables import CallRows
from kdist.dtensor.sharded import each
from kdist.graphs.instantiation import instantiated_cheaply
from kdist.optimizer.slice_gradients import as_gradient
from kdist.program.batch import SplitBatch, join
from kdist.program.logits import with_logits
from kdist.program.program import attach_masks
from kdist.program.state import combine
from kdist.runtime.metrics import join_masks
from kdist.runtime.runner_contract import layer_weights
from kdist.sharding.owners import UpdateUnit
from kdist.storage.fetched_table import is_fetched
from kdist.storage.sparse import is_sparse

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.calls.layer_calls import LayerCalls


def ranked(tensor: Any, known: Any) -> Any:
    """A tensor with the rank that a layer said, where a function it went through has lost it."""
    if tensor.shape.rank is None and known.shape.rank:
        tensor.set_shape([None, *known.shape[1:]])
    return tensor


class NotOverMesh(PassesThrough):
    """Someone asks of a call what has no way over the mesh.

    Args:
        what: What is asked for.
        call: The call.
    """

    def __init__(self, what: str, call: OverMesh) -> None:
        layer = call.layer
        super().__init__(f"{what}, through layer {layer.path or layer.name!r}")
        self.call = call

    def note(self) -> None:
        """Notes that calls from there are differentiated again."""
        self.call.calls.again.add(self.call.layer, self.call.site, str(self))


class EveryGradient(PassesThrough):
    """Someone asks by `tf.gradients`, which may want those that no tape of the step knows."""


class OverMesh:
    """One call of a layer.

    Args:
        calls: Who calls it; see `kdist.calls.layer_calls`.
        layer: The layer.
        site: From where it is called.
        functions: Per replica; they differ in the number of rows alone.
        given: Per replica, what it takes, but for state.
        batch: How rows are cut.
        rows: What it looks up in tables on the host, or split by hand.
        inside: Whether in a function that a step calls, of which TensorFlow prepares gradients of
            whatever its backward pass looks at.
    """

    def __init__(
        self,
        calls: LayerCalls,
        layer: keras.Layer,
        site: Hashable,
        functions: Sequence[CallFunctions],
        given: Sequence[CallInput],
        batch: SplitBatch,
        rows: CallRows,
        inside: bool,
    ) -> None:
        self.calls, self.site, self._inside, self._looked_up = calls, site, inside, rows
        self.layer, self.functions, self.batch = layer, list(functions), batch
        first = self.functions[0]
        self.program, self.backend = first.program, first.backend
        params = self.program.state.params
        self._params, self._flat = [], []
        for s, one in enumerate(given):
            with tf.device(self._device(s)), rows.taken():
                self._params.append([self._read(params[i], s) for i in first.params])
                state = [self._read(v, s) for v in first.carried]
                self._flat.append(dataclasses.replace(one, state=state).flat())
        self._sources = given[0].sources
        self._some_left_out = self._sources != given[0].differentiated(lambda t: True).sources
        self._asked: set[int] = set()
        self._saved: list[Any] = [None] * len(given)
        self._made: list[Any] = [None] * len(given)

    def _read(self, variable: keras.Variable, s: int) -> Any:
        value = self.backend.read(variable, s)
        return self._without_gradient(value, s) if is_fetched(variable) else value

    def _device(self, s: int) -> str:
        return str(self.backend.devices(s)[0])

    def __call__(self) -> Any:
        """Runs it; returns what the layer returns for the whole batch, and writes its state."""
        weights = [self.program.state.trainable[i] for i in self.functions[0].connected()]
        sources = [flat[i] for flat in self._flat for i in self._sources]
        given = [*map(stand_in, weights), *sources]
        targets = tf.custom_gradient(self._forward)(*given) if given else self._forward()[0]
        targets = iter(keras.tree.flatten(targets))
        alike = len(set(self._reached())) < 2
        for r, one in enumerate(self.functions):
            flat = list(self._made[r])
            for i in self._targets(one):
                flat[i] = next(targets) if alike else self._noting(i, next(targets))
            self._made[r] = one.example.filled(flat)
        self._keep_state()
        self._add_losses()
        return self._joined()

    @staticmethod
    def _targets(functions: CallFunctions) -> list[int]:
        """Positions of the flat results of a function that take a cotangent."""
        count = functions.example.count
        return [i for i in range(count) if functions.vjp.takes_cotangent(i)]

    def _reached(self) -> list[frozenset[int]]:
        """Per weight that gets a gradient, and input of a replica that may, from which results."""
        vjp, count = self.functions[0].vjp, len(self.functions[0].params)
        weights = [one for one, there in zip(vjp.reached, vjp.gradients_exist) if there]
        return [*weights, *(vjp.reached[count + i] for _ in self._flat for i in self._sources)]

    def _noting(self, i: int, result: Any) -> Any:
        """Result `i`, which notes when someone has a gradient of it.

        TensorFlow hands zeros in for those of which nobody has; a weight that leads to these alone
        has no gradient.
        """

        @tf.custom_gradient
        def noting(tensor: Any) -> tuple[Any, Callable]:
            def gradient(cotangent: Any) -> Any:
                self._asked.add(i)
                return cotangent

            return tf.identity(tensor), gradient

        return noting(result)

    def _forward(self, *given: Any) -> tuple[list[Any], Callable]:
        """The forward pass, and what gives its gradient.

        Args:
            *given: Stand-ins of the weights that get a gradient; per replica, the inputs that may.
        """
        first = len(given) - len(self._flat) * len(self._sources)
        inputs, results, whole = iter(given[first:]), [], []
        for s, (one, flat) in enumerate(zip(self.functions, self._flat, strict=True)):
            for i in self._sources:
                flat[i] = next(inputs)
            device = self._device(s)
            with tf.device(device), instantiated_cheaply(self._devices):
                made, saved = one.vjp.forward(self._params[s], self._data(flat, one), s)
                self._saved[s] = [self._without_gradient(t, s) for t in saved]
                results.append(made)
                known = one.example.flat()
                self._made[s] = [ranked(t.whole(device), k) for t, k in zip(made, known)]
            whole += [self._made[s][i] for i in self._targets(one)]

        def gradient(*cotangents: Any) -> list[Any]:
            return self._gradient(results, cotangents, given)

        return whole, gradient

    def _without_gradient(self, tensor: Any, s: int) -> Any:
        """A tensor of slice `s` that nobody looks behind for a gradient."""
        if not self._inside:
            return tensor
        return each(tf.stop_gradient, self.backend.devices(s), tensor)

    @property
    def _devices(self) -> list[str]:
        return [device for s in range(len(self._flat)) for device in self.backend.devices(s)]

    def _data(self, flat: Sequence[Any], functions: CallFunctions) -> list[Any]:
        """The inputs of a replica, where its devices take them."""
        count = len(flat) - len(functions.carried)
        return [*self.backend.data(list(flat[:count])), *flat[count:]]

    def _gradient(
        self, results: Sequence[Any], cotangents: Sequence[Any], given: Sequence[Any]
    ) -> list[Any]:
        """Gradients of `given`; another one of these is refused.

        Raises:
            EveryGradient: It is not known whether all that are wanted are there.
            NotOverMesh: When someone asks for it, or for many at once.
        """
        if self._some_left_out and asked_by_graph():
            raise EveryGradient
        # TensorFlow writes what is done for many again, without what has a gradient of its own: a
        # gradient of that would be another one.
        if in_vectorized_loop():
            raise NotOverMesh("many gradients at once (a jacobian)", self)

        @tf.custom_gradient
        def once(*tensors: Any) -> tuple[list[Any], Callable]:
            def again(*_: Any) -> list[Any]:
                raise NotOverMesh("a gradient of a gradient", self)

            return self._flat_gradient(results, tensors[: len(cotangents)]), again

        asked, self._asked = self._asked, set()
        # Of what is looked up in a result by rows (`tf.gather`) TensorFlow has those rows alone.
        dense = [tf.convert_to_tensor(one) if is_sparse(one) else one for one in cotangents]
        found = self._unflattened(keras.tree.flatten(once(*dense, *given)))
        if not asked:
            return found
        return [g if reached & asked else None for g, reached in zip(found, self._reached())]

    def _flat_gradient(self, results: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The backward pass: gradients as flat tensors, those that exist."""
        there = iter(cotangents)
        gradients: dict[int, dict[int, list[Any]]] = {}
        inward: list[Any] = []
        for s, (one, made) in enumerate(zip(self.functions, results, strict=True)):
            taken: list[Any] = [None] * len(made)
            with tf.device(self._device(s)), instantiated_cheaply(self._devices):
                for i in self._targets(one):
                    taken[i] = self.backend.everywhere(next(there), like=made[i])
                found, into = one.vjp.backward(self._params[s], self._saved[s], taken, s)
                pairs = zip(one.params, found)
                gradients[s] = {v: self._on_devices(v, g) for v, g in pairs if g is not None}
                inward += [self._whole(into[i], s) for i in self._sources]
        self._kinds = [None if g is None else "dense" for g in inward]
        with self._looked_up.taken():
            summed = self._summed(gradients)
        return [*(t for g in summed for t in g), *(g for g in inward if g is not None)]

    def _whole(self, gradient: Any, s: int) -> Any:
        return None if gradient is None else gradient.whole(self._device(s))

    def _on_devices(self, position: int, gradient: Any) -> list[Any]:
        """A gradient on each device of a slice."""
        if not is_sparse(gradient):
            return list(gradient.parts)
        placement = self.backend.entries[position].placement
        pairs = zip(gradient.values.parts, gradient.indices.parts, strict=True)
        return [as_gradient(pair, placement) for pair in pairs]

    def _summed(self, gradients: Mapping[int, Mapping[int, list[Any]]]) -> list[list[Any]]:
        """Per weight that gets one, the tensors of its whole gradient."""
        first = self.functions[0]
        look_ups = {**first.vjp.look_ups(0), **self._looked_up.tables.look_ups}
        source = self.backend.source(gradients, look_ups)
        self._rows: list[tuple[int, ...] | None] = []
        found: list[list[Any]] = []
        for position in first.connected():
            gradient = source.unit(position, UpdateUnit(position, None, (0, 0)))
            rows = is_sparse(gradient)
            shape = self.backend.entries[position].placement.shape
            self._rows.append(tuple(shape) if rows else None)
            # Which rows were looked up is known since the forward pass, in a graph of its own.
            found.append([gradient.values, tf.identity(gradient.indices)] if rows else [gradient])
        return found

    def _unflattened(self, flat: Sequence[Any]) -> list[Any]:
        """Gradients of weights and of inputs, as the tape takes them."""
        tensors, found = iter(flat), []
        for shape in self._rows:
            values = next(tensors)
            if shape is not None:
                indices = tf.identity(next(tensors))
                values = tf.IndexedSlices(values, indices, tf.constant(shape, indices.dtype))
            found.append(values)
        return [*found, *(None if kind is None else next(tensors) for kind in self._kinds)]

    def _keep_state(self) -> None:
        """Writes what the call changed, as one device would have it."""
        first = self.functions[0]
        if first.updated:
            values = [made.updated for made in self._made]
            combine(self.program.state, first.updated, values, self.batch)

    def _add_losses(self) -> None:
        """Gives `add_loss` values, combined over the replicas, to the layers that added them."""
        weights_of = functools.cache(functools.partial(layer_weights, self.batch))
        adders = self.functions[0].adders
        for layer, *values in zip(adders, *(made.added for made in self._made), strict=True):
            mean = self.program.add_loss_mean and layer not in self.functions[0].row_adders
            weights = weights_of(mean)
            total = tf.add_n([v * tf.cast(w, v.dtype) for v, w in zip(values, weights)])
            (layer or self.layer).add_loss(total)

    def _joined(self) -> Any:
        """The layer's outputs for the whole batch, with their masks and logits."""
        marks = [with_logits(made.masks, made.logits) for made in self._made]
        masks = join_masks(marks, self.batch)
        return attach_masks(join([made.outputs for made in self._made], self.batch.counts), masks)

"""Whether the own `call` of a model is the chain of its listed layers, as a pipeline runs them.

Both are traced into one graph, in training and in inference, and compared: the calls of the listed
layers, the operations between them, what is returned, `add_loss`, written state. What a listed
layer does inside is the same in both and is not looked at. Then both compute a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.program.pruning import pruned
from kdist.stages.call_record import CallRecord, LayerCall, flat, record_calls

import keras
import numpy as np
import tensorflow as tf

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far outputs may be apart, relative to the largest."""


def refuse_other_call(
    model: keras.Model, chain: keras.Model, layers: Sequence[keras.Layer], example: Any
) -> None:
    """Refuses a model whose own `call` is not the chain of the listed layers.

    No variable is written. Numbers are compared on a made batch, where the spec of the input
    leaves no dim but the batch open.

    Args:
        model: The model, its weights where Keras made them.
        chain: A `Functional` that calls the layers one after the other.
        layers: The layers of all lists, in order.
        example: Spec of the input.

    Raises:
        ValueError: They differ; the first difference is named.
    """
    for training in (True, False):
        # Keras's trainer asks this of the model, and its layers get what the model got.
        flags = {"training": training} if keras_models.takes_training(model) else {}
        graph, own, listed = _traced(model, chain, layers, example, flags)
        if difference := _Comparison(model, own, listed).difference():
            raise _other_call(model, f"With training={training}, {difference}")
    if None not in example.shape[1:]:
        _refuse_other_numbers(model, graph, example)


def _traced(
    model: keras.Model,
    chain: keras.Model,
    layers: Sequence[keras.Layer],
    example: Any,
    flags: Mapping[str, Any],
) -> tuple[Any, CallRecord, CallRecord]:
    """The graph of the model's own call and the chain's, and what each did."""
    records: list[CallRecord] = []

    def both(x: tf.Tensor) -> Any:
        records.append(record_calls(model, layers, x, flags))
        try:
            records.append(record_calls(chain, layers, x, flags))
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise not_a_chain(model, error) from error
        return [record.outputs for record in records]

    graph = tf.compat.v1.wrap_function(both, [tf.TensorSpec(example.shape, example.dtype)])
    own, listed = records
    return graph, own, listed


def not_a_chain(model: keras.Model, error: Exception) -> ValueError:
    """The error on lists whose layers cannot be called one after the other."""
    return _other_call(model, f"Called so, they fail: {error}")


def _other_call(model: keras.Model, difference: str) -> ValueError:
    return ValueError(
        "Stages given as lists of layers train the listed layers one after the other, so the "
        f"model's own `call` must do just that. {difference}. Put what is between the listed "
        "layers into a layer of its own and list that, or make the model with keras.Model(inputs, "
        f"outputs). Received: model={model.name!r} of type {type(model).__name__}"
    )


class _Comparison:
    """Finds the first difference between a model's own call and the chain.

    Args:
        model: The model.
        own: What its own call did.
        chain: What the chain did.
    """

    def __init__(self, model: keras.Model, own: CallRecord, chain: CallRecord) -> None:
        self.model = model
        self.own = own
        self.chain = chain

    def difference(self) -> str:
        """What differs, in a sentence without its full stop; "" if nothing does."""
        return (
            self._counts() or self._calls() or self._outputs() or self._losses() or self._updates()
        )

    def _counts(self) -> str:
        """A layer that is called more or less often than it is listed."""
        for layer in {id(c.layer): c.layer for c in (*self.chain.calls, *self.own.calls)}.values():
            own, listed = (
                sum(one.layer is layer for one in record.calls) for record in (self.own, self.chain)
            )
            if own != listed:
                return f"it calls layer {layer.name!r} {_times(own)}, the lists {_times(listed)}"
        return ""

    def _calls(self) -> str:
        for number, (own, chain) in enumerate(zip(self.own.calls, self.chain.calls)):
            if own.layer is not chain.layer:
                return (
                    f"it calls layer {own.layer.name!r} where the lists have layer "
                    f"{chain.layer.name!r}, as number {number}"
                )
            if difference := self._arguments(own, chain):
                return difference
        return ""

    def _arguments(self, own: LayerCall, chain: LayerCall) -> str:
        for path in dict.fromkeys((*own.arguments, *chain.arguments)):
            a, b = own.arguments.get(path), chain.arguments.get(path)
            if difference := self._values(a, b):
                return f"it gives layer {own.layer.name!r} as {path!r} {difference}"
        return ""

    def _outputs(self) -> str:
        own, chain = flat(self.own.outputs), flat(self.chain.outputs)
        if list(own) != list(chain):
            return (
                f"it returns {len(own)} tensors as {type(self.own.outputs).__name__}, the last "
                f"layer {len(chain)} as {type(self.chain.outputs).__name__}"
            )
        for a, b in zip(own.values(), chain.values()):
            if difference := self._values(a, b):
                return f"it returns {difference}"
        for a, b in zip(self.own.masks, self.chain.masks):
            if difference := self._values(a, b):
                return f"it returns as mask {difference}"
        return ""

    def _losses(self) -> str:
        own, chain = self.own.losses, self.chain.losses
        if len(own) != len(chain):
            return (
                f"it collects {_count(own)} from add_loss and activity regularizers, the listed "
                f"layers {_count(chain)}"
            )
        for a, b in zip(own, chain):
            if difference := self._values(a, b):
                return f"it gives add_loss {difference}"
        return ""

    def _updates(self) -> str:
        paths = {id(v): v.path for v in self.model.variables}
        for key in dict.fromkeys((*self.own.updates, *self.chain.updates)):
            a, b = self.own.updates.get(key), self.chain.updates.get(key)
            if difference := self._values(a, b):
                path = paths.get(key, "of no layer of the model")
                return f"it assigns variable {path!r} {difference}"
        return ""

    def _values(self, own: Any, chain: Any) -> str:
        """How a value of the own call differs from the chain's: "x, the chain y", or ""."""
        if tf.is_tensor(own) and tf.is_tensor(chain):
            pair = self._first_different(own, chain)
        else:
            pair = None if _alike(own, chain) else (own, chain)
        if pair is None:
            return ""
        return f"{_described(pair[0], self.own)}, the chain {_described(pair[1], self.chain)}"

    def _first_different(self, own: Any, chain: Any) -> tuple[Any, Any] | None:
        """Walks both graphs back from a tensor in step, to inputs and outputs of listed layers."""
        waiting, seen = [(own, chain)], set()
        while waiting:
            a, b = (_named(t, r) for t, r in zip(waiting.pop(), (self.own, self.chain)))
            if (id(a), id(b)) in seen or a is b:
                continue
            seen.add((id(a), id(b)))
            marks = self.own.mark_of(a), self.chain.mark_of(b)
            if marks[0] != marks[1]:
                return a, b
            if marks[0] is not None:
                continue
            if not _same_operation(a, b):
                return None if _alike(a, b) else (a, b)
            waiting.extend(zip(a.op.inputs, b.op.inputs))
        return None


def _named(tensor: Any, record: CallRecord) -> Any:
    """The tensor itself, or what it is a mere copy of."""
    while record.mark_of(tensor) is None and tf.is_symbolic_tensor(tensor):
        if tensor.op.type != "Identity":
            break
        tensor = tensor.op.inputs[0]
    return tensor


def _same_operation(a: Any, b: Any) -> bool:
    if not (tf.is_symbolic_tensor(a) and tf.is_symbolic_tensor(b)):
        return False
    if a.value_index != b.value_index:
        return False
    first, second = a.op.node_def, b.op.node_def
    if first.op != second.op or len(a.op.inputs) != len(b.op.inputs):
        return False
    names = {name for name in (*first.attr, *second.attr) if not name.startswith("_")}
    return all(first.attr[name] == second.attr[name] for name in names)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values that need not be tensors of a graph are equal."""
    if a is b or tf.is_symbolic_tensor(a) or tf.is_symbolic_tensor(b):
        return a is b
    try:
        return bool(np.array_equal(a, b))
    except (TypeError, ValueError):
        return False


def _described(value: Any, record: CallRecord) -> str:
    """A value in words: where in the model it comes from."""
    if not tf.is_tensor(value):
        return repr(value)
    mark, note = record.mark_of(value), ""
    while mark is None and tf.is_symbolic_tensor(value):
        if value.op.type not in ("Identity", "Cast"):
            return f"the result of operation {value.op.type} ({value.op.name!r})"
        if value.op.type == "Cast" and not note:
            note = f", cast to {value.dtype.name}"
        value = value.op.inputs[0]
        mark = record.mark_of(value)
    if mark is None:
        return "a constant"
    if mark[0] == "input":
        return f"the model's input{note}"
    what = {"output": "output", "loss": "loss", "state": "new state"}[mark[0]]
    return f"the {what} of layer {record.calls[mark[1]].layer.name!r}{note}"


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _count(losses: Sequence[Any]) -> str:
    return "1 loss" if len(losses) == 1 else f"{len(losses)} losses"


def _refuse_other_numbers(model: keras.Model, graph: Any, example: Any) -> None:
    """Compares what both return, in inference, on a made batch."""
    # Only what leads to the outputs: no assignment, no print.
    outputs = pruned(graph, graph.inputs[:1], graph.outputs)(made_batch(example))
    half = len(outputs) // 2
    for own, chain in zip(outputs[:half], outputs[half:]):
        if not own.dtype.is_floating:
            continue
        own, chain, dtype = own.numpy(), chain.numpy(), own.dtype.name
        own, chain = own.astype("float64"), chain.astype("float64")
        scale = np.max(np.abs(own), initial=0.0, where=np.isfinite(own))
        limit = TOLERANCES.get(dtype, 0.0) * scale
        if not np.allclose(own, chain, rtol=0, atol=limit, equal_nan=True):
            error = np.nanmax(np.abs(own - chain))
            raise _other_call(
                model,
                f"On a batch of {example.shape[1:]} its outputs are up to {scale:.6g} in size and "
                f"up to {error:.6g} from those of the chain ({dtype}; {limit:.3g} is allowed)",
            )


def made_batch(example: Any) -> tf.Tensor:
    """A batch like a spec: numbers between 0.1 and 1, integers 0 and 1, True and False.

    It has the spec's number of rows, or two.
    """
    shape = (example.shape[0] or 2, *example.shape[1:])
    dtype = tf.as_dtype(example.dtype)
    values = np.random.default_rng(0).uniform(size=shape)
    if dtype == tf.string:
        return tf.constant(np.full(shape, "a"))
    if dtype.is_integer or dtype.is_bool:
        return tf.cast(values > 0.5, dtype)
    return tf.cast(0.1 + 0.9 * values, dtype)

"""Where a Keras variable's bytes live: per-device local variables behind one logical variable.

The logical variable stays the object that the model holds. Outside a step it reads as its whole
value, assembled from the shards at that moment, and an assignment reaches every copy: so
`get_weights`, `save`, `model(x)` in the user's own `tf.function` and callbacks see and write the
truth. Nothing is patched in Keras: the one instance gets a subclass of its own class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist._compat.every_copy import for_all
from kdist._compat.keras_births import raw_dtype
from kdist._compat.keras_trainer import KEY
from kdist._compat.variable_internals import give_key, key_of
from kdist.sharding.device import Device
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate, Index, Placement, covers
from kdist.storage.parts import assemble
from kdist.storage.recipes import Existing, is_mapped
from kdist.storage.retired import forget_readers, moved, retire
from kdist.storage.view_class import ATTRIBUTE, view_class

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Part:
    """A variable that holds a part of a logical variable, or a copy of it.

    Attributes:
        device: Where it is; None where nothing says.
        index: Which part; None for all.
        target: Has `value` and `assign`.
    """

    device: str | None
    index: Index | None
    target: Any


class Stored:
    """The local copies and shards behind one logical variable.

    Attributes:
        variable: The logical variable.
        placement: Its cut.
        unborn: What it begins with, until its parts are made; see `kdist.storage.unborn`.
        settled: Whether it stays where it is, as far as is known: the model is compiled.
        placed_for: Gives what decides where it is, if that lives; see `PlacedModel`.
        masters: Whole copies kept by optimizers that must see the whole tensor.
        updaters: Weak references to what has updated it; see `Jobs.take`.
        anchor: What tapes know it by, if it is whole nowhere and tapes have to; see
            `kdist.calls.anchors`.
    """

    def __init__(self, variable: keras.Variable, placement: Placement, topology: Topology) -> None:
        self.variable = variable
        self.placement = placement
        self.topology = topology
        self.masters: list[tuple[str, keras.Variable]] = []
        self.updaters: list[Any] = []
        self.anchor: tf.Variable | None = None
        self.unborn: Any = unborn(variable)
        self.settled = False
        self.placed_for: Callable[[], Any] = lambda: None
        self._locals: dict[Coordinate, keras.Variable] = {}
        if self.unborn is None:
            self._make_locals()

    @property
    def locals(self) -> dict[Coordinate, keras.Variable]:
        """Local Keras variable per (slice, inner) coordinate; made on first use, if need be."""
        if self.unborn is not None:
            with keras_trainer.at_once():
                self._bear()
        return self._locals

    def _bear(self) -> None:
        """Makes the parts of what the variable begins with, chunk by chunk."""
        assert self.unborn is not None
        by_part = self._by_part()
        with tf.device("/device:CPU:0"):
            made = self.unborn.parts([index for index, _ in by_part])
            for (_, holders), part in zip(by_part, made):
                for at in holders:
                    with tf.device(self.device(at)):
                        self._locals[at] = make_local(self.variable, tf.identity(part))
        self.unborn = None
        if len(self._locals) == 1 and self.placement.is_whole:
            become_view(self.variable, self, next(iter(self._locals.values())))
        self.share_key()

    def share_key(self) -> None:
        """Gives a local that is the whole value the key that optimizers know the variable by.

        It is what reading the variable gives, and has to have that key before an optimizer of its
        own is built, whoever reads first.
        """
        shards = self.placement.shards
        there = [s for s in shards if math.prod(s.shape)] or shards[:1]
        if self.unborn is None and len(there) == 1:
            whole = keras_trainer.tf_variable(self._locals[there[0].holders[0]])
            give_key(whole, self.variable.__dict__[KEY])

    def _by_part(self) -> list[tuple[Index, list[Coordinate]]]:
        """The different parts, each with the coordinates that hold it."""
        boxes: dict[str, tuple[Index, list[Coordinate]]] = {}
        for at in self._coordinates:
            index = self.placement.shard_at(at).index
            boxes.setdefault(repr(index), (index, []))[1].append(at)
        return list(boxes.values())

    @property
    def _coordinates(self) -> list[Coordinate]:
        return sorted(at for shard in self.placement.shards for at in shard.holders)

    def _make_locals(self) -> None:
        variable = self.variable
        original = keras_trainer.tf_variable(variable)
        moved(original)
        whole = tf.convert_to_tensor(original)
        for at in self._coordinates:
            self._locals[at] = self._make_local(original, whole, at, self.device(at))
        if all(keras_trainer.tf_variable(one) is not original for one in self._locals.values()):
            retire(original)

    def _make_local(
        self, original: tf.Variable, whole: tf.Tensor, at: Coordinate, device: str
    ) -> keras.Variable:
        shard = self.placement.shard_at(at)
        with tf.device(device):
            if covers(shard.index, self.placement.shape):
                reuse = type(original).__name__ == "ResourceVariable" and same_device(
                    original.device, device
                )
                value = original if reuse else tf.identity(whole)
            else:
                value = tf.identity(whole[shard.index])
            return make_local(self.variable, value)

    def device(self, at: Coordinate) -> str:
        """The TensorFlow device of a coordinate."""
        return self.topology.device(at)

    def whole(self) -> Any:
        """The whole value, assembled from one copy of each shard."""
        shards = self.placement.shards
        found = assemble([(s.index, self.locals[s.holders[0]].value) for s in shards])
        if isinstance(found, tf.Variable) and len(self._locals) + len(self.masters) > 1:
            copies = [(str(p.device), keras_trainer.tf_variable(p.target)) for p in self._whole]
            return for_all(found, copies)
        return found

    @property
    def _whole(self) -> list[Part]:
        """The copies of the whole value."""
        return [
            p
            for p in self.stored_parts()
            if p.index is None or covers(p.index, self.variable.shape)
        ]

    def used_at(self, at: Coordinate) -> Any:
        """What compute sees at a coordinate: its shard, made whole over the data axis."""
        placement = self.placement
        if placement.data_dim is None:
            source = placement.source(at)
            value = tf.convert_to_tensor(self.locals[source].value)
            return value if source == at else tf.identity(value)
        parts = {}
        for s in placement.home:
            shard = placement.shard_at((s, at[1]))
            parts[placement.table[s][at[1]]] = (shard.index, self.locals[s, at[1]].value)
        return assemble(list(parts.values()))

    def whole_at(self, s: int) -> Any:
        """The whole value, gathered from slice `s` (and, if sliced over data, its peers)."""
        parts: dict[tuple, tuple[Index, Any]] = {}
        for k in range(self.topology.inner_size):
            index = self.placement.inner_index(k)
            key = tuple(i.start for i in index)
            if key not in parts:
                parts[key] = (index, self.used_at((s, k)))
        return assemble(list(parts.values()))

    def assign(self, value: Any) -> None:
        """Writes the whole value to every copy of every shard; each device gets its part of it.

        What is mapped from a file, and comes before there are parts, is read once there are. An
        array waits until it is known how the optimizer's level cuts it.
        """
        if self.unborn is not None and tf.executing_eagerly():
            self.unborn.assign(np.asanyarray(value))
            if self.settled and not is_mapped(value):
                self._bear()
            return
        if isinstance(value, np.ndarray):
            self._assign_parts(Existing.of(value))
            return
        # Of a layer that computes in 16 bits the variable says that it has 16.
        value = tf.cast(value, raw_dtype(self.variable))
        for at, local in self.locals.items():
            index = self.placement.shard_at(at).index
            part = value if covers(index, self.placement.shape) else value[index]
            with tf.device(self.device(at)):
                local.assign(part)
        for device, local in self.masters:
            with tf.device(device):
                local.assign(value)

    def _assign_parts(self, values: Existing) -> None:
        """Writes values part by part: no more than one is in host memory beside the variables."""
        for index, holders in self._by_part():
            with tf.device("/device:CPU:0"):
                part = values.part(index, raw_dtype(self.variable))
            for at in holders:
                with tf.device(self.device(at)):
                    self.locals[at].assign(tf.identity(part))
        for device, local in self.masters:
            whole = tuple(slice(0, n) for n in self.placement.shape)
            with tf.device(device):
                local.assign(values.part(whole, raw_dtype(self.variable)))

    def stored_parts(self) -> list[Part]:
        """See `parts_of`."""
        shard, own = self.placement.shard_at, self.locals.items()
        found = [Part(self.device(at), shard(at).index, local) for at, local in own]
        return found + [Part(device, None, local) for device, local in self.masters]


def make_local(variable: keras.Variable, value: Any) -> keras.Variable:
    """A local Keras variable on the device in scope, known by its logical variable's path."""
    local = keras.Variable(
        value,
        # Made on first use, which may be a layer's that computes in 16 bits.
        dtype=keras.backend.standardize_dtype(raw_dtype(variable)),
        trainable=variable.trainable,
        # What is read is what is kept; views cast it, if their layer asks for that.
        autocast=False,
        name=variable.name,
    )
    keras_trainer.rename(local, variable)
    if variable.overwrite_with_gradient:
        local.overwrite_with_gradient = True
    return local


def same_device(a: str, b: str) -> bool:
    """True when two device strings name the same device."""
    return Device.parse(a) == Device.parse(b)


def backing_of(variable: keras.Variable) -> Any:
    """What a view reads from and writes to, None for a variable that is not a view."""
    return variable.__dict__.get(ATTRIBUTE)


def stored(variable: keras.Variable) -> Stored | None:
    """The local copies of a variable, or None if kdist has not taken it over."""
    backing = backing_of(variable)
    return None if backing is unborn(variable) else backing


def unborn(variable: keras.Variable) -> Any:
    """The `kdist.storage.unborn.Unborn` that a variable begins with; None once it has values."""
    return getattr(backing_of(variable), "unborn", None)


def parts_of(variable: Any) -> list[Part]:
    """What is behind a variable: local variables that tile it and copies of them, or itself."""
    find = getattr(getattr(variable, "__dict__", {}).get(ATTRIBUTE), "stored_parts", None)
    return [Part(None, None, variable)] if find is None else find()


def distribute(
    variable: keras.Variable,
    placement: Placement,
    topology: Topology,
    kind: type[Stored] = Stored,
) -> Stored:
    """Takes a variable over: makes its local copies and turns it into their whole view.

    Args:
        variable: A built Keras variable.
        placement: Where its parts go.
        topology: The mesh.
        kind: What is behind the variable.

    Returns:
        The local copies.
    """
    entry = kind(variable, placement, topology)
    # With copies, a tf.Variable to write to would be one of them: then there is only the value.
    only = None
    if entry.unborn is None and len(entry.locals) == 1:
        only = next(iter(entry.locals.values()))
    become_view(variable, entry, only if placement.is_whole else None)
    entry.share_key()
    return entry


def become_view(variable: keras.Variable, backing: Any, whole: keras.Variable | None) -> None:
    """Makes a variable read from, and write to, `backing`.

    Args:
        variable: The logical variable; may be a view already.
        backing: Has `whole()` and `assign(value)`.
        whole: A local variable that holds the whole value, to be read directly, or None.
    """
    attributes = variable.__dict__
    key = attributes.get(KEY) or key_of(keras_trainer.tf_variable(variable))
    tensor = None
    if whole is not None:
        tensor = keras_trainer.tf_variable(whole)
        give_key(tensor, key)
    keras_trainer.set_tf_variable(variable, tensor)
    if ATTRIBUTE not in attributes:
        base: Any = type(variable)
        variable.__class__ = view_class(base)
    object.__setattr__(variable, ATTRIBUTE, backing)
    object.__setattr__(variable, KEY, key)


def release(variable: keras.Variable) -> None:
    """Turns a variable taken over by kdist back into a plain one with its present value."""
    make_plain(variable, variable.__dict__[ATTRIBUTE].whole())


def make_plain(variable: keras.Variable, value: Any) -> None:
    """Turns a view into a plain variable with a value."""
    variable.__dict__.pop(ATTRIBUTE)
    whole = tf.Variable(value, trainable=variable.trainable, name=variable.name)
    give_key(whole, variable.__dict__.pop(KEY))
    keras_trainer.set_tf_variable(variable, whole)
    variable.__class__ = type(variable).__mro__[1]


def replace(entry: Stored, placement: Placement) -> Stored:
    """Moves a variable to another placement on the same mesh; returns what is behind it now."""
    if entry.placement == placement:
        return entry
    before = [] if entry.unborn is not None else list(entry.locals.values())
    if before:
        release(entry.variable)
    found = distribute(entry.variable, placement, entry.topology, type(entry))
    for local in before:
        moved(keras_trainer.tf_variable(local))
        retire(keras_trainer.tf_variable(local))
    return found


@contextlib.contextmanager
def materialised(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Meanwhile, gives each logical variable a plain `tf.Variable` with its whole value.

    For code that must see real variables, such as SavedModel export. Writes are not kept.
    """
    backings = [(v, v.__dict__[ATTRIBUTE], keras_trainer.tf_variable(v)) for v in variables]
    for variable, _, _ in backings:
        release(variable)
    try:
        yield
    finally:
        for variable, backing, tensor in backings:
            moved(meanwhile := keras_trainer.tf_variable(variable))
            become_view(variable, backing, None)
            object.__setattr__(variable, KEY, key_of(meanwhile))
            keras_trainer.set_tf_variable(variable, tensor)
        forget_readers()

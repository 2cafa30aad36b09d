"""Pure functions traced over flat lists of tensors, so that their programs can be cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of what a function returns.

    Attributes:
        spec: Of the leaf; None stands for None.
        numbers: Of the flat results that it consists of.
    """

    spec: Any
    numbers: tuple[int, ...]

    def value(self, results: Mapping[int, Any]) -> Any:
        """The leaf, put together from flat results."""
        if self.spec is None:
            return None
        parts = [results[i] for i in self.numbers]
        return tf.nest.pack_sequence_as(self.spec, parts, expand_composites=True)


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A trace of a function.

    Attributes:
        concrete: The concrete function; its inputs and results are flat.
        structure: What the function returns, with a `Leaf` in place of each leaf.
    """

    concrete: Any
    structure: Any


class FlatFunction:
    """A pure function over structures, traced once per structure and shapes of its inputs.

    Args:
        function: The function; arguments that are no tensors are part of the structure.
        seeds: How many of its last arguments everything in its backward pass depends on.
        apart: Whether these are known only after the forward pass.
    """

    def __init__(self, function: Callable, seeds: int = 0, *, apart: bool = False) -> None:
        self.function, self.seeds, self.apart = function, seeds, apart
        self._functions: dict[str, Any] = {}

    def trace(self, arguments: Sequence[Any]) -> TracedFunction:
        """The trace for some calls, whose sizes may differ.

        Args:
            arguments: Of each call, tensors or specs; of one structure.
        """
        like = tf.nest.map_structure(_like, *arguments)
        key = repr(tf.nest.map_structure(_kind, like))
        if key not in self._functions:
            self._functions[key] = self._traceable(like)
        specs = [_general(tensors) for tensors in zip(*map(flat, arguments), strict=True)]
        concrete = self._functions[key].get_concrete_function(*specs)
        return TracedFunction(concrete, _leaves(concrete.structured_outputs))

    def _traceable(self, like: Any) -> Any:
        def call(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = tf.nest.flatten(like, expand_composites=True)
            filled = [leaf if _is_constant(leaf) else next(given) for leaf in leaves]
            return self.function(*tf.nest.pack_sequence_as(like, filled, expand_composites=True))

        return tf.function(call, autograph=False, reduce_retracing=True)


def flat(arguments: Any) -> list[Any]:
    """The tensors of a structure; composite ones are taken apart, other leaves left out."""
    leaves = tf.nest.flatten(arguments, expand_composites=True)
    return [leaf for leaf in leaves if not _is_constant(leaf)]


def _is_constant(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool)


def _like(*leaves: Any) -> Any:
    """Spec of what has the place of some leaves; a constant as it is."""
    if _is_constant(leaves[0]):
        return leaves[0]
    specs = [t if isinstance(t, tf.TypeSpec) else tf.type_spec_from_value(t) for t in leaves]
    return specs[0].most_specific_common_supertype(specs[1:])


def _kind(like: Any) -> str:
    """What traces differ in; a composite tensor that is put together has the shape of its spec."""
    return "." if isinstance(like, tf.TensorSpec) else repr(like)


def _general(tensors: Sequence[Any]) -> tf.TensorSpec:
    """What is like all of some tensors."""
    shape = tf.TensorShape(tensors[0].shape)  # of an array it is a tuple
    for tensor in tensors[1:]:
        shape = shape.most_specific_compatible_shape(tensor.shape)
    return tf.TensorSpec(shape, tensors[0].dtype)


def _leaves(structure: Any) -> Any:
    count = 0

    def leaf(spec: Any) -> Leaf:
        nonlocal count
        parts = [] if spec is None else tf.nest.flatten(spec, expand_composites=True)
        numbers = tuple(range(count, count + len(parts)))
        count += len(parts)
        return Leaf(spec, numbers)

    return tf.nest.map_structure(leaf, structure)

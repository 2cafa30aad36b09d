"""Tests leave no models behind in memory."""

import gc
import weakref
from typing import Any

import tensorflow as tf

from .. import kept_memory


@tf.custom_gradient
def doubled(x: Any) -> Any:
    return 2 * x, lambda upstream: 2 * upstream


def traced() -> weakref.ref:
    """The graph of a function that nobody has any more."""
    return weakref.ref(tf.function(doubled).get_concrete_function(tf.constant(1.0)).graph)


def test_a_graph_whose_gradients_are_forgotten_is_gone() -> None:
    before = kept_memory.registered()
    graph = traced()
    gc.collect()
    new = kept_memory.registered() - before
    assert len(new) == 1 and graph() is not None, "without this `forget` has no use any more"
    kept_memory.forget(new)
    gc.collect()
    assert kept_memory.registered() == before and graph() is None

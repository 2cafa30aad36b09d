"""Names that tell, in a traced program, which block of layers a node serves.

For the time of one trace, `call` of each layer in which a block begins (on the instance) opens a
name scope of its own; so does that of a layer that a block leaves out. What `keras.RematScope`
noted is taken back: here it declares blocks (`kdist.config.recompute`). Nothing else changes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat import keras_remat
from kdist.config.recompute import Blocks

import tensorflow as tf

SCOPE = "kdist_block_"
_NUMBER = re.compile(rf"{SCOPE}(\d+|none)")


def block_of(node: str) -> int | None:
    """The block that a node of a traced or lowered program serves, read from its name."""
    found = _NUMBER.findall(node)
    return int(found[-1]) if found and found[-1] != "none" else None


@contextlib.contextmanager
def named(blocks: Blocks) -> Iterator[None]:
    """Names what layers compute within the block of code by the block of layers."""
    before = [(layer, layer.__dict__.get("call")) for layer, _ in blocks.layers]
    for layer, number in blocks.layers:
        scope = f"{SCOPE}{'none' if number is None else number}"
        object.__setattr__(layer, "call", _scoped(layer.call, scope))
    try:
        with keras_remat.without_remat(blocks.scoped):
            yield
    finally:
        for layer, call in before:
            layer.__dict__.pop("call", None)
            if call is not None:
                object.__setattr__(layer, "call", call)


def _scoped(call: Callable, scope: str) -> Callable:
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with tf.name_scope(scope):
            return call(*args, **kwargs)

    return scoped

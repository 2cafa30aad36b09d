"""Names that tell, in a traced program, which block of layers a node serves.

For the time of one trace, `call` of each layer in which a block begins (on the instance) opens a
name scope of its own; so does that of a layer that a block leaves out. What `keras.RematScope`
noted is taken back, and what `keras.remat` made of a function runs as that function: here both
declare blocks (`kdist.config.recompute_blocks`). Functions with a gradient of their own get the
weights that they read as arguments. Nothing else changes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kdist._compat import keras_models, keras_remat
from kdist.config.recompute_blocks import Blocks
from kdist.program.own_gradients import weights_as_arguments

import tensorflow as tf

SCOPE = "kdist_block_"
WRAPPING = "kdist_remat_"
"""Before the number of the block that functions are which a layer wraps in `keras.remat`."""
_SEGMENT = re.compile(rf"{SCOPE}(?:none|(\d+)_call_(\d+))")


class Segment(NamedTuple):
    """What runs again as one: a block, and which call of its layers this is, from 0 on.

    What one call hands to the next is kept, as between two blocks. Without that, all calls of a
    shared layer would be there again at once.
    """

    block: int
    call: int


def segment_of(node: str) -> Segment | None:
    """What a node of a traced or lowered program is part of, read from its name."""
    found = _SEGMENT.findall(node)
    return Segment(*map(int, found[-1])) if found and found[-1][0] else None


def block_of(node: str) -> int | None:
    """The block of a node's segment."""
    segment = segment_of(node)
    return None if segment is None else segment.block


@contextlib.contextmanager
def named(blocks: Blocks | None) -> Iterator[None]:
    """Names what layers compute within the block of code by the block of layers."""
    if blocks is None:
        with weights_as_arguments():
            yield
        return
    scopes = [
        (layer, f"{SCOPE}none" if number is None else f"{kind}{number}")
        for kind, layers in ((SCOPE, blocks.layers), (WRAPPING, blocks.wrapping))
        for layer, number in layers
    ]
    within: list[str] = []
    calls = itertools.count()
    with keras_models.calls_kept([layer for layer, _ in scopes]):
        for layer, scope in scopes:
            call = keras_models.call_of(layer)
            keras_models.give_call(layer, _scoped(call, scope, within))
        with (
            keras_remat.without_remat(blocks.scoped),
            keras_remat.wrapped_run_by(lambda call: _wrapped(call, within, calls)),
            weights_as_arguments(),
        ):
            yield


def _scoped(
    call: Callable, scope: str, within: list[str], calls: Iterator[int] | None = None
) -> Callable:
    """Calls in name scopes of their own; `within` has the scope as its last one meanwhile."""
    calls = itertools.count() if calls is None else calls

    def scoped(*args: Any, **kwargs: Any) -> Any:
        within.append(scope)
        try:
            with tf.name_scope(f"{scope}_call_{next(calls)}"):
                return call(*args, **kwargs)
        finally:
            within.pop()

    return scoped


def _wrapped(call: Callable, within: list[str], calls: Iterator[int]) -> Callable:
    """What `keras.remat` made a function of, as a segment of its own or part of one around it.

    Raises:
        ValueError: No layer is known to call it.
    """
    if not within:
        raise ValueError(
            "keras.remat is taken to kdist's recompute where a layer that calls the result has it "
            "as an attribute, in lists, dicts and objects too, or whose methods lead to it by "
            "functions and classes, global or closed over. Wrap it there, or declare the layer "
            "with kdist.recompute(layer) instead. "
            f"Received: {keras_remat.described(call)}, wrapped elsewhere"
        )
    number = within[-1].removeprefix(WRAPPING)
    return call if number == within[-1] else _scoped(call, f"{SCOPE}{number}", within, calls)

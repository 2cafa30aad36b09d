"""Whether a model in float64 rounds to fewer bits inside, as norms with a fixed float32 do."""

from __future__ import annotations

from typing import Any

from kdist.verification.observe import call_for_training

import keras
import tensorflow as tf

FEWER_BITS = (tf.float32, tf.float16, tf.bfloat16)


def rounds_inside(model: keras.Model, x: Any) -> str | None:
    """What a float64 model keeps, or first makes of float64 values, in float32 or smaller.

    Args:
        model: A plain model in float64.
        x: Its inputs.

    Returns:
        The path of a variable (of LoRA, for one), or the name of an operation, which holds the
        layer's; None if there is none.
    """
    if kept := [v.path for v in model.trainable_variables if tf.as_dtype(v.dtype) in FEWER_BITS]:
        return kept[0]
    spec = keras.tree.map_structure(tf.type_spec_from_value, x)
    traced = tf.function(lambda x: call_for_training(model, x), autograph=False)
    graph = traced.get_concrete_function(spec).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    for node in nodes:
        if node.op != "Cast" or node.attr["SrcT"].type != tf.float64.as_datatype_enum:
            continue
        if tf.as_dtype(node.attr["DstT"].type) in FEWER_BITS:
            return node.name
    return None

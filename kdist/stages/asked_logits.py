"""Which tensors between stages take along the logits that they were made of.

A loss wants the logits of a model's outputs. Hidden layers that end in a sigmoid or a softmax have
logits too, and a stage that sent these would send twice what it has to: of what Keras's own layers
take, nobody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.stages.model_graph import ModelGraph

from keras import activations, layers

_DIMS = ("1D", "2D", "3D")
_BY_DIMS = (
    "Conv*",
    "Conv*Transpose",
    "MaxPooling*",
    "AveragePooling*",
    "GlobalMaxPooling*",
    "GlobalAveragePooling*",
    "UpSampling*",
    "ZeroPadding*",
    "Cropping*",
)
ASKS_NOT = frozenset(
    {
        *(getattr(layers, name.replace("*", dims)) for name in _BY_DIMS for dims in _DIMS),
        *(layers.DepthwiseConv1D, layers.DepthwiseConv2D),
        *(layers.SeparableConv1D, layers.SeparableConv2D),
        *(layers.Dense, layers.EinsumDense, layers.Embedding),
        *(layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Dot),
        *(layers.Maximum, layers.Minimum, layers.Concatenate),
        *(layers.BatchNormalization, layers.LayerNormalization, layers.GroupNormalization),
        *(layers.RMSNormalization, layers.UnitNormalization),
        *(layers.SimpleRNN, layers.GRU, layers.LSTM),
        *(layers.Attention, layers.AdditiveAttention),
        *(layers.MultiHeadAttention, layers.GroupQueryAttention),
        *(layers.Flatten, layers.Reshape, layers.Permute, layers.RepeatVector),
        *(layers.ReLU, layers.LeakyReLU, layers.ELU, layers.PReLU, layers.Softmax),
    }
)
"""Layers that never look for the logits of what they take, nor hand their input on itself. Of
these classes alone: what inherits from one may do anything."""
HANDS_ON = frozenset(
    {
        *(layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D),
        *(layers.SpatialDropout3D, layers.GaussianDropout, layers.GaussianNoise),
        *(layers.AlphaDropout, layers.Identity, layers.Activation, layers.ActivityRegularization),
    }
)
"""Layers that do not look for them either, and may return what they take."""


def asked_logits(
    described: ModelGraph, stages: Sequence[Sequence[str]], virtual: int
) -> frozenset[str]:
    """The tensors whose logits a loss, or a layer, of later stages may ask for.

    Args:
        described: The model's graph.
        stages: Node names of each virtual stage.
        virtual: The virtual stage that sends.
    """
    later = {name for names in stages[virtual + 1 :] for name in names}
    asked = set(described.graph.outputs)
    for node in reversed(described.graph.nodes):
        kind = type(described.sources[node.name].node.operation)
        handed = kind in HANDS_ON and not asked.isdisjoint(node.outputs)
        if node.name in later and (handed or kind not in ASKS_NOT | HANDS_ON):
            asked |= set(node.inputs)
    return frozenset(asked)


def makes_logits(operation: Any) -> bool:
    """Whether it is known of a layer or an operation of Keras that what it makes has logits."""
    kind = type(operation)
    if kind.__module__.startswith("keras.") and kind.__name__ in ("Softmax", "Sigmoid"):
        return True
    known = kind in ASKS_NOT or kind is layers.Activation
    ends = (activations.softmax, activations.sigmoid)
    return known and getattr(operation, "activation", None) in ends

"""A small GPT in plain Keras, and where its weights go on a mesh.

The model holds no parallel code: `layout_map` beside it says, weight by weight, which tensor dim is
cut over the mesh axis `model`. It follows Megatron-LM (Shoeybi et al., 2019): attention is cut by
heads, the feed-forward layer by hidden units, and each of the two needs one sum over the axis, at
its end.
"""

import dataclasses

import keras
from keras import layers, ops


@dataclasses.dataclass(frozen=True)
class GPTSizes:
    """The sizes of a GPT.

    Attributes:
        vocabulary: number of different tokens.
        length: tokens in a sequence.
        width: features of a token.
        depth: number of blocks.
        heads: attention heads; divides `width`.
    """

    vocabulary: int = 256
    length: int = 64
    width: int = 128
    depth: int = 2
    heads: int = 4


class Positions(layers.Layer):
    """Adds a learned vector to every position of `(batch, length, width)`."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the table, of shape `(length, width)`."""
        self.table = self.add_weight(
            shape=input_shape[1:], initializer="random_normal", name="table"
        )

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Returns `x` plus the table."""
        return x + ops.cast(self.table, x.dtype)


def build(sizes: GPTSizes, dtype: str = "float32", name: str = "gpt") -> keras.Model:
    """Builds the model.

    Args:
        sizes: the sizes.
        dtype: a Keras dtype policy, such as `"float32"` or `"mixed_bfloat16"`.
        name: the model's name.

    Returns:
        A functional model from int32 tokens `(batch, length)` to logits
        `(batch, length, vocabulary)`.
    """
    if sizes.width % sizes.heads:
        raise ValueError(f"The heads must divide the width. Received: {sizes}")
    tokens = keras.Input((sizes.length,), dtype="int32", name="tokens")
    x = layers.Embedding(sizes.vocabulary, sizes.width, dtype=dtype, name="embedding")(tokens)
    x = Positions(dtype=dtype, name="positions")(x)
    for index in range(sizes.depth):
        x = _block(x, sizes, dtype, f"block_{index}")
    x = layers.LayerNormalization(dtype=dtype, name="final_norm")(x)
    logits = layers.Dense(sizes.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
    # The loss wants float32 logits whatever the policy computes in.
    logits = layers.Activation("linear", dtype="float32", name="logits")(logits)
    return keras.Model(tokens, logits, name=name)


def _block(x: keras.KerasTensor, sizes: GPTSizes, dtype: str, name: str) -> keras.KerasTensor:
    h = layers.LayerNormalization(dtype=dtype, name=f"{name}_norm_1")(x)
    attention = layers.MultiHeadAttention(
        sizes.heads, sizes.width // sizes.heads, dtype=dtype, name=f"{name}_attention"
    )
    x = layers.Add(dtype=dtype, name=f"{name}_add_1")([x, attention(h, h, use_causal_mask=True)])
    h = layers.LayerNormalization(dtype=dtype, name=f"{name}_norm_2")(x)
    h = layers.Dense(4 * sizes.width, activation="gelu", dtype=dtype, name=f"{name}_up")(h)
    h = layers.Dense(sizes.width, dtype=dtype, name=f"{name}_down")(h)
    return layers.Add(dtype=dtype, name=f"{name}_add_2")([x, h])


def layout_map(axis: str = "model") -> dict[str, tuple[str | None, ...]]:
    """Says which dim of which weight is cut over `axis`; other weights are whole on every device.

    Args:
        axis: A mesh axis.

    Returns:
        Regular expressions over variable paths, each with one entry per dim of the weight.
    """
    return {
        ".*attention/(query|key|value)/kernel": (None, axis, None),  # (width, heads, head width)
        ".*attention/(query|key|value)/bias": (axis, None),
        ".*attention/attention_output/kernel": (axis, None, None),  # (heads, head width, width)
        ".*_up/kernel": (None, axis),
        ".*_up/bias": (axis,),
        ".*_down/kernel": (axis, None),
        ".*head/kernel": (None, axis),
    }

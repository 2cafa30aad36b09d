"""An embedding whose table is in host memory."""

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("kdist")
class HostEmbedding(keras.layers.Embedding):
    """An embedding whose table is in host memory: `Embedding` after `kdist.place(layer, "host")`.

    The table is made there too, so that no accelerator ever holds it. Outside of a model that
    `kdist.parallelize` trains, it is an `Embedding`.

    Args:
        vocabulary: Rows of the table.
        dim: Columns of the table.
        prefetch: Whether rows of the next batch are looked up while this one computes; see
            `kdist.place`.
        **kwargs: Further arguments of `keras.layers.Embedding`, such as `mask_zero` and `name`.

    Call arguments:
        inputs: integers of any shape, at least 0 and less than `vocabulary`.

    Output shape:
        The input's with `dim` as last dim, in the layer's compute dtype.

    Example:
    ```python
    table = kdist.layers.HostEmbedding(10_000_000, 64, name="users")
    ```
    """

    on_host = True

    def __init__(self, vocabulary: int, dim: int, *, prefetch: bool = False, **kwargs: Any) -> None:
        super().__init__(input_dim=vocabulary, output_dim=dim, **kwargs)
        self.prefetch = prefetch

    def build(self, input_shape: Any = None) -> None:
        """Makes the table, in host memory."""
        with tf.device("CPU:0"):
            super().build(input_shape)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config = super().get_config()
        sizes = {"vocabulary": config.pop("input_dim"), "dim": config.pop("output_dim")}
        return {**config, **sizes, "prefetch": self.prefetch}

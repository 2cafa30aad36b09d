"""An embedding whose table is split by hand over the devices of an axis."""

from collections.abc import Sequence
from typing import Any

import keras


@keras.saving.register_keras_serializable("kdist")
class SplitEmbedding(keras.layers.Embedding):
    """An embedding of whose table each device of an axis holds as many rows as it is told.

    The same as `kdist.shard(Embedding(sum(rows), dim), manual_split=rows, axis=axis)`. Outside of a
    model that `kdist.parallelize` trains, it is an `Embedding`.

    Args:
        rows: rows on each device of the axis; together they are the vocabulary. None is padded.
        dim: columns of the table.
        axis: mesh axis, any but `pipe`.
        **kwargs: further arguments of `keras.layers.Embedding`, such as `mask_zero` and `name`.

    Call arguments:
        inputs: integers of any shape, at least 0 and less than `sum(rows)`.

    Output shape:
        The input's with `dim` as last dim, in the layer's compute dtype.

    Example:
    ```python
    table = kdist.layers.SplitEmbedding(rows=(10, 20, 30, 4), dim=16, axis="model")
    ```
    """

    def __init__(self, rows: Sequence[int], dim: int, axis: str = "model", **kwargs: Any) -> None:
        super().__init__(input_dim=sum(rows), output_dim=dim, **kwargs)
        self.split_rows, self.split_axis = tuple(rows), axis

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config = super().get_config()
        del config["input_dim"]
        dim = config.pop("output_dim")
        return {**config, "rows": self.split_rows, "dim": dim, "axis": self.split_axis}

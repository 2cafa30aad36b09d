"""An embedding whose table is split by hand over the devices of an axis."""

from collections.abc import Sequence
from typing import Any

import keras


@keras.saving.register_keras_serializable("kdist")
class SplitEmbedding(keras.layers.Embedding):
    """An embedding of whose table each device of an axis holds as many rows as it is told.

    Or as many columns: `rows` is one number then, and `dim` has those of each device. Of rows, it
    is the same as `kdist.shard(Embedding(sum(rows), dim), manual_split=rows, axis=axis)`. Outside
    of a model that `kdist.parallelize` trains, it is an `Embedding`.

    Args:
        rows: Rows on each device of the axis; together they are the vocabulary. None is padded. Or
            the vocabulary, if columns are split.
        dim: Columns of the table; or those on each device.
        axis: Mesh axis, any but `pipe`.
        local_columns: That the last dim of the inputs has one column for each part, and column j
            has ids of part j alone (global ones, from `sum(rows[:j])` on). Then each device looks
            up its own column, no ids travel, and the results are joined by an all-gather.
        **kwargs: Further arguments of `keras.layers.Embedding`, such as `mask_zero` and `name`.

    Call arguments:
        inputs: integers of any shape, at least 0 and less than `sum(rows)`.

    Raises:
        ValueError: Both of rows and dim are split, or none.
        tf.errors.InvalidArgumentError: With `local_columns`, in a step of a parallel model, an id
            is not in the part of its column.

    Output shape:
        The input's with `dim` as last dim, in the layer's compute dtype.

    Example:
    ```python
    table = kdist.layers.SplitEmbedding(rows=(10, 20, 30, 4), dim=16, axis="model")
    fields = kdist.layers.SplitEmbedding((10, 20, 30, 4), dim=16, local_columns=True)
    vectors = fields(keras.Input((4,), dtype="int32"))  # (batch, 4, 16)
    ```
    """

    def __init__(
        self,
        rows: Sequence[int] | int,
        dim: int | Sequence[int],
        axis: str = "model",
        local_columns: bool = False,
        **kwargs: Any,
    ) -> None:
        self.split_rows = () if isinstance(rows, int) else tuple(rows)
        self.split_columns = () if isinstance(dim, int) else tuple(dim)
        if bool(self.split_rows) == bool(self.split_columns):
            raise ValueError(
                "Rows are split or columns are: one of rows and dim has a number for each device, "
                f"the other is one number. Received: rows={rows}, dim={dim}"
            )
        kwargs["input_dim"] = rows if isinstance(rows, int) else sum(rows)
        kwargs["output_dim"] = dim if isinstance(dim, int) else sum(dim)
        super().__init__(**kwargs)
        self.split_axis = axis
        self.local_columns = local_columns

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config = super().get_config()
        rows, dim = config.pop("input_dim"), config.pop("output_dim")
        own = {"rows": self.split_rows or rows, "dim": self.split_columns or dim}
        return {**config, **own, "axis": self.split_axis, "local_columns": self.local_columns}

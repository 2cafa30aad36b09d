"""A layer that asks for a layout of the tensor that passes through it."""

from collections.abc import Sequence
from typing import Any

from kdist.sharding.active import relaid
from kdist.sharding.strategy import check_strategy

import keras


@keras.saving.register_keras_serializable("kdist")
class Relayout(keras.layers.Layer):
    """Gives the tensor that passes through it another layout; its values stay the same.

    In a model that `kdist.parallelize` trains, the tensor is re-laid out over the inner axes of
    the mesh. Anywhere else the layer is the identity. `kdist.shard(tensor, out_strategy=...)` adds
    it to a functional model.

    Args:
        layout: One entry a dim of the tensor, the batch included: all names (None, a mesh axis, or
            a tuple of axes), or all cut counts (`1` is not cut).
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Call arguments:
        inputs: a tensor of any shape and dtype.

    Output shape:
        The input's, with its dtype and mask.

    Raises:
        ValueError: For a layout of another form.

    Example:
    ```python
    x = keras.Input((128, 64))
    y = kdist.layers.Relayout((None, None, "model"))(x)
    ```
    """

    def __init__(self, layout: Sequence[Any], **kwargs: Any) -> None:
        # A re-layout must not change the dtype, whatever the policy is.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self.layout = check_strategy(layout, "layout")
        self.supports_masking = True
        self.built = True

    def call(self, inputs: Any) -> Any:
        """`inputs` in the layout."""
        return relaid(inputs, self.layout, f"the output of layer {self.path or self.name!r}")

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        """A symbolic tensor of the input's shape and dtype.

        Raises:
            ValueError: The layout has not as many entries as the input has dims.
        """
        rank = len(inputs.shape)
        if len(self.layout) != rank:
            raise ValueError(
                f"Layer {self.name!r} has a layout of {len(self.layout)} entries and its input "
                f"{rank} dims: give one entry a dim, the batch included. Received: "
                f"layout={self.layout}, input shape={tuple(inputs.shape)}"
            )
        return keras.KerasTensor(inputs.shape, dtype=inputs.dtype, sparse=inputs.sparse)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Sequence[int | None]:
        """The input's shape."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        layout = [list(entry) if isinstance(entry, tuple) else entry for entry in self.layout]
        return {**super().get_config(), "layout": layout}

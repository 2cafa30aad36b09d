"""What Keras, and the user, compute with the layers of a parallel model."""

from __future__ import annotations

from kdist._compat import keras_models, keras_xla
from kdist.api.attached import parallel_of
from kdist.storage import retired

import keras


def tell_plain_models(model: keras.Model) -> None:
    """Has them follow where a parallel model's weights are now.

    Models inside this one may have functions for XLA, or know of functions by other names.
    """
    retired.forget_readers()
    inside = keras_models.flat_layers(model)
    for layer in inside:
        keras_xla.leave_out_xla(layer)
    for layer in inside:
        if isinstance(layer, keras.Model):
            keras_xla.forget_made(layer)
            if layer is not model and parallel_of(layer) is None:  # they follow by themselves
                keras_xla.forget_functions(layer)

"""What goes through a layer's call as it is."""

from __future__ import annotations

from typing import Any

from kdist._compat.keras_signals import Signal

import keras
import numpy as np
import pytest
import tensorflow as tf


class Asked(Signal):
    """Has arguments of its own, with which Keras could not make it again."""

    def __init__(self, *, what: int) -> None:
        super().__init__()
        self.what = what


class Asks(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        raise Asked(what=3)


@pytest.mark.parametrize("autograph", [True, False])
def test_signal(autograph: bool) -> None:
    layer = Asks()
    layer.built = True
    function = tf.function(lambda x: layer(x), autograph=autograph)
    with pytest.raises(Asked) as found:
        function(np.zeros((2, 3), "float32"))
    assert found.value.what == 3

"""What Keras's callbacks hold of the present process is what is left out of checkpoints."""

from kdist._compat import keras_callbacks

import keras
import numpy as np


def test_attributes_are_those_of_keras(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, write_steps_per_second=True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2))
    model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[board])
    assert keras_callbacks.of_the_process(board) <= set(vars(board))
    assert not keras_callbacks.of_the_process(keras.callbacks.EarlyStopping())
    assert float(board._previous_epoch_iterations) == 0
    keras_callbacks.begin_clock(board)
    assert float(board._previous_epoch_iterations) == 4


def test_what_fit_gives_is_known():
    class Seen(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.given = set(vars(self))

    model, seen = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), Seen()
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[seen])
    assert {"_model", "params"} <= seen.given <= keras_callbacks.GIVEN_BY_FIT

"""A run that ends as by a crash, for members of programs and for runs in this process."""

from __future__ import annotations

from typing import Any

import keras


class Stopped(Exception):
    """A run ends here."""


class StopAfter(keras.callbacks.Callback):
    """Ends a run as a crash would, after some of its own steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def get_state(self) -> dict[str, Any]:
        """Nothing that goes on."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self.left -= 1
        if not self.left:
            raise Stopped

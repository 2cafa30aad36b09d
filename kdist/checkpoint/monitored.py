"""What `ShardedCheckpoint` monitors: which checkpoint is the best, and which logs say so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kdist.display.warn import warn

Best = tuple[int | None, float | None]
"""The step of the best checkpoint, and its value."""


class Monitored:
    """A value in the logs, and the best that it was.

    Args:
        name: In the logs; None for nothing.
        mode: Whether less of it is better, "min", or more, "max"; "auto" decides by the name.

    Attributes:
        best: See `Best`.
        of_epochs: Whether the last epoch's logs had it, and those of its steps did not.

    Raises:
        ValueError: `mode` is not listed; or neither it nor the name says which way it is better.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self.name = name
        self.best: Best = (None, None)
        self.of_epochs = False
        self._more = name is not None and _more_is_better(name, mode)
        self._of_steps = self._ever = self._told = False
        self._logs: list[str] = []

    def begin(self, best: Best) -> None:
        """A run begins, with the best of the one that it goes on from."""
        self.best = best
        self.of_epochs = self._of_steps = self._ever = self._told = False
        self._logs = []

    def judge(self, step: int, logs: Mapping[str, Any]) -> None:
        """Notes whether the checkpoint of a step is the best."""
        if self.name is None or self.name not in logs:
            return
        value, known = float(logs[self.name]), self.best[1]
        if math.isnan(value):  # it compares as neither better nor worse
            return
        if known is None or math.isnan(known) or (value > known if self._more else value < known):
            self.best = step, value

    def see_step(self, logs: Mapping[str, Any]) -> None:
        """Gets the logs of a step."""
        self._of_steps = self.name in logs

    def see_epoch(self, logs: Mapping[str, Any]) -> None:
        """Gets the logs of an epoch."""
        if self.name is None:
            return
        self._logs = sorted(logs)
        there = self.name in logs
        self.of_epochs = there and not self._of_steps
        self._ever = self._ever or there or self._of_steps
        # With validation_freq, the first epochs may be without.
        validated = any(one.startswith("val_") for one in logs)
        if validated or not self.name.startswith("val_"):
            self._tell()

    def end(self) -> None:
        """No more logs come."""
        if self._logs:
            self._tell()

    def _tell(self) -> None:
        if self._ever or self._told:
            return
        self._told = True
        warn(
            "No logs have what ShardedCheckpoint monitors: none of its checkpoints is the best. "
            f"Name one that they have. Received: monitor={self.name!r}, logs: {self._logs}"
        )


def _more_is_better(monitor: str, mode: str) -> bool:
    if mode not in ("auto", "min", "max"):
        raise ValueError(
            "mode is 'min', 'max', or 'auto', which decides by the name. "
            f"Received: monitor={monitor!r}, mode={mode!r}"
        )
    if mode in ("min", "max"):
        return mode == "max"
    if "loss" in monitor or "error" in monitor:
        return False
    if "acc" in monitor or "auc" in monitor.lower():
        return True
    raise ValueError(
        "mode says whether less of what is monitored is better, 'min', or more, 'max', where its "
        f"name does not. Received: monitor={monitor!r}, mode={mode!r}"
    )

"""Functions that run in other processes, on tensors that lie there: process 0's side.

Tensors are handed over where they lie, so none is sent; a message starts the function, in a thread
of that process, and its answer is a message. Training goes on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kdist._compat import cluster_runtime, remote_python
from kdist.cluster.joining import controller, naming_failures

import tensorflow as tf


class ElsewhereError(RuntimeError):
    """A function failed in another process; the text is its error's."""


class Running:
    """A function that runs in another process.

    Args:
        process: Number of the process.
        name: Of the function, in `kdist.cluster.held.FUNCTIONS` there.
        handed_over: Number of what it gets; None for nothing.
        **arguments: In JSON's types.
    """

    def __init__(
        self, process: int, name: str, handed_over: int | None = None, **arguments: Any
    ) -> None:
        found = controller()
        assert found is not None
        self._controller, self._process, self._number = found, process, next(found.numbers)
        found.ask(process, self._number, run=name, held=handed_over, arguments=arguments)

    def wait(self) -> Any:
        """What it returned.

        Raises:
            ElsewhereError: It raised.
            kdist.comm.PeerError: A process failed.
        """
        said = self._controller.answer(self._number)
        if "problem" in said:
            raise ElsewhereError(f"Process {self._process}: {said['problem']}")
        return said["value"]


def hand_over(process: int, tensors: Sequence[Any], about: Any, copied: bool) -> int:
    """Lets a process keep tensors that lie on its devices, until a function has run on them.

    Args:
        process: Number of the process, not 0.
        tensors: They lie there.
        about: What the function is told of them, in JSON's types.
        copied: Whether they are to be apart from the tensors' memory.

    Returns:
        A number, for `Running`.

    Raises:
        kdist.comm.PeerError: A process failed.
    """
    found = controller()
    assert found is not None
    number = next(found.numbers)
    words = json.dumps({"number": number, "copied": copied, "about": about})
    device = f"/job:{cluster_runtime.JOB}/replica:0/task:{process}/device:CPU:0"
    with naming_failures():
        remote_python.call(device, found.name_of_hold(process), [tf.constant(words), *tensors])
    return number

"""How this program ends: with which exit code, as far as Python says.

An exit code is known to the process's parent alone. Here it is put together of what can be seen:
whether the main module ran to its end, which error nobody caught, and who called `sys.exit`.
"""

from __future__ import annotations

import atexit
import builtins
import dis
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_INTERRUPTED = 130
_FAILED = 1


class Ending:
    """Sees this program's end, and tells it on; what is forked from it ends for itself.

    Args:
        tell: Gets the exit code, and the error if that is why. May be called twice.
        explain: Gets an error that nobody caught, before it is printed.
    """

    def __init__(
        self,
        tell: Callable[[int, BaseException | None], None],
        explain: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._tell, self._explain, self._program = tell, explain, os.getpid()
        self._asked = 0
        self._error_before = _uncaught()
        self._main = _outermost()
        self._hook = sys.excepthook

    def watch(self) -> None:
        """From now on."""
        sys.excepthook = self._see
        sys.exit = _Noting(sys.exit, self._note)
        for name in ("exit", "quit"):
            if hasattr(builtins, name):  # not so with `python -S`
                setattr(builtins, name, _Noting(getattr(builtins, name), self._note))
        atexit.register(self._end)

    def _end(self) -> None:
        if os.getpid() == self._program:
            self._tell(*self.outcome())

    def outcome(self) -> tuple[int, BaseException | None]:
        """The exit code, and the error if that is why; asked when the program ends."""
        if not hasattr(sys, "ps1") and _has_returned(self._main):
            return 0, None
        error = _uncaught()
        if error is not None and error is not self._error_before:
            return code_of(error), error
        return self._asked, None

    def _note(self, status: Any = None) -> None:
        if threading.current_thread() is threading.main_thread():  # others end themselves so
            self._asked = status if isinstance(status, int) else int(status is not None)

    def _see(self, kind: Any, error: Any, trace: Any) -> None:
        """Before threads are waited for, unless another hook has taken this one's place."""
        if os.getpid() == self._program:
            self._explain(error)
        self._hook(kind, error, trace)
        if os.getpid() == self._program:
            self._tell(code_of(error), error)


class _Noting:
    """What ends a program, and notes with which status."""

    def __init__(self, plain: Callable[..., Any], note: Callable[..., None]) -> None:
        self._plain, self._note = plain, note

    def __call__(self, *status: Any) -> Any:
        if len(status) < 2:
            self._note(*status)
        return self._plain(*status)

    def __repr__(self) -> str:
        return repr(self._plain)


def code_of(error: BaseException) -> int:
    """The exit code of a program that nobody caught an error in."""
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED


def _uncaught() -> BaseException | None:
    """The error that Python has printed last, whichever hook printed it."""
    return getattr(sys, "last_value", None)


def _outermost() -> FrameType | None:
    """Where the main thread began."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType | None) -> bool:
    """Whether a frame that runs no more ran to its end, and was not left by an exception."""
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")

"""Keeping routine notices of TensorFlow's C++ code off the screen, and nothing else.

DTensor writes two lines to stderr for every program that it lowers. They are not wrong, and mean
nothing to who trains a model. No log level tells them from warnings, so while a program is lowered
stderr goes through a filter that drops exactly these lines. The filter is a process of its own:
whatever this process still says when it dies is passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

LOWERED = (
    r"^I\d{4} .*dtensor_device\.cc:\d+\] DTensor cache key lookup missed for \S+ "
    r"DTensor is \(re-\)computing its (SPMD transformation|ExecutionFunctions)\.$"
)
"""What DTensor says of every program that it lowers."""

_FILTER = """
import re, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
dropped = re.compile(sys.argv[1].encode())
for line in sys.stdin.buffer:
    if not dropped.match(line.rstrip(b"\\n")):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""
_filtering = threading.Lock()


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Drops these lines of stderr within the block; all others come through, in order.

    Where informational lines are off anyway (`TF_CPP_MIN_LOG_LEVEL` from 1 on), and where stderr is
    closed or filtered by another thread, stderr is left alone.

    Example:
        >>> with without_notices():
        ...     call_for_the_first_time()
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") != "0" or not _filtering.acquire(blocking=False):
        yield
        return
    try:
        with _through_filter():
            yield
    finally:
        _filtering.release()


@contextlib.contextmanager
def _through_filter() -> Iterator[None]:
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        original = os.dup(2)
    except OSError:  # closed: nobody reads it
        yield
        return
    # Isolated and without `site`, it starts in no time, while the program is lowered.
    command = [sys.executable, "-I", "-S", "-c", _FILTER, LOWERED]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=original)
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), 2)
    try:
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)
        reader.stdin.close()
        # It ends with its input, which a process started meanwhile by another thread may share.
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(timeout=1)


@contextlib.contextmanager
def without_retracing() -> Iterator[None]:
    """Drops TensorFlow's advice on functions that are traced often within the block.

    A comparison traces the same code for several models, once each.
    """

    def told(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(told)
    try:
        yield
    finally:
        logger.removeFilter(told)

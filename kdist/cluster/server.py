"""Processes 1 and on: their devices are process 0's until it ends."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

from kdist._compat import cluster_runtime, remote_python
from kdist.cluster import held
from kdist.cluster.channel import Channel, Refused, call
from kdist.cluster.errors import PeerError
from kdist.cluster.output import say
from kdist.cluster.place import Place, joined_address, split_address
from kdist.cluster.reach import address_for_others
from kdist.cluster.settings import Deadlines

_AGAIN_SECONDS = 0.2
CALLS: dict[str, Callable[[], object]] = {}
"""What process 0 may have called here, by name; none by default."""


class Served(SystemExit):
    """Process 0 has ended, and so does this one, with its exit code.

    Attributes:
        text: Why process 0 failed, if it did.
    """

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(code)
        self.text = text


def serve(place: Place, mine: Mapping[str, Any], deadlines: Deadlines) -> NoReturn:
    """Lends this process's devices to process 0, to its end.

    Args:
        place: Of this process.
        mine: See `settings.described`.
        deadlines: When process 0 has failed.

    Raises:
        Served: Process 0 has ended.
        PeerError: It did not start, does not let this process in, or died.
    """
    channel = _reach(place, deadlines)
    coordinator, _ = split_address(place.coordinator, place.source)
    host, port = address_for_others(channel.here, coordinator), 0
    if place.address is not None:
        host, port = split_address(place.address, place.source)
    port = cluster_runtime.serve(place.process, host, port)
    address = joined_address(host, port)
    ending = threading.Event()
    try:
        with _through_interrupts(place):
            hold = remote_python.register(held.hold)
            channel.send(count=place.count, settings=dict(mine), address=address, hold=hold)
            threading.Thread(target=_beat, args=(channel, deadlines, ending), daemon=True).start()
            _follow(place, channel, deadlines)
    finally:
        ending.set()
        channel.close()


@contextlib.contextmanager
def _through_interrupts(place: Place) -> Iterator[None]:
    """Ctrl-C, which terminals and launchers send to all, is for the script in process 0."""
    if threading.current_thread() is not threading.main_thread():
        yield  # of a worker of Ray, whose main thread is Ray's
        return
    told: list[int] = []

    def go_on(number: int, frame: FrameType | None) -> None:
        if not told:
            told.append(number)
            say(f"process {place.process} of {place.count} goes on until process 0 ends")

    before = signal.signal(signal.SIGINT, go_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _reach(place: Place, deadlines: Deadlines) -> Channel:
    """Connects with process 0, which may start later than this one."""
    host, port = split_address(place.coordinator, place.source)
    end = time.monotonic() + deadlines.start
    problem = ""
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(left, 10.0))
        except OSError as error:
            problem = str(error)
            time.sleep(_AGAIN_SECONDS)
            continue
        channel = Channel(connection)
        try:
            call(channel, place.token, place.process)
        except (TimeoutError, EOFError, OSError) as error:
            problem = f"who is there does not answer as process 0 ({error})"
            channel.close()
            time.sleep(_AGAIN_SECONDS)
            continue
        except Refused as error:
            raise PeerError(str(error), [0]) from error
        return channel
    raise PeerError(
        f"Process 0 did not answer at {place.coordinator} (from {place.source}) within "
        f"{deadlines.start:g} s: {problem}. See whether it started, and whether this machine "
        "reaches it there.",
        [0],
    )


def _beat(channel: Channel, deadlines: Deadlines, ending: threading.Event) -> None:
    try:
        while not ending.wait(deadlines.beat):
            channel.send(alive=True)
    except OSError:
        pass  # who follows hears of it


def _run(channel: Channel, message: Mapping[str, Any]) -> None:
    """Runs what process 0 asks for, and answers."""
    done = held.run(message["run"], message["held"], message["arguments"])
    with contextlib.suppress(OSError):  # who follows hears of it
        channel.send(answer=message["number"], **done)


def _wait_for_the_end(channel: Channel, deadlines: Deadlines) -> None:
    """Until process 0, which has said that it ends, has: it takes its leave of the devices."""
    with contextlib.suppress(TimeoutError, EOFError, Refused):
        while True:
            channel.receive(deadlines.silence)


def _follow(place: Place, channel: Channel, deadlines: Deadlines) -> NoReturn:
    """Waits for the end of process 0."""
    started, end = False, time.monotonic() + deadlines.start
    while True:
        try:
            message = channel.receive(deadlines.silence)
        except (TimeoutError, EOFError) as error:
            how = "ended without a word" if isinstance(error, EOFError) else "is silent"
            raise PeerError(
                f"Process 0 ({place.coordinator}) {how}; process {place.process} of {place.count} "
                "ends too. What process 0 printed last says more.",
                [0],
            ) from error
        if "refused" in message:
            raise PeerError(str(message["refused"]), [0])
        if "end" in message:
            text = str(message.get("text", ""))
            if text:
                say(f"process {place.process} ends with process 0, which failed: {text}")
            _wait_for_the_end(channel, deadlines)
            raise Served(int(message["end"]), text)
        if message.get("call") in CALLS:
            CALLS[message["call"]]()
        if "run" in message:
            threading.Thread(target=_run, args=(channel, message), daemon=True).start()
        started = started or "start" in message
        if not started and time.monotonic() > end:
            raise PeerError(
                f"Not all {place.count} processes came within {deadlines.start:g} s.", [0]
            )

"""Messages between process 0 and the others: one line of JSON each, over one connection a process.

Both sides prove that they know the job's token (a keyed hash of what the other one drew), which is
never sent. Nothing that arrives is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from typing import Any

_LONGEST = 1 << 20
_HANDSHAKE_SECONDS = 10.0


class Refused(Exception):
    """The other side does not take part; the text says why."""


class Channel:
    """A connection that carries messages.

    Args:
        connection: A connected socket.

    Attributes:
        here: This side's address.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._socket = connection
        self._arrivals = selectors.DefaultSelector()
        self._arrivals.register(connection, selectors.EVENT_READ)
        self._read = b""
        self._sending = threading.Lock()
        self.here = connection.getsockname()[0]

    def send(self, **message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: The connection has ended.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._socket.sendall(data)

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next message.

        Args:
            timeout: Seconds to wait for it.

        Raises:
            TimeoutError: None came.
            EOFError: The connection has ended.
            Refused: What came is no message.
        """
        end = time.monotonic() + timeout
        while b"\n" not in self._read:
            # Not the socket's own timeout, which would be that of sending too.
            if not self._arrivals.select(max(end - time.monotonic(), 0)):
                raise TimeoutError(f"no message within {timeout:g} s")
            try:
                data = self._socket.recv(_LONGEST)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the connection ended")
            self._read += data
            if len(self._read) > _LONGEST:
                raise Refused("what came is no message of kdist")
        line, _, self._read = self._read.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Refused("what came is no message of kdist")
        return message

    def fileno(self) -> int:
        """The number of the connection's file."""
        return self._socket.fileno()

    def hang_up(self) -> None:
        """Ends the connection; who waits for a message here hears of it."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection, for good."""
        self.hang_up()
        self._arrivals.close()
        self._socket.close()


def let_in(channel: Channel, token: str) -> int:
    """Process 0's side of the handshake: returns the number of the process that calls.

    Raises:
        Refused: It does not know the token.
        TimeoutError, EOFError: See `Channel.receive`.
    """
    drawn = secrets.token_hex(16)
    channel.send(drawn=drawn)
    answer = channel.receive(_HANDSHAKE_SECONDS)
    process = answer.get("process")
    proof = _proof(token, drawn, "caller")
    known = hmac.compare_digest(str(answer.get("proof", "")).encode(), proof.encode())
    if not isinstance(process, int) or not known:
        reason = "it does not know the token of this job (KDIST_TOKEN)"
        channel.send(refused=f"Process 0 does not let this process in: {reason}")
        raise Refused(reason)
    channel.send(proof=_proof(token, str(answer.get("drawn", "")), "called"))
    return process


def call(channel: Channel, token: str, process: int) -> None:
    """The other side of the handshake.

    Raises:
        Refused: This side is not let in, or process 0 does not know the token.
        TimeoutError, EOFError: See `Channel.receive`.
    """
    theirs = str(channel.receive(_HANDSHAKE_SECONDS).get("drawn", ""))
    drawn = secrets.token_hex(16)
    channel.send(process=process, proof=_proof(token, theirs, "caller"), drawn=drawn)
    answer = channel.receive(_HANDSHAKE_SECONDS)
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    proof = _proof(token, drawn, "called")
    if not hmac.compare_digest(str(answer.get("proof", "")).encode(), proof.encode()):
        raise Refused("who answers does not know the token of this job (KDIST_TOKEN)")


def _proof(token: str, drawn: str, side: str) -> str:
    return hmac.new(token.encode(), f"{side}:{drawn}".encode(), hashlib.sha256).hexdigest()

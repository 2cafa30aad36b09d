"""Process 0: waits for the others, watches them, and tells them how the program ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from kdist._compat import cluster_runtime
from kdist.cluster.channel import Channel, Refused, let_in
from kdist.cluster.errors import PeerError, lost
from kdist.cluster.guarded import Guarded
from kdist.cluster.output import say
from kdist.cluster.place import Place, joined_address, split_address
from kdist.cluster.reach import listener
from kdist.cluster.settings import FOLLOW, Deadlines, first_difference

_GRACE_SECONDS = 5.0
"""After a failure, for the program to hear of it where it waits; then the process ends."""
_REASON_SECONDS = 2.0
"""An operation may fail before it shows that a process ended."""
_LATE_SECONDS = 5.0
"""After a failure at the start, for those that come a little later to hear why."""
_EXIT = 1


class Controller:
    """What process 0 knows of the others.

    Args:
        place: Of this process.
        mine: See `settings.described`.
        deadlines: When others have failed.

    Attributes:
        addresses: `host:port` of each process's server, this one's first.
        numbers: Of messages that are answered.
    """

    def __init__(self, place: Place, mine: Mapping[str, Any], deadlines: Deadlines) -> None:
        self.place, self.mine, self.deadlines = place, dict(mine), deadlines
        self._program = threading.current_thread()
        self.addresses: list[str] = []
        self.numbers = itertools.count()
        self._followed: dict[str, bool] = {}
        self._peers: dict[int, Channel] = {}
        self._said: dict[int, dict[str, Any]] = {}
        self._refused: set[int] = set()
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._failure: PeerError | None = None
        self._failed = threading.Event()
        self._raised = threading.Event()
        self._ended = False
        self._heard: dict[int, float] = {}
        self._guard: Guarded | None = None
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        host, port = split_address(self.place.coordinator, self.place.source)
        try:
            return listener(host, port, self.place.count + 8)
        except OSError as error:
            raise OSError(
                "Process 0 waits for the others at the coordinator's address, which is taken, or "
                "of another machine. Is process 0 there twice, or another program at that port? "
                f"Received: {self.place.coordinator}, from {self.place.source}: {error}"
            ) from error

    def gather(self) -> None:
        """Waits until all processes are there, and starts TensorFlow on all of them.

        Raises:
            PeerError: One did not come in time, or is of another version, or has other devices.
        """
        end = time.monotonic() + self.deadlines.start
        threading.Thread(target=self._accept, daemon=True, name="kdist-accept").start()
        others = range(1, self.place.count)
        with self._changed:
            while len(self._said) < len(others) and not self._failure:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._failure is not None:
                late = {*others} - {*self._said, *self._failure.peers}
                left = min(max(end - time.monotonic(), 0.0), _LATE_SECONDS)
                self._changed.wait_for(lambda: late <= self._refused, left)
        missing = [k for k in others if k not in self._said]
        if self._failure is None and missing:
            self._give_up(
                f"Process {', '.join(map(str, missing))} of {self.place.count} did not come to "
                f"{self.place.coordinator} within {self.deadlines.start:g} s. See why it did not "
                "start, or give kdist.init(start_timeout_s=...) more time.",
                missing,
            )
        told = {k: said["settings"] for k, said in self._said.items()}
        if self._failure is None and (difference := first_difference(self.mine, told)):
            wrong = [k for k, one in told.items() if one != self.mine]
            self._give_up(
                f"Processes of one program have the same versions and devices: {difference}.", wrong
            )
        self.check()
        host, port = split_address(self.place.coordinator, self.place.source)[0], 0
        if self.place.address is not None:
            host, port = split_address(self.place.address, self.place.source)
        own = joined_address(host, cluster_runtime.reserve(port))
        self.addresses = [own, *(self._said[k]["address"] for k in others)]
        self._check_reachable()
        for peer in self._peers.values():
            peer.send(start=True)
        self._be_guarded()
        with self.naming_failures():
            cluster_runtime.use(self.addresses)

    def _be_guarded(self) -> None:
        silent = self.deadlines.silent
        peers = {k: (one.fileno(), str(self._lost(k, silent))) for k, one in self._peers.items()}
        self._guard = Guarded(peers, self.deadlines, _GRACE_SECONDS, self._silences)

    def _silences(self) -> dict[int, float] | None:
        """Seconds since each process was heard of; None once the program knows of a failure."""
        if self._raised.is_set() or self._ended:
            return None
        now = time.monotonic()
        return {process: now - last for process, last in dict(self._heard).items()}

    def _check_reachable(self) -> None:
        for process, address in enumerate(self.addresses[1:], 1):
            target = split_address(address, f"process {process}")
            try:
                socket.create_connection(target, timeout=self.deadlines.silence).close()
            except OSError as error:
                self._give_up(
                    f"Process {process} is there, and its TensorFlow server at {address} cannot be "
                    f"reached: {error}. Open its port, or set KDIST_ADDRESS=host:port in that "
                    "process to one that is open.",
                    [process],
                )
                self.check()

    def _accept(self) -> None:
        """Lets processes in, each in a thread of its own: one that says nothing holds up nobody."""
        while not self._ended:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        process = None
        try:
            process = let_in(channel, self.place.token)
            said = channel.receive(self.deadlines.start)
            if problem := self._take(process, said, channel):
                channel.send(refused=problem)
                raise Refused(problem)
        except (Refused, TimeoutError, EOFError, OSError, KeyError) as error:
            channel.close()
            if process is not None and isinstance(error, EOFError):
                self._lose(process)
            return
        self._watch(process, channel)

    def _take(self, process: int, said: dict[str, Any], channel: Channel) -> str:
        """Notes a process; returns why not, if it cannot be."""
        with self._changed:
            if not 0 < process < self.place.count or said.get("count") != self.place.count:
                return (
                    f"Process 0 was told that there are {self.place.count} processes. Received: "
                    f"process {process} of {said.get('count')}"
                )
            if process in self._said:
                return (
                    f"Process {process} is there already: it was started twice. End one of both, "
                    "or number them otherwise."
                )
            if self._failure is not None:
                self._refused.add(process)
                self._changed.notify_all()
                return str(self._failure)
            self._said[process], self._peers[process] = said, channel
            self._changed.notify_all()
        return ""

    def _lose(self, process: int) -> None:
        """Notes that a process came, and ended before it was ready."""
        with self._changed:
            if process in self._said or self._failure is not None or self._ended:
                return  # one that was started twice, or follows this one
            self._give_up(
                f"Process {process} of {self.place.count} came, and ended before its TensorFlow "
                "server was there. What it printed last says more.",
                [process],
            )
            self._changed.notify_all()

    def _watch(self, process: int, channel: Channel) -> None:
        """Sends signs of life to a process, and waits for its own, until the end."""
        beat = threading.Thread(target=self._beat, args=(channel,), daemon=True)
        beat.start()
        self._heard[process] = time.monotonic()
        try:
            while not self._ended:
                message = channel.receive(self.deadlines.silence)
                self._heard[process] = time.monotonic()
                if "failed" in message:
                    raise Refused(str(message["failed"]))
                if "answer" in message:
                    with self._changed:
                        self._answers[message["answer"]] = message
                        self._changed.notify_all()
        except TimeoutError:
            cause = self.deadlines.silent
        except EOFError:
            cause = "ended"
        except Refused as error:
            cause = f"failed: {error}"
        if not self._ended:
            self._fail(self._lost(process, cause))

    def _lost(self, process: int, cause: str) -> PeerError:
        return lost(process, self.place.count, str(self._said[process].get("address", "")), cause)

    def _beat(self, channel: Channel) -> None:
        try:
            while not self._ended:
                channel.send(alive=True)
                time.sleep(self.deadlines.beat)
        except OSError:
            pass  # whoever receives from it says so

    def _give_up(self, text: str, peers: list[int]) -> None:
        self._failure = PeerError(text, peers)
        self._failed.set()

    def _fail(self, failure: PeerError) -> None:
        """Makes the program hear of a failure, wherever it is."""
        with self._changed:
            if self._failure is not None or self._ended:
                return
            self._failure = failure
            self._failed.set()
            self._changed.notify_all()
        cluster_runtime.cut_connections(self._connected())
        if not self._raised.wait(_GRACE_SECONDS):
            # It waits for something that does not end, or does not use the devices any more.
            say(str(failure))
            self.end(_EXIT, str(failure))
            os._exit(_EXIT)

    def _connected(self) -> set[tuple[str, int]]:
        found = set()
        for address in self.addresses[1:]:
            host, port = split_address(address, "a process")
            for *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found.add((str(target[0]), port))
        return found

    def check(self) -> None:
        """Raises what has failed, if anything has.

        Raises:
            PeerError: See there.
        """
        if self._failure is not None:
            self._raised.set()
            raise self._failure

    def be_followed(self) -> None:
        """Has the others' kernels work as this process's do, if the script has changed that.

        Raises:
            PeerError: A process has failed.
        """
        said = cluster_runtime.kernel_settings()
        if said == self._followed:
            return
        asked = []
        for process in self._peers:
            asked.append(next(self.numbers))
            self.ask(process, asked[-1], run=FOLLOW, held=None, arguments=said)
        for number in asked:
            self.answer(number)
        self._followed = said

    def naming_failures(self) -> NamingFailures:
        """Around what uses other processes' devices: raises `PeerError` where one has failed."""
        return NamingFailures(self)

    def reason(self) -> PeerError | None:
        """Why an operation failed, if a process has; waits a moment for that to show."""
        if self._failed.wait(_REASON_SECONDS):
            self._raised.set()
        return self._failure

    def explain(self, error: BaseException) -> None:
        """Notes on an error that nobody caught which process has failed, if that may be why."""
        if cluster_runtime.may_be_a_process(error) and (failure := self.reason()) is not None:
            error.add_note(f"kdist: {failure}")

    def name_of_hold(self, process: int) -> str:
        """By which `held.hold` of a process is called."""
        return str(self._said[process]["hold"])

    def ask(self, process: int, number: int, **message: Any) -> None:
        """Sends a process a message that it answers; see `answer`.

        Raises:
            PeerError: A process has failed.
        """
        self.check()
        with contextlib.suppress(OSError):  # who waits for the answer hears of it
            self._peers[process].send(number=number, **message)

    def answer(self, number: int) -> dict[str, Any]:
        """Waits for the answer to a message.

        Raises:
            PeerError: A process has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._failure is not None)
            if number in self._answers:
                return self._answers.pop(number)
        assert self._failure is not None
        if threading.current_thread() is self._program:  # otherwise it has still to hear of it
            self._raised.set()
        raise self._failure

    def tell(self, **message: Any) -> None:
        """Sends a message to all other processes."""
        for channel in self._peers.values():
            with contextlib.suppress(OSError):  # that process may have ended
                channel.send(**message)

    def end(self, code: int, text: str = "") -> None:
        """Tells all processes that the program has ended.

        Args:
            code: Its exit code.
            text: Why, if it failed.
        """
        if self._ended:
            return
        self._ended = True
        self.tell(end=code, text=text)
        if self._guard is not None:
            self._guard.close()
        self._listener.close()

    def leave(self) -> None:
        """Lets the others go, after `end`, without the end of this process."""
        for channel in self._peers.values():
            channel.hang_up()


_NO_PYTHON = (
    " A layer calls Python (tf.py_function, tf.numpy_function), and process 0 alone has the "
    "script's functions. Write it in TensorFlow's operations, call it in the dataset, or give the "
    "mesh devices of process 0 alone."
)


class NamingFailures:
    """See `Controller.naming_failures`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def __enter__(self) -> None:
        self._controller.check()
        self._controller.be_followed()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if cluster_runtime.may_be_a_process(error):
            failure = self._controller.reason()
            if failure is not None:
                raise failure from error
        if error is not None and (process := cluster_runtime.process_of(error)):
            place, address = self._controller.place, self._controller.addresses[process]
            note = (
                f"kdist: TensorFlow heard of this from process {process} of {place.count} "
                f"({address}). What that process printed last may say more."
            )
            if cluster_runtime.lacks_python(error):
                note += _NO_PYTHON
            if note not in getattr(error, "__notes__", ()):  # a step within `fit`
                error.add_note(note)

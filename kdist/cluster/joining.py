"""`kdist.init`: this process's devices, and its place among the processes of one program."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from kdist._compat import cluster_runtime, environment
from kdist.cluster import output, signs
from kdist.cluster.beside_strategy import check_strategy, place_beside, tell_where
from kdist.cluster.controller import Controller
from kdist.cluster.ending import Ending
from kdist.cluster.place import Place, split_address
from kdist.cluster.reach import outside_addresses, without_token
from kdist.cluster.server import serve
from kdist.cluster.settings import Deadlines, described
from kdist.cluster.sources import TOKEN, find
from kdist.cluster.variables import number
from kdist.display.warn import warn

_Given = tuple[str | None, int | None, int | None]
_ARGUMENTS = ("coordinator", "num_processes", "process_id")
"""Those of `init` that say a place, in the order of `_Given`."""
_DEVICES = "KDIST_CPU_DEVICES"
_controller: Controller | None = None


def init(
    cpu_devices: int | None = None,
    threads_per_op: int | None = None,
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    start_timeout_s: float = 300.0,
    peer_timeout_s: float = 20.0,
) -> None:
    """Prepares the devices of this process, and joins it with the others of its program.

    Call it before the first tensor is made, or after a `MultiWorkerMirroredStrategy` of several
    workers. Where nothing says that there are several processes, this one is alone. Otherwise the
    same script runs in each of them, and this call returns in process 0 only: the others lend it
    their devices, and end here with its exit code when it ends. So what stands behind it (arrays,
    callbacks, files, logs) happens once. The devices of all processes are then devices of
    `kdist.mesh`, process after process.

    A process learns its place from, in this order: the arguments; KDIST_COORDINATOR,
    KDIST_NUM_PROCESSES and KDIST_PROCESS_ID (set by `python -m kdist.launch`); TF_CONFIG; torchrun;
    KERAS_DISTRIBUTION_*; Slurm; Open MPI or PMI; an indexed job of Kubernetes; RANK_TABLE_FILE. See
    docs/processes.md, also for what a network has to keep out: TensorFlow's servers listen on every
    interface, and ask for no password.

    Args:
        cpu_devices: Number of logical CPU devices that this process's processor is cut into, so
            that a mesh fits on a laptop. None: as KDIST_CPU_DEVICES says (`kdist.launch
            --cpu-devices 2` sets it), else devices stay as they are. GPUs are found by themselves.
        threads_per_op: Number of threads among which TensorFlow cuts the work of one operation on
            a CPU (its intra-op parallelism); 0 is a thread per core. None leaves it as it is,
            unless there are at least as many CPU devices as cores: then it is 1, since the devices
            keep all cores busy and cutting operations up costs time. What the user set in
            TensorFlow, or in the environment, stays.
        coordinator: `host:port` where process 0 waits for the others; the same in all.
        num_processes: Number of processes.
        process_id: Number of this one, from 0.
        start_timeout_s: Seconds within which all processes have to come.
        peer_timeout_s: Seconds without a sign of life after which a process has failed: all others
            end, with an error that names it.

    Raises:
        ValueError: A number is not an integer of at least 1 (0 for threads); TensorFlow runs with
            other numbers, or alone; the place is said in part, or twice and differently.
        RuntimeError: A child of a process that has joined found its parent's place.
        kdist.comm.PeerError: A process does not come in time, is of another version, or has other
            devices. In processes other than 0: process 0 does not answer, or died.
        SystemExit: In processes other than 0, when process 0 has ended.

    Example:
    ```python
    kdist.init(cpu_devices=8)  # the same call again is fine
    mesh = kdist.mesh(data=2, model=4)
    ```
    """
    deadlines = Deadlines(start_timeout_s, peer_timeout_s)
    if cpu_devices is None and os.environ.get(_DEVICES):
        cpu_devices = number(os.environ, _DEVICES)
    given = (coordinator, num_processes, process_id)
    _start(given, deadlines, cpu_devices, threads_per_op)


def controller() -> Controller | None:
    """What process 0 knows of others; None where it is alone."""
    return _controller


def has_joined() -> bool:
    """Whether this is process 0 of several."""
    return _controller is not None


def call_in_others(name: str) -> None:
    """Has each other process call what it knows by a name; see `server.CALLS`."""
    if _controller is not None:
        _controller.tell(call=name)


def finish(code: int, text: str = "") -> None:
    """Ends the program, and not its process, which others started and will end.

    Args:
        code: Its exit code.
        text: Why, if it failed.
    """
    if _controller is not None:
        _controller.end(code, text)
        _controller.leave()


def naming_failures() -> contextlib.AbstractContextManager[Any]:
    """Around what uses devices of other processes: raises `PeerError` where one has failed."""
    return contextlib.nullcontext() if _controller is None else _controller.naming_failures()


def _start(
    given: _Given, deadlines: Deadlines, cpu_devices: int | None, threads_per_op: int | None
) -> None:
    """Finds this process's place, makes its devices, and joins the others if there are any."""
    if _controller is not None:
        # Joined before: only the numbers are looked at again.
        environment.set_up_devices(cpu_devices, threads_per_op)
        return
    signs.called()
    signs.follow_launcher()
    place = _place(given)
    if place is None or place.count == 1:
        environment.set_up_devices(cpu_devices, threads_per_op)
        return
    if given == (None, None, None):
        signs.check(place)
    beside = cluster_runtime.has_started()
    if beside:
        check_strategy(place)
    environment.set_up_devices(cpu_devices, threads_per_op)
    _join(place, deadlines, threads_per_op, beside)


def _place(given: _Given) -> Place | None:
    """This process's place by the arguments of `init` and the environment; None for alone."""
    variables = dict(os.environ)
    named = zip(_ARGUMENTS, given, strict=True)
    said = {name: value for name, value in named if value is not None}
    for name, value in said.items():
        if name != "coordinator" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} is an integer. Received: {name}={value!r}")
    variables.update({f"KDIST_{name.upper()}": str(value) for name, value in said.items()})
    return find(variables, say=lambda line: warn(f"kdist.init: {line}"))


def _join(
    place: Place,
    deadlines: Deadlines,
    threads_per_op: int | None,
    beside: bool,
) -> None:
    """Joins the others; `beside` a strategy that has servers of its own."""
    global _controller
    found = place
    if beside:
        place = place_beside(place, deadlines.start)
    mine = described(threads_per_op)
    if place.process:
        head = f"process {place.process} of {place.count} serves {place.coordinator}"
        output.say(f"{head} (from {place.source})")
        serve(place, mine, deadlines)
    made = Controller(place, mine, deadlines)
    try:
        if beside:
            tell_where(place)
        made.gather()
    except BaseException as error:
        made.end(1, str(error))
        raise
    _controller = made
    signs.joined(found)
    end = Ending(
        lambda code, error: made.end(code, output.described(error) if error else ""), made.explain
    )
    end.watch()
    host, _ = split_address(place.coordinator, place.source)
    if not os.environ.get(TOKEN) and (line := without_token(host, place.source)):
        warn(f"kdist.init: {line}")
    if outside := outside_addresses():
        warn(
            "kdist.init: TensorFlow's servers listen on every address of their machines and ask "
            "for no password: who reaches one runs any operation, reading files included. Close "
            "their ports to others (docs/processes.md). "
            f"Received: a machine with {', '.join(outside)}"
        )

"""Sums of two processes, on both: as kdist's step makes them, against TensorFlow's all-reduce.

    sh run.sh python benchmarks/reduction.py

Two pairs of processes wait for their turns and take them one after the other, round by round, so
that what else the machine does meets both. In the one, process 0 runs the program for both
(`kdist.init`): each bucket is summed on its owner, and goes to the other device; owners take turns.
In the other, both run TensorFlow's own all-reduce (`kdist.comm`, `algorithm="runtime"`). Beside
them, as bounds: as many bytes each way through a plain TCP connection, and a copy by NumPy.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import kdist
from kdist.comm.processes import local_addresses
from kdist.storage.transfer import Sent, added

import keras
import numpy as np
import results_file
import tensorflow as tf
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("megabytes", 64, "of the buffer that each process has", 1)
flags.DEFINE_list("buckets", ["1", "8", "32"], "into how many buckets the step cuts it")
flags.DEFINE_integer("rounds", 9, "times that everything is measured", 1)
flags.DEFINE_bool("keep", False, "write the tracked file of results")
flags.DEFINE_string("pair", "", "set by the first process: which pair this one is of")
flags.DEFINE_integer("index", 0, "set by the first process: which of the pair")
flags.DEFINE_list("addresses", [], "set by the first process: of the pair")
RUNTIME, TCP, COPY = "TensorFlow's all-reduce", "TCP, both ways", "copy"


def variables(device: str, count: int) -> list[tf.Variable]:
    """The buffer of a device, in buckets, full of ones."""
    size = FLAGS.megabytes * 2**20 // 4 // count
    with tf.device(device):
        return [tf.Variable(tf.ones([size])) for _ in range(count)]


def step_of(count: int) -> Callable[[], float]:
    """The sums of a step: to the owner of each bucket, and from it to the other device."""
    devices = list(kdist.mesh(data=2).devices.flatten())
    names = [tf.config.list_logical_devices("CPU")[n].name for n in range(len(devices))]
    given = [variables(name, count) for name in names]
    results = [variables(name, count) for name in names]

    @tf.function(autograph=False)
    def step() -> None:
        for n in range(count):
            owner = names[n % 2]
            parts = []
            for values, name in zip(given, names):
                with tf.device(name):
                    parts.append(values[n].read_value())
            with tf.device(owner):
                total = Sent(added(parts, names, "reduce", n), owner)
            for result, name in zip(results, names):
                with tf.device(name):
                    result[n].assign(total.at(name))

    return timed(step, [v for each in given for v in each], [v for each in results for v in each])


def runtime_of() -> Callable[[], float]:
    """TensorFlow's all-reduce of the whole buffer."""
    names = [f"/job:worker/task:{task}/device:CPU:0" for task in range(2)]
    group = kdist.comm.Group.of(keras.distribution.DeviceMesh((2,), ["data"], names), "data")
    (value,), (result,) = variables("CPU:0", 1), variables("CPU:0", 1)

    @tf.function(autograph=False)
    def step() -> None:
        result.assign(kdist.comm.all_reduce([value], group, algorithm="runtime")[0])

    return timed(step, [value], [result])


def timed(
    step: Callable[[], None], given: list[tf.Variable], results: list[tf.Variable]
) -> Callable[[], float]:
    """Runs a step on numbers of its own, and says how long it took; checks what it gave."""
    runs = itertools.count(1)

    @tf.function(autograph=False)
    def fill(number: tf.Tensor) -> None:
        for value in given:
            with tf.device(value.device):
                value.assign(tf.fill(value.shape, number))

    def run() -> float:
        number = next(runs)
        fill(tf.constant(number, tf.float32))
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        for result in results:
            assert float(result[0]) == float(result[-1]) == 2.0 * number, result
        return seconds

    run()
    run()
    return run


def member() -> None:
    """A process of a pair: takes a turn for each line that it reads, and prints its time."""
    if FLAGS.pair == "step":
        kdist.init(  # the second one stays in here
            cpu_devices=1,
            coordinator=FLAGS.addresses[0],
            num_processes=2,
            process_id=FLAGS.index,
        )
        turns = {count: step_of(int(count)) for count in FLAGS.buckets}
    else:
        kdist.init(cpu_devices=1)
        kdist.comm.connect(FLAGS.addresses, FLAGS.index)
        turns = {RUNTIME: runtime_of()}
    print("ready", flush=True)
    for line in sys.stdin:
        print(f"took {turns[line.strip()]()}", flush=True)


class Pair:
    """Two processes that wait for their turns.

    Args:
        name: Which pair.
        listen: Which of them are told, and answer.
    """

    def __init__(self, name: str, listen: int) -> None:
        addresses = ",".join(local_addresses(2))
        flagged = [f"--pair={name}", f"--addresses={addresses}", *sys.argv[1:]]
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, f"--index={n}", *flagged],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for n in range(2)
        ]
        self.listening = self.processes[:listen]
        for process in self.listening:
            self._until(process, "ready")

    def turn(self, what: str) -> float:
        """Seconds of a turn."""
        for process in self.listening:
            assert process.stdin is not None
            process.stdin.write(what + "\n")
            process.stdin.flush()
        took = [float(self._until(process, "took").split()[1]) for process in self.listening]
        return max(took)

    def end(self) -> None:
        """Ends both."""
        for process in self.processes:
            process.kill()

    @staticmethod
    def _until(process: subprocess.Popen, text: str) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(text):
                return line
        raise RuntimeError(f"A process ended before it was {text!r}.")


def tcp_seconds(nbytes: int) -> float:
    """As many bytes each way, at once, through a connection of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listener.getsockname())
    there, _ = listener.accept()
    data = np.ones(nbytes, np.uint8)

    def take(end: socket.socket, view: memoryview) -> None:
        got = 0
        while got < nbytes:
            got += end.recv_into(view[got:])

    into = [memoryview(bytearray(b"1" * nbytes)) for _ in range(2)]
    jobs = [threading.Thread(target=take, args=pair) for pair in zip((here, there), into)]
    jobs += [threading.Thread(target=end.sendall, args=[data]) for end in (here, there)]
    started = time.perf_counter()
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    seconds = time.perf_counter() - started
    for end in (here, there, listener):
        end.close()
    return seconds


def copy_seconds(nbytes: int) -> float:
    """A copy, into memory that is there."""
    data, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    started = time.perf_counter()
    np.copyto(target, data)
    return time.perf_counter() - started


def main(_: list[str]) -> None:
    """Prints medians, and how they compare with TensorFlow's all-reduce."""
    if FLAGS.pair:
        member()
        return
    nbytes = FLAGS.megabytes * 2**20
    step, runtime = Pair("step", 1), Pair("runtime", 2)
    names = {f"step, {count} buckets": count for count in FLAGS.buckets}
    found: dict[str, list[float]] = {}
    try:
        for _number in range(FLAGS.rounds):
            for name, count in names.items():
                found.setdefault(name, []).append(step.turn(count))
            found.setdefault(RUNTIME, []).append(runtime.turn(RUNTIME))
            for name, measure in ((TCP, tcp_seconds), (COPY, copy_seconds)):
                found.setdefault(name, []).append(measure(nbytes))
    finally:
        step.end()
        runtime.end()
    rows: list[dict[str, Any]] = []
    for name, times in found.items():
        # Ratios within a round: both met the same machine.
        ratios = [one / took for one, took in zip(found[RUNTIME], times)]
        row = {"name": name, "seconds": results_file.spread_of(times)}
        rows.append({**row, "faster": results_file.spread_of(ratios)})
        faster = rows[-1]["faster"]
        print(
            f"{name:<26}{rows[-1]['seconds']['median'] * 1e3:8.0f} ms {faster['median']:6.2f} x "
            f"({faster['min']:.2f} to {faster['max']:.2f})"
        )
    settings: dict[str, Any] = {
        name: FLAGS[name].value for name in ("megabytes", "buckets", "rounds")
    }
    print(f"written: {results_file.save('reduction', settings, rows, keep=FLAGS.keep)}")


if __name__ == "__main__":
    app.run(main)

"""`CommFusion`: what a step communicates, in the logs; and the fastest bucket size, by trying."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from kdist.api.attached import attached
from kdist.config.fusion import FusionConfig
from kdist.display.warn import warn
from kdist.report.comm_replay import replay

import keras
from rich.console import Console
from rich.table import Table

CANDIDATES = (
    FusionConfig(),
    FusionConfig(mode="none"),
    FusionConfig(mode="size", size_mb=1),
    FusionConfig(mode="size", size_mb=16),
    FusionConfig(mode="size"),
)


def candidates_for(own: FusionConfig) -> tuple[FusionConfig, ...]:
    """What is tried of a model by default: its own settings, and other buckets beside the rest."""
    others = [
        dataclasses.replace(
            one,
            overlap=own.overlap,
            algorithm=own.algorithm,
            link=own.link if one.mode == "auto" else None,
        )
        for one in CANDIDATES
    ]
    return tuple(dict.fromkeys([own, *others]))


class CommFusion(keras.callbacks.Callback):
    """Logs what a training step communicates between replicas, and can tune the bucket size.

    At the end of every epoch `logs` gets, and with it `History`, `CSVLogger` and `TensorBoard`:

    | key | value |
    | --- | --- |
    | `comm_collectives` | collectives of a step, as `model.plan()` counts them |
    | `comm_bytes` | bytes that they send between devices, rows of tables left out |
    | `comm_seconds` | their time when they run alone, the median of a few runs |
    | `comm_direct` | collectives whose messages go straight from a value's maker to its users |
    | `comm_joined` | collectives that go through one device, where parts of several are joined |
    | `comm_bus_gb_per_s` | bus bandwidth as nccl-tests counts it: bytes per device and ns |
    | `comm_row_bytes/<table>` | bytes sent of a table's rows, per row that a replica looks up |

    The time is that of one function with all of it, its call included; it is 0 only where nothing
    is sent. The rows that tables send depend on the batch, and are not timed.

    Put it before callbacks that write logs.

    Args:
        tune: Try several `FusionConfig`s in the first steps and keep the one with the fastest step.
            Every candidate means a new trace of the step; training goes on meanwhile, with the
            same results. A run that goes on from a checkpoint tries them again, on its own mesh.
        candidates: What `tune` tries; None: the model's own settings, and no fusion, "auto", and
            buckets of 1, 16 and 64 MB beside what they say otherwise.
        steps: Timed steps per candidate, after one that is not.
        verbose: Print what was tried.

    Raises:
        ValueError: For no candidates or steps; and, when training starts, for a plain Keras model,
            or a candidate with another `overlap` than the model was parallelized with.

    Example:
        >>> model.fit(x, y, epochs=3, callbacks=[kdist.callbacks.CommFusion(tune=True)])
    """

    def __init__(
        self,
        *,
        tune: bool = False,
        candidates: Sequence[FusionConfig] | None = None,
        steps: int = 3,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"A candidate is timed for one step or more. Received: steps={steps}")
        if tune and candidates is not None and not candidates:
            raise ValueError("Tuning needs candidates. Received: candidates=()")
        self.tune = tune
        self.candidates = None if candidates is None else tuple(candidates)
        self.steps = steps
        self.verbose = verbose
        self.tried: dict[str, float] = {}
        self._candidates: tuple[FusionConfig, ...] = ()
        self._times: list[list[float]] = []
        self._started = 0.0
        self._next: FusionConfig | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts with the first candidate."""
        self._times = []
        self.tried = {}
        self._next = None  # of a training that an error has ended
        if self.tune:
            parallel = attached(self.model)
            self._candidates = self.candidates or candidates_for(parallel.config.fusion)
            parallel.set_fusion(self._candidates[0])

    def get_state(self) -> dict[str, Any]:
        """Nothing, for a checkpoint: what was timed is of this process and mesh."""
        return {}

    def set_state(self, state: Any) -> None:
        """Takes nothing: a run that goes on tunes again, from the first candidate."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Goes on to the next candidate, and starts the clock."""
        self._switch()
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Times a step of the candidate; after its last step goes on to the next one."""
        if not self.tune or self.tried:
            return
        if not self._times:
            self._times.append([])
        self._times[-1].append(time.perf_counter() - self._started)
        if len(self._times[-1]) <= self.steps:
            return
        if len(self._times) < len(self._candidates):
            self._next = self._candidates[len(self._times)]
            self._times.append([])
        else:
            self._keep_fastest()

    def _switch(self) -> None:
        """Takes up the settings that come next: not before, or logs of an epoch would miss them."""
        if self._next is not None:
            attached(self.model).set_fusion(self._next)
            self._next = None

    def _keep_fastest(self) -> None:
        medians = [statistics.median(times[1:]) for times in self._times]
        self.tried = {str(c): t for c, t in zip(self._candidates, medians)}
        best = min(range(len(medians)), key=medians.__getitem__)
        if best != len(medians) - 1:
            self._next = self._candidates[best]
        if self.verbose:
            table = Table(title="fusion: median step")
            table.add_column("candidate")
            table.add_column("ms", justify="right")
            for n, (name, seconds) in enumerate(self.tried.items()):
                table.add_row(name + (" (kept)" if n == best else ""), f"{1e3 * seconds:.1f}")
            Console().print(table)

    def on_train_end(self, logs: Any = None) -> None:
        """Says so if training was too short to try every candidate."""
        self._switch()
        if self.tune and not self.tried:
            needed = len(self._candidates) * (self.steps + 1)
            warn(
                f"CommFusion(tune=True) needs {needed} steps to try {len(self._candidates)} "
                f"candidates; training ended before. The last one tried stays: "
                f"{attached(self.model).config.fusion}"
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the figures to the logs."""
        parallel = attached(self.model)
        if logs is None or parallel.update is None:
            return
        plan = parallel.plan()
        traffic = plan.traffic()
        entries = parallel.entries_of(self.model.weights)
        params = [entries[i] for i in plan.params]
        fixed = [e for i, e in enumerate(entries) if i not in set(plan.params)]
        group = parallel.topology.group
        gathers = [([params[v] for v in g.weights], group(g.stage)) for g in plan.gathers]
        gathers += [([e], e.placement.slices) for e in fixed if e.placement.gathered]
        tables, nbytes = dict(plan.look_ups), sum(t.nbytes for t in traffic)
        found = replay(parallel.update.jobs, gathers, tables, plan.changed_by_rows, nbytes)
        logs["comm_collectives"] = sum(t.collectives for t in traffic)
        logs["comm_bytes"] = found.nbytes
        logs["comm_seconds"] = found.seconds
        logs["comm_direct"] = sum(t.collectives - t.joined for t in traffic)
        logs["comm_joined"] = sum(t.joined for t in traffic)
        logs["comm_bus_gb_per_s"] = found.bus_bandwidth / 1e9
        for one in plan.tables():
            logs[f"comm_row_bytes/{one.path}"] = one.nbytes(1)

"""What is known of a Keras model in which rows of the batch may meet, and how it is told.

`kdist.rows.model` finds it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.rows.values import Mixing
from kdist.storage.constant_ids import ConstantIds

SHOWN = 3
"""So many findings are spelled out in a warning."""
GLOBAL = 'ParallelConfig(batch_semantics="global")'
_ASKED = ("set", "use a mesh without `pipe` and set")
"""How `GLOBAL` is asked for, without and with micro-batches."""

Path = tuple[str | int, ...]
"""Where an output lies in what a model returns: keys and positions."""


@dataclasses.dataclass(frozen=True)
class Square:
    """An output that has an entry for each row of the batch in another dim than 0.

    Attributes:
        name: "output 'similar'".
        path: Of the output.
    """

    name: str
    path: Path


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that replicas compute otherwise than one device.

    Attributes:
        what: "output 'logits'", "a value given to add_loss", "state 'counter/count'".
        why: What it is, as a sentence goes on after `what`.
        where: The operation at which rows meet, or are counted; None if it is not one operation.
    """

    what: str
    why: str
    where: Mixing | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.why}" + (f" ({self.where})" if self.where else "")


@dataclasses.dataclass(frozen=True)
class ModelStudy:
    """Where rows of the batch meet in a model.

    Attributes:
        findings: What replicas compute otherwise than one device, worst first.
        mixings: Every operation at which rows meet first, with the layer that it serves.
        statistics: Paths of the BatchNormalization layers that normalise each replica's rows.
        failed: Why the model could not be looked at, "" if it was.
        moving: Paths of other state that a pass writes, without seeds and metrics: it goes from
            micro-batch to micro-batch.
        constant_ids: Looked up in tables.
        squares: Outputs in which each row has an entry for each row, such as similarities.
        row_adders: Layers of which all values given to `add_loss` have an entry for each row. Keras
            adds these up, so they add up over replicas too.
        adds_losses: Whether layers give values to `add_loss`.
    """

    findings: tuple[Finding, ...] = ()
    mixings: tuple[Mixing, ...] = ()
    statistics: tuple[str, ...] = ()
    failed: str = ""
    moving: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    constant_ids: ConstantIds = dataclasses.field(default=ConstantIds(), compare=False)
    squares: tuple[Square, ...] = dataclasses.field(default=(), compare=False)
    row_adders: frozenset[Any] = dataclasses.field(default=frozenset(), compare=False)
    adds_losses: bool = dataclasses.field(default=False, compare=False)

    def lines(self) -> list[str]:
        """All of it, a line each."""
        lines = [f"on each replica's rows: {finding}" for finding in self.findings]
        shown = {finding.where for finding in self.findings}
        lines += [f"rows of a replica meet: {m}" for m in self.mixings if m not in shown]
        if self.statistics:
            names = ", ".join(self.statistics)
            lines.append(f"batch statistics of each replica's rows: {names}")
        if self.failed:
            lines.append(f"whether rows of a batch meet was not found out: {self.failed}")
        return lines

    def warning(self, micro_batches: bool = False) -> str:
        """One paragraph for all findings: which, what happens, what to do; "" without any.

        Args:
            micro_batches: Whether parts of a step see a micro-batch, and not all of a replica's
                rows.
        """
        rows = "each micro-batch's rows" if micro_batches else "each replica's rows"
        mesh = _ASKED[micro_batches]
        if self.failed:
            return (
                f"It could not be found out whether rows of a batch meet in this model, "
                f"which is computed on {rows}: {self.failed}. If they do (a mean or a sort over "
                f"the batch, similarities between rows), {mesh} {GLOBAL}."
            )
        if not self.findings:
            return ""
        told = "; ".join(str(finding) for finding in self.findings[:SHOWN])
        more = len(self.findings) - SHOWN
        rest = f"; and {more} more, which kdist.inspect(model) lists" if more > 0 else ""
        return (
            f"Computed on {rows}, and so not as on one device: {told}{rest}. "
            f"To compute over the whole batch, {mesh} {GLOBAL}."
        )

    def of_micro_batches(self, count: int) -> str:
        """What happens to state that the model's own layers write, where a step has several passes.

        Args:
            count: Micro-batches of a step.
        """
        if not self.moving:
            return ""
        told = ", ".join(map(repr, self.moving[:SHOWN])) + ", ..." * (len(self.moving) > SHOWN)
        return (
            "State that forward passes write goes from micro-batch to micro-batch: here it "
            f"changes {count} times a step, and on one device once. To have it change once, set "
            f"micro_batches=1. Received: state {told}"
        )

    def refuse_squares(
        self, whole_loss: str, joined: Sequence[Path], micro_batches: bool = False
    ) -> None:
        """Refuses a loss over the whole batch whose outputs cannot be joined from parts of it.

        Args:
            whole_loss: Why it is one.
            joined: Paths of the outputs that it takes, or of what they lie in.
            micro_batches: See `warning`.

        Raises:
            ValueError: One of them is of `squares`.
        """
        met = [one for one in self.squares if any(one.path[: len(p)] == p for p in joined)]
        if met:
            parts = "micro-batches" if micro_batches else "replicas"
            raise ValueError(
                f"{met[0].name} has an entry for each row of the batch in each of its rows: "
                f"what {parts} compute of it does not join to that of the batch, over which the "
                f"loss is computed. To compute the model over the whole batch, "
                f"{_ASKED[micro_batches]} {GLOBAL}; or return features of each row and let the "
                f"loss compare them. Received: {whole_loss}"
            )

"""What `kdist.verify` returns: a frozen report that prints itself."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from kdist.display.tables import Column, number, print_prose, table
from kdist.verification.tolerance import KINDS, Difference, Tolerance

from rich.console import Console, RenderableType

SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Whether a batch gives over the mesh what it gives on one device.

    Example:
        >>> report = kdist.verify(model, x, y)
        >>> assert report.ok, report
        >>> report.dtype, report.differences
        ('float64', ())
    """

    ok: bool
    """True if nothing differs, or if what differs is put down to layers or settings that differ by
    design: without them, in a second comparison, nothing does."""

    differences: tuple[Difference, ...]
    """What is out of tolerance, worst first: in the comparison of the model as it is."""

    cause: str
    """The likely cause, "" where nothing differs."""

    first_layer: str | None
    """The first layer whose outputs differ between the whole batch and the rows of each replica."""

    explained_by: tuple[str, ...]
    """Layers and settings that the differences are put down to; empty if they are not."""

    unexplained: tuple[Difference, ...]
    """What differs in the second comparison too, worst first."""

    dtype: str
    """The dtype policy that was compared in."""

    way: str
    """What was compared: twins of the model, or the model itself, and why."""

    compared: Mapping[str, int]
    """Number of arrays of each kind that were compared."""

    tolerance: Tolerance
    """How far the two runs may be apart."""

    seconds: float
    """How long it took."""

    notes: tuple[str, ...] = ()
    """What else the user should know."""

    def __str__(self) -> str:
        text = io.StringIO()
        self.summary(Console(file=text, width=100, no_color=True))
        return text.getvalue().rstrip()

    def summary(self, console: Console | None = None) -> None:
        """Prints the report.

        Args:
            console: Where to print; standard output by default.
        """
        console = console or Console()
        print_prose(console, self.verdict)
        counts = ", ".join(f"{kind} {n}" for kind, n in self.compared.items())
        left_out = [kind for kind in KINDS if kind not in self.compared]
        lines = [f"arrays compared: {counts}"]
        lines += [f"not compared: {', '.join(left_out)}"] if left_out else []
        lines += [f"tolerance: {self.tolerance}", f"how: {self.way}"]
        lines += [f"first layer that differs: {self.first_layer}"] if self.first_layer else []
        if self.ok and self.differences:
            lines.append(f"arrays that differ with these: {len(self.differences)} (`differences`)")
        lines += [f"note: {note}" for note in self.notes]
        for line in lines:
            print_prose(console, f"  {line}")
        if self.differences and not self.ok:
            console.print(_table(self.differences, "as it is", console.width))
        if self.unexplained and self.unexplained != self.differences:
            title = "without what differs by design"
            console.print(_table(self.unexplained, title, console.width))

    @property
    def verdict(self) -> str:
        """The result in one line."""
        took = f"{self.dtype}, {self.seconds:.1f} s"
        if not self.differences:
            return f"Equal to one device ({took})."
        count = len(self.differences)
        what = f"{count} array{'s' * (count > 1)} differ{'s' * (count == 1)} from one device"
        if self.ok:
            return f"Equal to one device but for what differs by design ({took}). {self.cause}"
        return f"NOT equal to one device: {what} ({took}). Likely cause: {self.cause}"


def _table(differences: tuple[Difference, ...], title: str, width: int) -> RenderableType:
    shown = differences[:SHOWN]
    title = f"{title}, worst first: {len(shown)} of {len(differences)}"
    columns = [Column("array"), number("off"), number("allowed"), Column("where", prose=True)]
    rows = []
    for d in shown:
        allowed = f"{d.allowed / d.scale:.0e}" if d.scale else f"{d.allowed:.0e} absolute"
        rows.append((f"{d.kind} {d.name}", f"{d.relative:.1e}", allowed, d.text))
    return table(title, columns, rows, width)


class VerificationError(Exception):
    """Training was refused because the mesh does not give what one device gives.

    Attributes:
        verification: The report.

    Example:
        >>> config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), verify="first_step")
        >>> model = kdist.parallelize(build_model(), config)
        >>> model.compile("adam", "mse")
        >>> try:
        ...     model.fit(x, y)
        ... except kdist.VerificationError as error:
        ...     print(error.verification)
    """

    def __init__(self, verification: Verification) -> None:
        super().__init__(
            "verify='first_step' compared the first batch with one device before any update, and "
            f"refuses to train.\n{verification}\nRemove the cause, or set verify=None in "
            "ParallelConfig to train anyway. Received: verify='first_step'"
        )
        self.verification = verification

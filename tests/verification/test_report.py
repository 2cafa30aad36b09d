"""What a report prints."""

import io

import kdist
from kdist.verification.tolerance import KINDS, TOLERANCES, Difference

from rich.console import Console


def test_a_report_shows_whole_names_at_any_width():
    name = "sequential/a_block_with_a_long_name/attention_output/kernel"
    found = tuple(Difference(kind, name, 1.0, 2.0, 1e-9, "1 and 2") for kind in KINDS)
    report = kdist.Verification(
        ok=False,
        differences=found,
        cause="a cause",
        first_layer="up",
        explained_by=(),
        unexplained=found[:1],
        dtype="float64",
        way="twins",
        compared={"output": 1, "loss": 2},
        tolerance=TOLERANCES["float64"],
        seconds=1.0,
        notes=("a note [in brackets]",),
    )
    for width in (60, 80, 120):
        text = io.StringIO()
        report.summary(Console(file=text, width=width))
        assert text.getvalue().count(name) == len(KINDS) + 1
        assert "a note [in brackets]" in text.getvalue()
    assert "NOT equal" in str(report) and "a cause" in str(report)

"""What a program needs at once, before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.graphs.chunks import Chunk
from kdist.graphs.program_peak import activation_peak, pushed_down

import pytest


@pytest.mark.parametrize("given", [["a:out:0", "b:out:0"], ["b:out:0"]], ids=["all", "some"])
def test_a_node_that_passes_on_several_tensors(given: list[str]) -> None:
    """Of what it is given, what is known before it runs is not among its inputs."""
    inputs = {"a": [], "b": [], "both": given, "end": ["both:output:1", "both:output:0"]}
    kinds = {"a": "MatMul", "b": "MatMul", "both": "IdentityN", "end": "MatMul"}
    found = activation_peak(
        [Chunk((), tuple(inputs), ("end:out:0",))],
        inputs,
        ["end:out:0"],
        [],
        kinds.__getitem__,
        lambda reference: 4,
        calls=False,
    )
    assert 8 <= found <= 12


def test_a_constant_that_moves_takes_the_gradient_along() -> None:
    """Of `(gradient * slope) * half` becomes `(slope * half) * gradient`."""
    inputs: dict[str, list[str]] = {
        "gradient": [],
        "slope": [],
        "half": [],
        "first": ["gradient:0", "slope:0"],
        "second": ["first:0", "half:0"],
    }
    kinds = {"first": "Mul", "second": "Mul", "half": "Const"}
    seeded = {"gradient", "first", "second"}

    def of(results: list[str], **others: str) -> dict[str, Sequence[str]]:
        return pushed_down(inputs, results, lambda n: (kinds | others).get(n, "Tanh"), seeded)

    moved = of(["second:0"])
    assert moved["first"] == ["slope:0"]
    assert moved["second"] == ["first:0", "half:0", "gradient:0"]
    assert of(["first:0"]) == inputs  # others read it
    assert of(["second:0"], half="Tanh") == inputs

"""What a program needs at once, before it runs."""

from __future__ import annotations

from kdist.graphs.chunks import Chunk
from kdist.graphs.program_peak import activation_peak

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

"""Lists of host names."""

from kdist.cluster.host_list import expanded, host_file

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7]a,login", ["gpu01a", "gpu02a", "gpu03a", "gpu7a", "login"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_expanded(text: str, names: list[str]) -> None:
    assert expanded(text) == names


@pytest.mark.parametrize("text", ["a[3-1]", "a[x]", "a[1-]", "a[]", "a[1-2", "a1-2]"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="A range in a list of hosts"):
        expanded(text)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 30))))
def test_ranges_say_what_they_are_made_of(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first}-{first + more}]" for name, first, more in parts)
    wanted = [f"{n}{i}" for n, first, more in parts for i in range(first, first + more + 1)]
    assert expanded(text) == wanted


def test_host_file() -> None:
    assert host_file("a slots=2\n\n# no\nb # one\n") == [("a", 2), ("b", 1)]
    with pytest.raises(ValueError, match="'host slots=n'"):
        host_file("a slots=0")

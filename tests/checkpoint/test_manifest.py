"""What a checkpoint says of itself, as text."""

import json

from kdist.checkpoint.manifest import (
    CheckpointError,
    DamagedError,
    Manifest,
    SavedArray,
    SavedPart,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
PARTS = st.builds(SavedPart, st.text(), SHAPES, SHAPES)
ARRAYS = st.builds(
    SavedArray,
    st.text(),
    SHAPES,
    st.sampled_from(["float32", "int64"]),
    st.tuples(PARTS),
    st.sampled_from(["", "1-6-9/39"]),
)
MANIFESTS = st.builds(
    Manifest,
    st.integers(0, 10**9),
    st.dictionaries(st.text(), st.lists(ARRAYS, max_size=3).map(tuple), max_size=3),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.dictionaries(st.text(), st.text(), max_size=2),
    st.text(),
)


@given(MANIFESTS)
def test_a_manifest_is_read_as_it_was_written(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest


@given(MANIFESTS, st.data())
def test_every_changed_or_missing_character_is_found(manifest, data):
    text = manifest.to_json()
    at = data.draw(st.integers(0, len(text) - 2))
    for damaged in (text[:at], text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]):
        with pytest.raises(CheckpointError):
            Manifest.from_json(damaged)


def test_another_format_is_named():
    text = Manifest(1, {}).to_json()
    head = json.loads(text.partition("\n")[0])
    other = json.dumps({**head, "format": "kdist checkpoint 9"}) + "\n" + text.partition("\n")[2]
    with pytest.raises(CheckpointError, match="kdist checkpoint 9") as caught:
        Manifest.from_json(other)
    assert not isinstance(caught.value, DamagedError)


def test_what_reads_no_codes_refuses_them_and_reads_all_else():
    """A version from before them knows the first format alone."""
    part = SavedPart("0", (0,), (2,))
    for codes, number in (("", 1), ("1-6-9/39", 2)):
        made = Manifest(1, {"optimizer": (SavedArray("m", (2,), "float32", (part,), codes),)})
        head, _, body = made.to_json().partition("\n")
        assert json.loads(head)["format"] == f"kdist checkpoint {number}"
        assert Manifest.from_json(f"{head}\n{body}") == made

"""What a run leaves behind, and the check that two runs left the same.

The yardstick of float64 is a relative 1e-9 of each tensor's own scale (its largest magnitude). Two
correct programs differ by rounding, some 1e-15 of the terms that they add up, so 1e-9 leaves room
for deep sums and cancellation and still sees one example in a billion counted wrong.

A tensor far smaller than its kind (a bias that should stay zero, moved by rounding alone) has no
scale of its own worth measuring by, so the allowance has a floor: 1e-12 of the largest tensor of
the same kind, where weights, predictions and each kind of optimizer slot are kinds. Kinds matter:
second moments are squares of gradients, and a floor taken from weights would hide them.

Parameters whose true gradient is zero are the exception: an optimizer that normalises (Lion takes
the sign) turns rounding into whole steps of the learning rate, in every implementation. The
model's function does not depend on them, which the comparison of predictions confirms, so they are
held to the distance that such steps can span.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from kdist.verification.tolerance import gap, magnitude

import numpy as np

from .undecided import NAME, undecided_of

Arrays = Mapping[str, np.ndarray]
EXAMPLES_SHOWN = 6


class EquivalenceError(AssertionError):
    """Two runs that must be equal are not."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart.

    Attributes:
        relative: Allowance relative to a tensor's largest magnitude.
        floor: Allowance relative to the largest magnitude of the tensor's kind.
        parts: The parts of an `Outcome` that are compared.
        counting: Relative allowance of an AUC, if larger.
    """

    relative: float
    floor: float
    parts: tuple[str, ...] = ("history", "evaluation", "predictions", "weights", "slots")
    counting: float = 0.0


FLOAT64 = Tolerance(relative=1e-9, floor=1e-12)
# After 20 steps in float32 only the loss has a bound that holds for every model.
FLOAT32 = Tolerance(relative=1e-5, floor=1e-5, parts=("history",))
# Bits of the significand, the implicit one included.
HALF_BITS: Mapping[str, int] = {"mixed_float16": 11, "mixed_bfloat16": 8}
HALF_FACTOR = 2
# A count is a step function of the outputs, so nothing follows for it from eps. An accuracy may
# differ by the examples that rounding decides (`undecided`). An AUC has no such count: one logit
# that rounds to the other side moves it by a hundredth of itself, over 16 examples.
HALF_COUNTING = 2e-2
COUNTING = re.compile(r"(^|_)auc$")
ACCURACY = re.compile(r"(^|_)accuracy$")
# Of a mean of ones and zeros in float32.
COUNT_ROUNDING = 1e-6


def eps_of(policy: str) -> float:
    """Distance from 1 to the next number of a mixed policy's half type."""
    return 2.0 ** (1 - HALF_BITS[policy])


def half(policy: str) -> Tolerance:
    """What the losses of two runs under a mixed policy may differ by: 2 eps of the half type.

    A stored half value is off by at most eps / 2 of itself, with eps = 2 ** (1 - bits). The loss is
    computed in float32, from logits z that are such values; a cross-entropy changes by at most
    sum |p - y| <= 2 times the largest change of z, so by 2 * eps / 2 * |z| = eps * |z|, and a
    logit of these models is about as large as the loss: one eps for a run, two between two runs,
    which is the factor. Single logits reach five times the loss, and there are roundings before the
    logits and in the updates of the few steps that a row takes; but these errors are independent
    over features and examples, and the loss is a mean over those. Measured over the zoo, two
    correct runs are 0.84 eps apart at most.

    Args:
        policy: "mixed_float16" (eps 9.8e-4) or "mixed_bfloat16" (eps 7.8e-3).

    Returns:
        The tolerance, relative to each kind of loss; weights and slots have none that would hold.
    """
    allowed = HALF_FACTOR * eps_of(policy)
    return Tolerance(relative=allowed, floor=allowed, parts=("history",), counting=HALF_COUNTING)


TOLERANCES: Mapping[str, Tolerance] = {
    "float64": FLOAT64,
    "float32": FLOAT32,
    **{policy: half(policy) for policy in HALF_BITS},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything observable after training.

    Attributes:
        history: Name -> value per epoch and (`batch/...`) per batch.
        evaluation: Name -> value of `evaluate`.
        predictions: Output name -> array.
        weights: Variable path -> array, in Keras's order.
        slots: Optimizer variable path -> array, in Keras's order.
        drift: How far rounding alone can move a parameter: learning rate times updates.
    """

    history: Arrays
    evaluation: Arrays
    predictions: Arrays
    weights: Arrays
    slots: Arrays
    drift: float = 0.0


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One tensor out of tolerance; `excess` is the difference over the allowance."""

    name: str
    text: str
    excess: float


def _kind(part: str, name: str) -> str:
    # Slots are named `<optimizer>/<variable>_<slot>`; a count or a scale is a kind of its own.
    return f"{part}:{name.rsplit('_', 1)[-1]}" if part == "slots" else f"{part}:"


def _drifts(name: str, patterns: Sequence[str]) -> bool:
    flat = re.sub(r"\W", "_", name)
    return any(re.search(re.sub(r"/", "_", pattern), flat) for pattern in patterns)


def _compare_array(
    name: str, expected: np.ndarray, actual: np.ndarray, allowed: float
) -> Mismatch | None:
    found = gap(expected, actual, allowed, names=("expected", "got"))
    if found is None:
        return None
    relative = found.error / found.scale if found.scale else np.inf
    text = (
        f"off by {found.error:.3e} (allowed {found.allowed:.3e}, scale {found.scale:.3e}, relative "
        f"{relative:.3e}): {found.text}"
    )
    return Mismatch(name, text, found.error / found.allowed if found.allowed else np.inf)


def _mismatches(
    part: str,
    expected: Arrays,
    actual: Arrays,
    tolerance: Tolerance,
    drift: float,
    zero_gradient_paths: Sequence[str],
) -> Iterator[Mismatch]:
    if list(expected) != list(actual):
        extra = [name for name in actual if name not in expected]
        lost = [name for name in expected if name not in actual]
        text = f"names or their order differ: missing {lost}, unexpected {extra}"
        if not extra and not lost:
            text += f": expected {list(expected)}, got {list(actual)}"
        yield Mismatch(f"{part}", text, np.inf)
    if len(expected) == len(actual) and not set(expected) <= set(actual):
        # Other names, perhaps the same values: compare by position, so that the message tells.
        actual = dict(zip(expected, actual.values(), strict=True))
    scales: dict[str, float] = {}
    for name, array in expected.items():
        kind = _kind(part, name)
        scales[kind] = max(scales.get(kind, 0.0), magnitude(array))
    for name, array in expected.items():
        if name not in actual or name.endswith(NAME):
            continue
        allowed = tolerance.relative * magnitude(array)
        allowed = max(allowed, tolerance.floor * scales[_kind(part, name)])
        if part == "history" and COUNTING.search(name):
            allowed = max(allowed, tolerance.counting * magnitude(array))
        if part == "history" and ACCURACY.search(name) and undecided_of(name) in expected:
            allowed = COUNT_ROUNDING + magnitude(expected[undecided_of(name)])
        if part in ("weights", "slots") and _drifts(name, zero_gradient_paths):
            # Both runs wander, each at most one learning rate per update.
            allowed = max(allowed, 2.0 * drift)
        found = _compare_array(f"{part}: {name}", array, actual[name], allowed)
        if found is not None:
            yield found


def check_arrays(part: str, expected: Arrays, actual: Arrays, title: str = "") -> None:
    """Raises when named arrays of two runs differ, by the yardstick of float64.

    Args:
        part: What they are. Those of `slots` are of several kinds, told by the end of their names.
        expected: Name -> array of the reference.
        actual: Name -> array of the run under test, in the same order.
        title: What ran, for the message.

    Raises:
        EquivalenceError: Naming the worst arrays first.
    """
    _report([*_mismatches(part, expected, actual, FLOAT64, 0.0, ())], title)


def check(
    expected: Outcome,
    actual: Outcome,
    tolerance: Tolerance = FLOAT64,
    zero_gradient_paths: Sequence[str] = (),
    title: str = "",
) -> None:
    """Raises when two runs differ.

    Args:
        expected: Outcome of the reference.
        actual: Outcome of the run under test.
        tolerance: How far they may be apart, and what is compared.
        zero_gradient_paths: Patterns of parameters that only rounding moves.
        title: What ran, for the message.

    Raises:
        EquivalenceError: Naming the worst tensors first, or a name that only one run has.
    """
    found = [
        mismatch
        for part in tolerance.parts
        for mismatch in _mismatches(
            part,
            getattr(expected, part),
            getattr(actual, part),
            tolerance,
            expected.drift,
            zero_gradient_paths,
        )
    ]
    _report(found, title)


def _report(found: list[Mismatch], title: str) -> None:
    """Raises if there are mismatches, naming the worst first."""
    if not found:
        return
    found.sort(key=lambda mismatch: -mismatch.excess)
    lines = [f"{title or 'runs'}: {len(found)} tensors differ from the reference, worst first:"]
    lines += [f"  {item.name}: {item.text}" for item in found[:EXAMPLES_SHOWN]]
    if len(found) > EXAMPLES_SHOWN:
        lines.append(f"  ... and {len(found) - EXAMPLES_SHOWN} more")
    raise EquivalenceError("\n".join(lines))

"""Training over processes that chance kills, again and again, and that goes on each time."""

import json
import random
import re
import time
from pathlib import Path

from kdist.checkpoint import directory
from kdist.checkpoint.snapshot import check

import numpy as np
import pytest

from .processes import LIMIT_SECONDS, Process, program
from .test_joining import SOON_SECONDS, result

KILLS, EPOCHS, STEPS = 20, 100, 400
MOST_STEPS = 15
"""After which one is killed, however fast the machine is: all kills together leave steps over."""
STARTING_SECONDS = 12
"""In which processes start: one may be killed before the others know of it."""
COMING_SECONDS = 30


def told(process: Process) -> list[tuple[int, float, int]]:
    """Of each step: its number, the loss, and the step of the newest checkpoint by then."""
    found = []
    for line in list(process.lines):
        if line.startswith("STEP "):
            step, loss, saved = json.loads(line.removeprefix("STEP "))
            found.append((step, loss, int(re.split(r"[-.]", saved)[1]) if saved else 0))
    return found


def makes(process: Process, steps: int, seconds: float = LIMIT_SECONDS) -> None:
    """Waits until a process has told of so many steps, or for so long."""
    end = time.monotonic() + seconds
    while len(told(process)) < steps and time.monotonic() < end:
        assert process.process.poll() is None, process.text[-2000:]
        time.sleep(0.005)


@pytest.mark.long
def test_twenty_kills_lose_no_step_beyond_the_last_checkpoint(tmp_path: Path) -> None:
    """A third of them while processes start; either process, the one that writes included."""
    given = {"TEST_EPOCHS": str(EPOCHS), "TEST_START": str(COMING_SECONDS)}
    with program("survives", 2, TEST_FOLDER=str(tmp_path / "unbroken"), **given) as both:
        assert both[0].ends(300) == 0, both[0].text[-2000:]
    unbroken, wanted = {step: loss for step, loss, _ in told(both[0])}, result(both[0])
    assert len(unbroken) == STEPS

    draw, folder, saved = random.Random(13), tmp_path / "killed", 0
    for kill in range(KILLS):
        with program("survives", 2, TEST_FOLDER=str(folder), **given) as both:
            if kill % 3:
                makes(both[0], draw.randint(1, MOST_STEPS))
                time.sleep(0.02 * draw.random())
            else:
                makes(both[0], MOST_STEPS, STARTING_SECONDS * draw.random())
            chosen = draw.randrange(2)
            both[chosen].process.kill()
            codes = [one.ends(COMING_SECONDS + SOON_SECONDS) for one in both]
        assert codes[chosen] == -9 and 0 not in codes, both[0].text[-2000:]
        saved = goes_on(both[0], unbroken, saved)
        for whole in sorted(folder.glob("step-*/manifest.json")):
            check(whole.parent, directory.load(whole.parent))
    with program("survives", 2, TEST_FOLDER=str(folder), **given) as both:
        assert both[0].ends(300) == 0, both[0].text[-2000:]
    goes_on(both[0], unbroken, saved)
    found = result(both[0])
    np.testing.assert_array_equal(found["loss"], wanted["loss"])
    for mine, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_array_equal(mine, other)


def goes_on(process: Process, unbroken: dict[int, float], saved: int) -> int:
    """Checks that a start went on from what was saved before it; returns what is saved now."""
    steps = told(process)
    if not steps:
        return saved
    assert steps[0][0] >= saved + 1, "a step that a checkpoint had was computed once more"
    assert [step for step, *_ in steps] == list(range(steps[0][0], steps[0][0] + len(steps)))
    assert {step: loss for step, loss, _ in steps}.items() <= unbroken.items()
    return max(saved, steps[-1][2])

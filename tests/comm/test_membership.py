"""Who leaves the others when a program ends."""

from __future__ import annotations

import os

from kdist.comm import membership

import pytest


def test_a_fork_of_a_process_does_not_leave_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(membership, "leave", lambda: left.append(os.getpid()))
    if (child := os.fork()) == 0:
        membership._leave_at_exit(os.getppid())
        os._exit(len(left))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    membership._leave_at_exit(os.getpid())
    assert left == [os.getpid()]

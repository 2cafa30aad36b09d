"""Where processes of a strategy meet, and which cannot: without the processes."""

from __future__ import annotations

from kdist._compat import cluster_runtime
from kdist.cluster import beside_strategy
from kdist.cluster.errors import PeerError
from kdist.cluster.place import Place, split_address

import pytest
import tensorflow as tf

FIRST = Place(0, 2, "127.0.0.1:4000", "TF_CONFIG")
SECOND = Place(1, 2, "127.0.0.1:4000", "TF_CONFIG", address="127.0.0.1:4001")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The texts of a coordination service."""
    said: dict[str, str] = {}

    class Running:
        _collective_ops_server_def = None

        def set_config_key_value(self, name: str, text: str) -> None:
            said[name] = text

        def get_config_key_value(self, name: str, milliseconds: int) -> str:
            assert milliseconds == 3000
            if name not in said:
                raise tf.errors.DeadlineExceededError(None, None, "nobody has said it")
            return said[name]

    monkeypatch.setattr(cluster_runtime.context, "context", Running)
    return said


def test_all_meet_at_an_address_that_the_strategy_has_not(table: dict[str, str]) -> None:
    with pytest.raises(PeerError, match=r"did not call kdist.init within 3 s.*nobody has said it"):
        beside_strategy.place_beside(SECOND, 3)
    first = beside_strategy.place_beside(FIRST, 3)
    beside_strategy.tell_where(first)
    second = beside_strategy.place_beside(SECOND, 3)
    assert first.coordinator == second.coordinator != FIRST.coordinator
    assert split_address(first.coordinator, "a test")[0] == "127.0.0.1"
    assert first.address is None and second.address is None


def test_other_starts_of_tensorflow_are_refused(
    table: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"before TensorFlow starts.*process 1 of 2"):
        beside_strategy.check_strategy(SECOND)
    monkeypatch.setattr(cluster_runtime, "strategy_job", lambda: "worker")
    beside_strategy.check_strategy(SECOND)
    with pytest.raises(ValueError, match="TF_CONFIG alone says"):
        beside_strategy.check_strategy(Place(1, 2, "127.0.0.1:4000", "KDIST_*"))
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"chief": ["a:1"], "worker": ["a:2"]}}')
    with pytest.raises(ValueError, match="Leave 'chief' out"):
        beside_strategy.check_strategy(SECOND)

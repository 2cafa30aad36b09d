"""Messages between processes, and who is let in."""

import json
import socket
import threading
from collections.abc import Iterator

from kdist.cluster.channel import Channel, Refused, call, let_in

import pytest


@pytest.fixture
def both() -> Iterator[tuple[Channel, Channel]]:
    one, other = _pair()
    ends = Channel(one), Channel(other)
    yield ends
    for end in ends:
        end.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def test_messages_arrive_in_order(both: tuple[Channel, Channel]) -> None:
    one, other = both
    for i in range(100):
        one.send(number=i, text="a\nb")
    assert [other.receive(5) for _ in range(100)] == [
        {"number": i, "text": "a\nb"} for i in range(100)
    ]


def test_silence_and_an_end(both: tuple[Channel, Channel]) -> None:
    one, other = both
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    one.send(after="silence")
    assert other.receive(5) == {"after": "silence"}
    one.close()
    with pytest.raises(EOFError):
        other.receive(5)


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"\xff\xfe\n"])
def test_what_is_no_message(line: bytes) -> None:
    raw, other = _pair()
    end = Channel(other)
    raw.sendall(line)
    with pytest.raises(Refused):
        end.receive(5)
    raw.close()
    end.close()


def _let_in(channel: Channel, token: str, found: list) -> threading.Thread:
    def serve() -> None:
        try:
            found.append(let_in(channel, token))
        except Refused as error:
            found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_who_knows_the_token_is_let_in(both: tuple[Channel, Channel]) -> None:
    found: list = []
    thread = _let_in(both[0], "a token", found)
    call(both[1], "a token", 3)
    thread.join()
    assert found == [3]


def test_who_does_not_is_told_so(both: tuple[Channel, Channel]) -> None:
    found: list = []
    thread = _let_in(both[0], "a token", found)
    with pytest.raises(Refused, match="does not know the token"):
        call(both[1], "another", 3)
    thread.join()
    assert isinstance(found[0], Refused)


def test_process_0_must_know_the_token_too() -> None:
    raw, other = _pair()
    end = Channel(other)
    raw.sendall(json.dumps({"drawn": "x"}).encode() + b"\n")
    raw.sendall(json.dumps({"proof": "of nothing"}).encode() + b"\n")
    with pytest.raises(Refused, match="does not know the token"):
        call(end, "a token", 1)
    raw.close()
    end.close()


def test_the_token_is_not_sent() -> None:
    raw, other = _pair()
    end = Channel(other)
    raw.sendall(json.dumps({"drawn": "x"}).encode() + b"\n")
    raw.sendall(json.dumps({"proof": ""}).encode() + b"\n")
    with pytest.raises(Refused):
        call(end, "a secret token", 1)
    raw.settimeout(5)
    assert b"secret" not in raw.recv(4096)
    raw.close()
    end.close()

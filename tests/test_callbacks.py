from .parity import mlp
def test_a():
    assert mlp()

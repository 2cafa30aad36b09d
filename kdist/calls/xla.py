"""XLA compiles functions of one device."""

from __future__ import annotations

from kdist._compat.function_graphs import within_xla


def refuse_within_xla(what: str) -> None:
    """Refuses what runs on several devices, in a function that XLA compiles.

    Args:
        what: It, for the user.

    Raises:
        ValueError: It is in one.
    """
    if name := within_xla():
        raise ValueError(
            f"{what} runs on the devices of the mesh, and XLA compiles a function of one device. "
            "Leave jit_compile=True out of that tf.function; model.compile(jit_compile=True) has "
            f"XLA compile calls of layers. Received: tf.function {name!r} with jit_compile=True"
        )

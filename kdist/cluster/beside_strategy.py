"""Processes in which a `MultiWorkerMirroredStrategy` has started servers of its own.

Its servers stay as they are: those of the program are others, at other ports. Where process 0 waits
is said through the strategy's own coordination service, since its ports are all that TF_CONFIG has.
"""

from __future__ import annotations

import dataclasses
import os
import socket

from kdist._compat import cluster_runtime
from kdist.cluster.errors import PeerError
from kdist.cluster.place import Place, joined_address, split_address
from kdist.cluster.sources import ADDRESS

NAME = "kdist/coordinator"


def check_strategy(place: Place) -> None:
    """Refuses to join where TensorFlow has started, other than by a strategy of TF_CONFIG.

    Raises:
        ValueError: See above.
    """
    job = cluster_runtime.strategy_job()
    if job is None or place.source != "TF_CONFIG":
        raise ValueError(
            "A process joins the others before TensorFlow starts. Call kdist.init right after the "
            "imports, before any tensor, variable, layer or kdist.comm.connect; or after a "
            "MultiWorkerMirroredStrategy, where TF_CONFIG alone says which processes there are. "
            f"Received: process {place.process} of {place.count}, from {place.source}"
        )
    text = os.environ.get("TF_CONFIG", "")
    if job != cluster_runtime.JOB or '"chief"' in text:
        raise ValueError(
            "Variables of a strategy keep the names of its processes, which are those of kdist if "
            "all are workers. Leave 'chief' out of TF_CONFIG, and let the first worker be it; or "
            f"leave the strategy out. Received: TF_CONFIG={text}"
        )


def place_beside(place: Place, seconds: float) -> Place:
    """A process's place, of TF_CONFIG, with addresses that are not the strategy's.

    Args:
        place: As TF_CONFIG says it.
        seconds: Within which process 0 has to say where it waits.

    Raises:
        PeerError: It did not.
    """
    own = os.environ.get(ADDRESS)
    if place.process == 0:
        host, _ = split_address(place.coordinator, place.source)
        return dataclasses.replace(place, coordinator=_free(host), address=own)
    try:
        coordinator = cluster_runtime.heard_in_strategy_cluster(NAME, seconds)
    except TimeoutError as error:
        raise PeerError(
            f"Process 0 did not call kdist.init within {seconds:g} s: each worker of the strategy "
            f"calls it, after the strategy is made. Received: {error}",
            [0],
        ) from error
    return dataclasses.replace(place, coordinator=coordinator, address=own)


def tell_where(place: Place) -> None:
    """Says where process 0 waits, once it does."""
    cluster_runtime.say_to_strategy_cluster(NAME, place.coordinator)


def _free(host: str) -> str:
    """An address of this machine at a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.bind(("", 0))
        return joined_address(host, int(one.getsockname()[1]))

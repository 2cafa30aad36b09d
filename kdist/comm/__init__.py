"""Collectives over a named mesh axis, by an algorithm of choice, in one process or several.

Example:
    >>> kdist.init(cpu_devices=8)
    >>> mesh = kdist.mesh(data=4)
    >>> values = [tf.fill((2,), float(rank)) for rank in range(4)]
    >>> kdist.comm.all_reduce(values, mesh, "data", algorithm="ring")
    >>> print(kdist.comm.schedule("all_reduce", "ring", 4))
    >>> kdist.comm.predict("all_reduce", "ring", 8, 4, kdist.comm.LinkCost(a=1e-5, b=1e-10))
"""

from kdist.cluster.errors import PeerError
from kdist.comm.algorithms import ALGORITHMS, schedule
from kdist.comm.calibration import calibrate
from kdist.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from kdist.comm.cost import LinkCost, cheapest, predict
from kdist.comm.group import Group
from kdist.comm.host import HostCost
from kdist.comm.membership import connect, leave
from kdist.comm.messages import Message, Schedule
from kdist.comm.ordered import barrier, recv, scan, send, send_recv
from kdist.comm.processes import Connection, named_errors
from kdist.comm.tape import GradientTape

__all__ = [
    "ALGORITHMS",
    "Connection",
    "GradientTape",
    "Group",
    "HostCost",
    "LinkCost",
    "Message",
    "PeerError",
    "Schedule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "calibrate",
    "cheapest",
    "connect",
    "gather",
    "leave",
    "named_errors",
    "predict",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "schedule",
    "send",
    "send_recv",
]

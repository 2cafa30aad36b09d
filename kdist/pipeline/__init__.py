"""Pipeline parallelism: schedules, their proofs and charts, and how a model is cut into stages.

Everything here is pure: no device is touched.
"""

from kdist.pipeline.chart import Chart
from kdist.pipeline.check_work import check_work
from kdist.pipeline.communication import Message, Receive, Send, check_actions, stage_actions
from kdist.pipeline.csv_file import read_csv, write_csv
from kdist.pipeline.formulas import bubble_formula, live_formula
from kdist.pipeline.graph import Graph, GraphNode
from kdist.pipeline.instructions import (
    Await,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Free,
    Gather,
    Instruction,
    Penalty,
    Reduce,
    Update,
    WeightInstruction,
)
from kdist.pipeline.known_schedules import NAMES, get_schedule
from kdist.pipeline.partition import Partition, partition
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.simulate import Costs, Simulation, simulate
from kdist.pipeline.timeline import Event, Timeline, chrome_trace, write_trace
from kdist.pipeline.validate import validate
from kdist.pipeline.work import WeightUse, Work, work_of

__all__ = [
    "NAMES",
    "Await",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Chart",
    "Costs",
    "Event",
    "Forward",
    "Free",
    "Gather",
    "Graph",
    "GraphNode",
    "Instruction",
    "Message",
    "Partition",
    "Penalty",
    "Receive",
    "Reduce",
    "Schedule",
    "Send",
    "Simulation",
    "Timeline",
    "Update",
    "WeightInstruction",
    "WeightUse",
    "Work",
    "bubble_formula",
    "check_actions",
    "check_work",
    "chrome_trace",
    "get_schedule",
    "live_formula",
    "partition",
    "read_csv",
    "simulate",
    "stage_actions",
    "validate",
    "work_of",
    "write_csv",
    "write_trace",
]

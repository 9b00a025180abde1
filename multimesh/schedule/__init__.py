"""In which order the tasks of a step run: schedules as data, made, simulated and checked.

    graph      what is scheduled: tasks, dependencies, devices
    order      a schedule, and its text form
    policy     priorities, and how many microbatches may be in flight
    machine    the event simulation that makes and tries schedules
    simulate   tries a schedule: one total order, makespan, bubble, peak memory
    builders   1F1B, GPipe

Plain Python: neither JAX nor MPI is imported here.
"""

from multimesh.schedule.builders import build
from multimesh.schedule.graph import Dependency, ScheduledTask, TaskGraph
from multimesh.schedule.order import Action, Schedule, action_text, format_schedule, parse_schedule
from multimesh.schedule.policy import caps
from multimesh.schedule.simulate import Timeline, simulate, validate

__all__ = [
    "Action",
    "Dependency",
    "Schedule",
    "ScheduledTask",
    "TaskGraph",
    "Timeline",
    "action_text",
    "build",
    "caps",
    "format_schedule",
    "parse_schedule",
    "simulate",
    "validate",
]

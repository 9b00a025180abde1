"""In which order the tasks of a step run: schedules as data, made, simulated and checked.

    graph      what is scheduled: tasks, dependencies, devices
    order      a schedule, and its text form
    policy     priorities, and how many microbatches may be in flight
    machine    the event simulation that makes and tries schedules
    simulate   tries a schedule: one total order, makespan, bubble, peak memory
    custom     schedules that a user writes down
    builders   1F1B, GPipe, wavefront

Plain Python: neither JAX nor MPI is imported here.
"""

from multimesh.schedule.builders import SCHEDULES, build
from multimesh.schedule.custom import custom_text
from multimesh.schedule.graph import Dependency, ScheduledTask, TaskGraph
from multimesh.schedule.order import Action, Schedule, action_text, format_schedule, parse_schedule
from multimesh.schedule.policy import caps
from multimesh.schedule.simulate import Timeline, simulate, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Dependency",
    "Schedule",
    "ScheduledTask",
    "TaskGraph",
    "Timeline",
    "action_text",
    "build",
    "caps",
    "custom_text",
    "format_schedule",
    "parse_schedule",
    "simulate",
    "validate",
]

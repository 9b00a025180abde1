"""The public API: tasks, losses that are exact over microbatches, batches and values.

`multimesh.jax.flax` has the steps for Flax models.
"""

from multimesh.jax._fetch import fetch
from multimesh.jax._loss import Weighted
from multimesh.jax._prefetch import prefetch
from multimesh.stages.registry import Task, TaskMesh, clear_tasks, register_task

__all__ = ["Task", "TaskMesh", "Weighted", "clear_tasks", "fetch", "prefetch", "register_task"]

"""The public API: tasks, programs over several submeshes, batches and values.

`multimesh.jax.flax` has the steps for Flax models.
"""

from multimesh.jax._constraint import mjit, with_sharding_constraint
from multimesh.jax._contexts import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    ignore_transforms,
    only_fuse_loop_tasks,
    tasks,
)
from multimesh.jax._fetch import fetch
from multimesh.jax._loss import Weighted
from multimesh.jax._microbatch import microbatch
from multimesh.jax._parallelize import parallelize
from multimesh.jax._prefetch import prefetch
from multimesh.jax._task import task
from multimesh.stages.meshes import TaskMesh
from multimesh.stages.registry import clear_tasks, register_task
from multimesh.stages.tasks import Task

__all__ = [
    "Task",
    "TaskMesh",
    "Weighted",
    "autoshard",
    "clear_tasks",
    "context",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "fetch",
    "ignore_transforms",
    "microbatch",
    "mjit",
    "only_fuse_loop_tasks",
    "parallelize",
    "prefetch",
    "register_task",
    "task",
    "tasks",
    "with_sharding_constraint",
]

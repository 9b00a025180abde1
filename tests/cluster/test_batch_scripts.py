"""The batch scripts of examples/slurm run as they are, on a real SLURM."""

import re
import shutil

import pytest
from support import jobs, slurm_jobs

EXAMPLES = jobs.REPOSITORY / "examples" / "slurm"
STEPS = 40


@pytest.fixture
def folder(tmp_path):
    """A copy of the examples: what runs there leaves files."""
    return shutil.copytree(EXAMPLES, tmp_path / "slurm")


@pytest.fixture(scope="module")
def one_node(slurm, tmp_path_factory):
    """The job of one_node.sbatch, run to its end."""
    folder = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("one_node") / "slurm")
    job = slurm.submit(folder / "one_node.sbatch", "--steps", str(STEPS))
    job.wait()
    return job


def steps(output):
    """The numbers of the steps that rank 0 has shown."""
    return list(map(int, re.findall(r"^\[0\] step (\d+): loss", output, re.MULTILINE)))


def test_one_node(one_node):
    assert (one_node.state().name, one_node.state().code) == ("COMPLETED", 0), one_node.output
    assert steps(one_node.output) == list(range(STEPS))
    assert re.search(r"2 ranks by srun --mpi=\w+", one_node.output)


def test_several_nodes(slurm, folder):
    job = slurm.submit(folder / "several_nodes.sbatch", "--steps", "3")
    state = job.wait()
    assert (state.name, state.code) == ("COMPLETED", 0), job.output
    assert steps(job.output) == [0, 1, 2]
    assert re.search(r"4 ranks by srun --mpi=\w+", job.output)


def test_array(slurm, folder):
    job = slurm.submit(folder / "array.sbatch", "--steps", "2", options=["--array=0-1"])
    tasks = [slurm_jobs.Job(f"{job.number}_{seed}", job.script) for seed in (0, 1)]
    for seed, task in enumerate(tasks):
        assert task.wait().name == "COMPLETED", task.output
        assert steps(task.output) == [0, 1]
        assert (folder / f"seed_{seed}.state").exists()
    assert tasks[0].output.splitlines()[1:] != tasks[1].output.splitlines()[1:]  # other losses


def test_preempted_and_requeued(slurm, folder, one_node):
    """Preempted in the middle, it ends with the same bits as if it had never been."""
    preempted = slurm.submit(
        folder / "preempt_requeue.sbatch",
        *("--steps", str(STEPS), "--pause", "0.1"),  # long enough to be interrupted
    )
    preempted.wait_until(lambda: "step 2:" in preempted.output)
    preempted.signal("USR1")
    preempted.wait_for_requeue()
    state = preempted.wait()
    assert (state.name, state.code) == ("COMPLETED", 0), preempted.output
    first, second = map(steps, preempted.output.split("mmrun: preempted by SIGUSR1"))
    assert first and second
    assert first + second == list(range(STEPS))
    whole = one_node.script.with_name("train.state")
    assert (folder / "train.state").read_bytes() == whole.read_bytes()

"""Ways to start ranks inside a SLURM job, other than the batch scripts."""

import sys
import textwrap
import uuid

import pytest
from support import processes

PMI = {"openmpi": "pmix", "mpich": "pmi2"}
JOIN = """
import sys
from multimesh import init
init(cpus=4)
import jax
import numpy as np
from jax.experimental import multihost_utils
everyone = multihost_utils.process_allgather(np.array(jax.process_index()))
sys.stdout.write(f"ranks {everyone} devices {jax.device_count()}\\n")  # in one piece
"""
JOINED = "ranks [0 1] devices 4"


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(JOIN)
    return path


def test_mmrun_uses_the_pmi_of_the_mpi(slurm, mpi, program):
    kind, python = mpi
    result = slurm.salloc(2, "mmrun", python, program)
    assert result.returncode == 0, result.stderr
    assert f"2 ranks by srun --mpi={PMI[kind]}" in result.stderr
    assert set(result.stdout.splitlines()) == {f"[0] {JOINED}", f"[1] {JOINED}"}


def test_bare_srun(slurm, mpi, program):
    kind, python = mpi
    result = slurm.salloc(2, "srun", f"--mpi={PMI[kind]}", python, program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(JOINED) == 2  # among the chatter of gloo


@pytest.mark.parametrize(
    ("mpi", "pmi"),
    [("openmpi", "none"), ("openmpi", "pmi2"), ("mpich", "none")],
    indirect=["mpi"],
)
def test_a_wrong_pmi_is_an_error(slurm, mpi, program, pmi):
    kind, python = mpi
    result = slurm.salloc(2, "srun", f"--mpi={pmi}", "--kill-on-bad-exit=1", python, program)
    assert result.returncode != 0
    assert "ranks [" not in result.stdout
    assert "StartupError" in result.stderr
    assert f"--mpi={PMI[kind]}" in result.stderr


def test_two_jobs_in_one_allocation_do_not_meet(slurm, program):
    both = f"mmrun {sys.executable} {program} & mmrun {sys.executable} {program}; wait"
    result = slurm.salloc(2, "bash", "-c", both)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {JOINED}" for rank in (0, 0, 1, 1)]


def test_a_cancelled_job_leaves_no_process(slurm, tmp_path):
    (tmp_path / "wait.py").write_text(f"{JOIN}\nimport time\ntime.sleep(600)\n")
    script = tmp_path / "wait.sbatch"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH --job-name=wait --output=%x-%j.out --ntasks=2\n"
        "exec mmrun python wait.py\n"
    )
    tag = uuid.uuid4().hex
    job = slurm.submit(script, TESTS_JOB=tag)
    job.wait_until(lambda: job.output.count(JOINED) == 2)
    assert len(processes.with_variable("TESTS_JOB", tag)) > 4  # mmrun, srun, ranks
    job.cancel()
    assert job.wait().name == "CANCELLED"
    assert processes.none_left("TESTS_JOB", tag)


def test_a_notebook_in_an_allocation_is_alone(slurm, tmp_path):
    """What an interactive session does: no MPI, no jax.distributed, all devices in one process."""
    path = tmp_path / "cell.py"
    path.write_text(
        textwrap.dedent("""
            import os, sys
            from multimesh import init
            init(cpus=4)
            import jax
            assert os.environ["SLURM_NTASKS"] == "2"
            print(jax.device_count(), jax.process_count(), jax.distributed.is_initialized())
            print([name for name in sys.modules if name.startswith("mpi4py")])
            """)
    )
    result = slurm.salloc(2, sys.executable, path)
    assert result.stdout.splitlines() == ["4 1 False", "[]"], result.stderr

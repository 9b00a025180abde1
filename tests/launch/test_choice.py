"""What mmrun starts the ranks with, and on which hosts."""

import socket
import stat

import pytest

from multimesh.errors import StartupError
from multimesh.launch.environment import detect_launcher
from multimesh.launch.mmrun import slurm
from multimesh.launch.mmrun.choice import choose
from multimesh.launch.mmrun.hosts import Host, fill, parse_hosts, read_hostfile
from multimesh.launch.mmrun.library import MPI
from multimesh.launch.mmrun.options import parse_options

OPEN_MPI = MPI("openmpi", "Open MPI v5.0.11, package: x", "/mpi/bin/mpiexec", is_bundled=True)
MPICH = MPI("mpich", "MPICH Version:      5.0.2", "/mpi/bin/mpiexec")
RANK = ["python", "rank"]


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Puts an srun and a scontrol on PATH that answer as told."""

    def fake_slurm(pmis=("pmix", "pmi2"), task_plugin="task/affinity", nodes=("n1", "n2")):
        answers = {
            "srun": "MPI plugin types are...\n\t" + "\n\t".join(pmis),
            "scontrol": f"TaskPlugin = {task_plugin}",
        }
        for name, text in answers.items():
            path = tmp_path / name
            hosts = " ".join(nodes)
            path.write_text(
                f'#!/bin/sh\n[ "$1" = show ] && [ "$2" = hostnames ] && echo {hosts} &&'
                f' exit\necho "{text}"\n'
            )
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]" if len(nodes) > 1 else nodes[0],
            "SLURM_TASKS_PER_NODE": f"2(x{len(nodes)})",
            "SLURM_JOB_CPUS_PER_NODE": f"4(x{len(nodes)})",
            "SLURM_NTASKS": str(2 * len(nodes)),
        }

    return fake_slurm


def launch(words, mpi=OPEN_MPI, environ=None):
    return choose(parse_options([*words, "train.py"]), mpi, RANK, environ or {})


def test_here_by_mpiexec():
    job = launch(["-n", "3"])
    assert job.command[:3] == ("/mpi/bin/mpiexec", "-n", "3")
    assert job.command[-2:] == ("python", "rank")
    assert (job.ranks, job.hosts) == (3, ())
    assert job.reason == (
        "3 ranks by mpiexec of Open MPI 5.0.11 on this host (no SLURM job, no --hosts)"
    )


def test_the_number_of_ranks_must_come_from_somewhere():
    with pytest.raises(StartupError, match="-n N, --hosts, or a SLURM job"):
        launch([])


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_hosts(mpi):
    job = launch(["--hosts", "n1:2,n2:4", "-n", "3", "--rsh", "nsrsh"], mpi, {"PYTHONPATH": "/x"})
    assert "n1:2,n2:1" in job.command
    assert "nsrsh" in job.command
    assert (job.ranks, job.hosts) == (3, ("n1", "n2"))
    if mpi is OPEN_MPI:  # hydra takes the whole environment along
        forwarded = [job.command[i + 1] for i, word in enumerate(job.command) if word == "-x"]
        assert {"MULTIMESH_MMRUN", "PYTHONPATH", "OMPI_MCA_btl"} <= set(forwarded)


def test_what_describes_this_host_is_not_forwarded():
    environ = {"HOSTNAME": "here", "SSH_TTY": "1", "SLURM_JOB_X": "1", "BASH_FUNC_f%%": "() {}"}
    assert not environ.keys() & set(launch(["--hosts", "n1:2,n2:2"], environ=environ).command)


def test_this_host_by_its_name_needs_no_network():
    assert launch(["--hosts", f"{socket.gethostname()}:2"]).hosts == ()


def test_the_variables_of_an_outer_rank_are_dropped():
    outer = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMI_RANK": "0", "OMPI_MCA_x": "kept"}
    assert set(launch(["-n", "2"], environ=outer).environ) >= {"OMPI_MCA_x"}
    assert not set(launch(["-n", "2"], environ=outer).environ) & (outer.keys() - {"OMPI_MCA_x"})


@pytest.mark.parametrize(("mpi", "pmi"), [(OPEN_MPI, "pmix"), (MPICH, "pmi2")])
def test_srun_inside_a_job(fake_slurm, mpi, pmi):
    job = launch([], mpi, fake_slurm())
    assert job.command[0].endswith("srun")
    assert {f"--mpi={pmi}", "--kill-on-bad-exit=1", "--cpu-bind=none"} <= set(job.command)
    assert "--overcommit" not in job.command
    assert (job.ranks, job.hosts) == (4, ("n1", "n2"))
    assert f"srun --mpi={pmi}" in job.reason and "SLURM job 7" in job.reason
    assert "--overcommit" in launch(["-n", "9"], mpi, fake_slurm()).command
    assert "--cpu-bind=none" not in launch([], mpi, fake_slurm(task_plugin="task/none")).command


def test_srun_gets_the_settings_of_the_mpi_too(fake_slurm):
    here = launch([], environ=fake_slurm(nodes=(socket.gethostname(),)))
    assert here.environ["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert here.environ["OMPI_MCA_btl"] == "^ofi"
    assert "OMPI_MCA_btl" not in launch([], environ=fake_slurm()).environ  # their fabric is unknown


def test_one_node_needs_no_network(fake_slurm):
    assert launch([], environ=fake_slurm(nodes=(socket.gethostname(),))).hosts == ()
    assert launch([], environ=fake_slurm(nodes=("elsewhere",))).hosts == ("elsewhere",)


def test_mpiexec_where_srun_does_not_speak_the_pmi(fake_slurm):
    job = launch([], environ=fake_slurm(pmis=("pmi2",)))
    assert job.command[0] == OPEN_MPI.mpiexec
    assert "n1:2,n2:2" in job.command
    assert "no --mpi=pmix, which Open MPI 5.0.11 needs" in job.reason
    with pytest.raises(StartupError, match="no --mpi=pmix"):
        launch(["--backend", "srun"], environ=fake_slurm(pmis=("pmi2",)))


def test_a_wish_for_mpiexec_is_granted(fake_slurm):
    job = launch(["--backend", "mpirun"], environ=fake_slurm())
    assert job.command[0] == OPEN_MPI.mpiexec


def test_srun_needs_a_job():
    with pytest.raises(StartupError, match="sbatch or salloc"):
        launch(["--backend", "srun", "-n", "2"])


def test_slurms_repeated_numbers(fake_slurm):
    environ = fake_slurm(nodes=("a", "b", "c")) | {"SLURM_TASKS_PER_NODE": "2(x2),1"}
    nodes = slurm.read_allocation(environ).nodes
    assert nodes == (Host("a", 2), Host("b", 2), Host("c", 1))
    with pytest.raises(StartupError, match="do not agree"):
        slurm.read_allocation(environ | {"SLURM_TASKS_PER_NODE": "2"})


def test_no_slurm_job():
    assert slurm.read_allocation({}) is None


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291"])
def test_a_shell_inside_a_job_is_no_rank(step):
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"}
    assert detect_launcher(environ) is None


def test_host_lists(tmp_path):
    assert parse_hosts("n1:2,n2") == (Host("n1", 2), Host("n2", 1))
    file = tmp_path / "hosts"
    file.write_text("# ours\nn1:2\n\nn2 slots=3  # the large one\nn3\n")
    assert read_hostfile(str(file)) == (Host("n1", 2), Host("n2", 3), Host("n3", 1))


@pytest.mark.parametrize("text", ["", "n1:", "n1:0", "n1:x", "n1:1:2", ":2", "n1,n1", "-x:2", "a,"])
def test_bad_hosts_are_said_to_be_bad(text):
    with pytest.raises(StartupError, match=r"Expected|Got|twice"):
        parse_hosts(text)


def test_a_host_file_that_is_not_there():
    with pytest.raises(StartupError, match="no_such_file"):
        read_hostfile("no_such_file")


def test_filling_hosts():
    hosts = (Host("n1", 2), Host("n2", 2))
    assert fill(hosts, None) == hosts
    assert fill(hosts, 3) == (Host("n1", 2), Host("n2", 1))
    assert fill(hosts, 1) == (Host("n1", 1),)
    with pytest.raises(StartupError, match=r"at least 5 places.*Got 4 on n1:2, n2:2"):
        fill(hosts, 5)

"""`init`: the devices it gives, the mistakes it refuses, and how its ranks end."""

import sys
import time

import pytest

PYTHON = sys.executable

REPORT = """
from jax_plugins.multimesh import init
init(cpus=4)
import jax
print(jax.process_count(), len(jax.devices()), jax.local_device_count())
"""


def test_one_process_starts_neither_mpi_nor_a_coordinator(python):
    source = REPORT + (
        "import sys; print('mpi4py' in sys.modules, jax.distributed.is_initialized())"
    )
    ended = python("-c", source)
    assert ended.code == 0, ended.stderr
    assert ended.stdout == "1 4 4\nFalse False\n"
    assert not ended.stderr  # no complaint of JAX about the plug-in


def test_importing_multimesh_imports_neither_jax_nor_mpi(python):
    ended = python("-c", "import sys, multimesh; print({'jax', 'mpi4py'} & set(sys.modules))")
    assert ended.stdout == "set()\n"


def test_one_process_with_gloo(python):
    source = """
import multimesh
multimesh.init(cpus=2, collectives="gloo")
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",))
x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("x")))
assert jax.distributed.is_initialized()
total = jax.jit(jnp.sum)(x).block_until_ready()
print(total)
"""
    ended = python("-c", source)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "6.0"


def test_bad_arguments_and_calls(python, write):
    script = write(
        """
        import multimesh
        from multimesh.errors import StartupError

        def refused(**arguments):
            try:
                multimesh.init(**arguments)
            except StartupError as error:
                print(error)

        for cpus in (0, -1, 2.0, True, "8", [8]):
            refused(cpus=cpus)
        refused(collectives="mpi")
        multimesh.init(cpus=2)
        multimesh.init(cpus=2)
        refused(cpus=4)
        import jax
        print(len(jax.devices()))
        multimesh.init(cpus=2)
        """
    )
    lines = python(script).stdout.splitlines()
    assert [line.split("Got ")[1] for line in lines[:6]] == [
        "0.",
        "-1.",
        "2.0.",
        "True.",
        "'8'.",
        "[8].",
    ]
    assert lines[6].startswith("collectives must be")
    assert "a second time, with other arguments: cpus=4" in lines[7]
    assert lines[8:] == ["2"]


REFUSED = {
    "gpus must be a positive integer": {"gpus": 0},
    "Give cpus= or gpus=. Got both": {"cpus": 1, "gpus": 1},
    "JAX would use no GPU here": {"gpus": 1},
    "distributed must be True or False": {"distributed": 1},
    "this is a single process": {"distributed": True},
    "num_processes must be": {"num_processes": 2.0},
    "but 1 rank was started": {"num_processes": 2, "dump": "refused"},
    "process_id must be an integer": {"process_id": "0"},
    "but this is rank 0": {"process_id": 1},
    "positive seconds": {"initialization_timeout": -1},
    "at most 1000000. Got inf": {"initialization_timeout": float("inf")},
    "dump must be the name of a folder": {"dump": 3},
    "dump must be the name of a folder or None. Got ''": {"dump": ""},
    "coordinator_address must be a text": {"coordinator_address": ["localhost:1"]},
    "local_device_ids must be integers": {"local_device_ids": [[0], [1]]},
    "debug must be True or False": {"debug": "yes"},
}


def test_arguments_that_are_refused(python, write):
    script = write(
        f"""
        import os
        import multimesh
        from multimesh.errors import StartupError
        inf = float("inf")
        for words, arguments in {REFUSED!r}.items():
            try:
                multimesh.init(**arguments)
            except StartupError as error:
                if words not in str(error):
                    print(words, "is not in", error)
            else:
                print(arguments, "was accepted")
        if "MULTIMESH_DUMP" in os.environ:
            print("a refused call left something behind")
        multimesh.init(cpus=2, num_processes=1, process_id=0, distributed=False, debug=True)
        """
    )
    ended = python(script)
    assert (ended.code, ended.stdout) == (0, ""), ended.stderr


def test_arguments_that_have_no_meaning_say_so_once(mmrun, write):
    script = write(
        """
        import multimesh
        multimesh.init(
            cpus=2,
            coordinator_address="localhost:1",
            local_device_ids=[0],
            num_processes=2,
            debug=True,
        )
        import jax
        print(jax.config.jax_traceback_filtering)
        """
    )
    ended = mmrun(2, script)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("init(coordinator_address='localhost:1') is ignored: ") == 1
    assert ended.stderr.count("init(local_device_ids=(0,)) is ignored: ") == 1
    assert ended.lines == {"[0] off", "[1] off"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("distributed=False", "distributed=False, but 2 ranks were started"),
        ("num_processes=3", "num_processes=3, but 2 ranks were started"),
        ("process_id=0", "On rank 1: process_id=0, but this is rank 1"),
        ("initialization_timeout=30 + rank", "initialization_timeout=31 on rank 1"),
    ],
)
def test_what_a_program_says_of_its_ranks_is_checked(mmrun, write, arguments, words):
    script = write(
        f"""
        import multimesh
        from multimesh.launch.environment import detect_launcher
        from multimesh.errors import StartupError
        rank = detect_launcher().rank
        try:
            multimesh.init(cpus=2, {arguments})
        except StartupError as error:
            print(error)
        """
    )
    ended = mmrun(2, script)
    assert ended.stdout.count(words) == 2, ended.stdout + ended.stderr


def test_a_rank_that_is_missing_is_waited_for_as_long_as_init_says(mmrun, write):
    script = write(
        """
        import time
        import multimesh
        from multimesh.launch.environment import detect_launcher
        if detect_launcher().rank == 1:
            time.sleep(60)
        multimesh.init(cpus=2, initialization_timeout=3)
        """
    )
    began = time.time()
    ended = mmrun(2, script)
    assert ended.code != 0
    assert "rank 1" in ended.stderr
    assert ended.at - began < 30


def test_init_after_jax_has_started(python):
    ended = python("-c", "import jax, multimesh; jax.devices(); multimesh.init(cpus=2)")
    assert ended.code == 1
    assert "StartupError: multimesh.init was called after JAX had started" in ended.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("launcher", ["mmrun", "mpirun"])
def test_a_worker_of_a_rank_is_no_rank(request, write, launcher, method):
    """A data loader's worker runs the script's `init` again, with the rank's environment."""
    script = write(
        f"""
        import multiprocessing
        import jax, multimesh
        from multimesh.launch import require_init
        multimesh.init(cpus=2)
        def work(number):
            require_init()
            return number, jax.process_count(), jax.device_count()
        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print(pool.map(work, [3, 4]))
        """
    )
    ended = request.getfixturevalue(launcher)(2, script)
    assert ended.stdout.count("[(3, 1, 2), (4, 1, 2)]") == 2, ended.stderr


@pytest.mark.parametrize("launcher", ["mmrun", "mpirun"])
def test_ranks_that_end_right_after_init(request, write, launcher):
    run = request.getfixturevalue(launcher)
    ended = run(4, write(REPORT))
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("4 4 1\n") == 4
    assert not ended.stderr


@pytest.mark.parametrize("launcher", ["mmrun", "mpirun"])
def test_a_rank_that_is_done_waits_for_the_others(request, write, launcher):
    script = write(
        """
        import multimesh
        multimesh.init(cpus=4)
        import jax, sys, time
        if jax.process_index() == 1:
            sys.exit(0)
        time.sleep(3)
        try:
            sys.exit(5)
        except SystemExit:
            print("caught")
        """
    )
    ended = request.getfixturevalue(launcher)(2, script)
    assert ended.code == 0, ended.stderr
    assert "caught" in ended.stdout
    assert not ended.stderr


def test_devices_per_rank_overrides_the_program(mmrun, write):
    ended = mmrun(2, "--devices-per-rank", "3", PYTHON, write(REPORT))
    assert ended.lines == {"[0] 2 6 3", "[1] 2 6 3"}, ended.stderr


def test_a_proxy_is_not_asked_for_the_traffic_between_ranks(mmrun, write):
    proxy = "http://127.0.0.1:1"
    ended = mmrun(2, write(REPORT), http_proxy=proxy, https_proxy=proxy)
    assert ended.lines == {"[0] 2 4 2", "[1] 2 4 2"}, ended.stderr
    assert not ended.stderr


MISTAKES = {
    "uneven": ("cpus = 3", "cpus must be a multiple of the number of ranks. Got cpus=3 and 2"),
    "different": ("cpus = 2 + 2 * int(rank)", "cpus=2 on rank 0, cpus=4"),
    "started": ("cpus = 2; rank == '1' and jax.devices()", "On rank 1: multimesh.init was called"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_the_same_error_on_every_rank(mmrun, write, mistake):
    line, message = MISTAKES[mistake]
    script = write(
        f"""
        import os, jax, multimesh
        from multimesh.errors import StartupError
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        {line}
        try:
            multimesh.init(cpus)
        except StartupError as error:
            print(error)
        """
    )
    ended = mmrun(2, script)
    assert ended.code == 0, ended.stderr
    said = [line.split("] ", 1) for line in ended.stdout.splitlines()]
    assert {rank for rank, _ in said} == {"[0", "[1"}
    assert len({text for _, text in said}) == 1
    assert message in said[0][1]


def test_several_ranks_without_init(mmrun):
    ended = mmrun(2, PYTHON, "-c", "from multimesh.launch import require_init; require_init()")
    assert ended.code == 1
    assert "Open MPI started 2 ranks, but multimesh.init was not called" in ended.stderr


def test_a_launcher_that_mpi_does_not_know(python):
    source = "import multimesh; multimesh.init(cpus=2)"
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    ended = python("-c", source, **step)
    assert ended.code == 1
    assert "srun started 2 ranks, but MPI on rank 0 sees 1" in ended.stderr
    assert "--mpi=pmix" in ended.stderr


def test_jobs_at_the_same_time_do_not_meet(start_mmrun, write):
    script = write(
        """
        import sys, multimesh
        multimesh.init(cpus=2)
        import jax
        from multimesh import _compat
        store, rank = _compat.coordination_store(), jax.process_index()
        store.key_value_set(f"job of {rank}", sys.argv[1])
        print(store.blocking_key_value_get(f"job of {1 - rank}", 60_000))
        """
    )
    jobs = [start_mmrun(2, script, str(number)) for number in (1, 2)]
    for number, job in enumerate(jobs, 1):
        output, errors = job.communicate(timeout=90)
        assert job.returncode == 0, errors
        assert sorted(output.splitlines()) == [f"[0] {number}", f"[1] {number}"]


# Rank 1 meets the coordinator of another job so many times; each time all ranks start again.
STRANGERS = """
import sys, multimesh
from multimesh.errors import StartupError
from multimesh.launch import coordinator

has_nonce, strangers = coordinator._has_nonce, [int(sys.argv[1])]
def finds_strangers(nonce, rank, timeout):
    found = has_nonce(nonce, rank, timeout)
    if rank == 1 and strangers[0]:
        strangers[0] -= 1
        return False
    return found
coordinator._has_nonce = finds_strangers
try:
    multimesh.init(cpus=2)
    import jax
    print(len(jax.devices()), "devices")
except StartupError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("strangers", "says"), [(2, "2 devices"), (3, "belongs to another job, as those on 2 ports")]
)
def test_a_coordinator_of_another_job(mmrun, write, strangers, says):
    ended = mmrun(2, write(STRANGERS), str(strangers))
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count(says) == 2

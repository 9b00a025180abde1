"""Jobs over two hosts: their numbers, their traffic, and what a cut cable does to them."""

import contextlib
import functools
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
from support import host_lab, jobs, processes

PROGRAM = Path(__file__).parent / "programs" / "pipeline.py"
ROWS, WIDTH = 16, 2**14
STEPS = 4
TIME_LIMIT = 240
STALL_TIMEOUT = 5
CLEANUP = 20  # that long a host that is cut off believes that the others are slow


def mmrun(hosts, *words, python=sys.executable):
    """The command line of mmrun on the first host, for two ranks on each."""
    places = ",".join(f"{host}:2" for host in host_lab.HOSTS)
    command = [python, jobs.REPOSITORY / "scripts" / "mmrun", "--hosts", places, "--rsh", hosts.rsh]
    return hosts.on(host_lab.HOSTS[0], *command, *words)


def environment(**variables):
    # MPICH would otherwise find that the hosts share memory.
    settings = jobs.COMPILE_QUICKLY | {"UCX_TLS": "tcp,self"}
    return jobs.clean_environment() | settings | variables


def run(command):
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIME_LIMIT
    )


def result_of(ended):
    """What rank 0 printed last."""
    assert ended.returncode == 0, ended.stderr
    last = ended.stdout.splitlines()[-1]
    return json.loads(last.removeprefix("[0] "))


@functools.cache
def losses_of_one_process(layout):
    words = [sys.executable, PROGRAM, layout, STEPS, ROWS, WIDTH]
    return result_of(run(list(map(str, words))))["losses"]


def test_a_pipeline_over_two_hosts(hosts, mpi):
    _, python = mpi
    before = [hosts.bytes_from(host) for host in host_lab.HOSTS]
    result = result_of(
        run(mmrun(hosts, python, PROGRAM, "four", STEPS, ROWS, WIDTH, python=python))
    )
    np.testing.assert_allclose(result["losses"], losses_of_one_process("four"), rtol=1e-5)

    values = ROWS * WIDTH * 4  # activations one way, cotangents the other
    for number, host in enumerate(host_lab.HOSTS):
        planned = result["sent"][str(number)]
        assert values <= planned < values + 100  # and scalars: the loss
        sent = hosts.bytes_from(host) - before[number]
        assert STEPS * planned < sent < 2 * STEPS * planned, host


def test_stages_over_two_hosts_where_names_are_loopback(hosts):
    """Devices of both hosts add up gradients, though each host takes its own name for 127.0.1.1."""
    with contextlib.ExitStack() as stack:
        for host in host_lab.HOSTS:
            stack.enter_context(hosts.own_name_is_loopback(host))
        result = result_of(run(mmrun(hosts, sys.executable, PROGRAM, "spread", STEPS, ROWS, WIDTH)))
    np.testing.assert_allclose(result["losses"], losses_of_one_process("spread"), rtol=1e-5)


def test_a_cut_cable_ends_the_job(hosts, tmp_path):
    tag = uuid.uuid4().hex
    command = mmrun(
        hosts, "--stall-timeout", STALL_TIMEOUT, sys.executable, PROGRAM, "four", 0, ROWS, WIDTH
    )
    # What is left of it there keeps no other job from starting.
    environ = environment(TESTS_JOB=tag, PRTE_MCA_prte_remote_tmpdir_base=str(tmp_path))
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
    try:
        wait_until(lambda: "the first step is done" in output.read_text(), output)
        with hosts.cut_off(host_lab.HOSTS[1]):
            cut = time.monotonic()
            code = job.wait(TIME_LIMIT)
            seconds = time.monotonic() - cut
            assert processes.none_left("TESTS_JOB", tag, CLEANUP)
    finally:
        job.kill()
        job.wait()
    said = output.read_text()
    assert code != 0, said
    assert seconds < STALL_TIMEOUT + 5, said
    summary = said.splitlines()[-1]
    assert summary.startswith("mmrun: ")
    assert "mm2" in summary, said


def wait_until(condition, output):
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)

"""Jobs that hang: they end soon after the timeout, and say what every rank was doing."""

import re
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[1])
TIMEOUT = 3

# `take` and `barrier` wait in the package, `recv` in MPI.
SCRIPT = """
    import os, signal, sys, threading, time
    import multimesh
    multimesh.init(cpus=2)
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from mpi4py import MPI
    from multimesh.transport import Layout, Transfer, connect

    rank = jax.process_index()
    group, transport = connect()
    group.barrier("test")

    def recv():
        MPI.COMM_WORLD.recv(source=1 - rank)

    def take():
        layouts = (
            Layout((8,), np.dtype("f4"), NamedSharding(Mesh([d], "x"), PartitionSpec()))
            for d in jax.devices()
        )
        there, here = layouts if rank else reversed(list(layouts))
        channel = transport.open(Transfer("F0 -> F1", (there,), (here,)), depth=1)
        channel.post(2)
        channel.take(2)

    print("hangs at", time.time(), flush=True)
    if rank == 0:
        {first}
    else:
        {second}
"""
STEPS = """
    import sys
    sys.path.append({tests!r})
    import multimesh
    multimesh.init(cpus=2)
    import jax
    from mpi4py import MPI
    from support import cases

    case = cases.echo([4, 4])
    step, state, _ = cases.build(case, cases.apart(2, total=2), 2, 2)
    for number in range(5):
        # In the first three steps the ranks meet to compare their batches.
        if number == 3 and jax.process_index() == 1:
            {ending}
        loss, state = step(state, case.make_batch(2, 0))
        jax.block_until_ready(loss)
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
ENDINGS = {
    "two receives in MPI": (
        ["recv()", "recv()"],
        [
            r"No rank has moved for 3 s",
            r"rank 0 on \S+: .*script.py:\d+: MPI.COMM_WORLD.recv\(source=1 - rank\) \(for \d s\)",
            r"rank 1 on \S+: .*script.py:\d+: MPI.COMM_WORLD.recv\(source=1 - rank\) \(for \d s\)",
        ],
    ),
    "two messages that nobody sends": (
        ["take()", "take()"],
        [
            r"0 on \S+: .* waits \d\.\d s for rank 1 to send microbatch 2 of F0 -> F1 to rank 0",
            r"1 on \S+: .* waits \d\.\d s for rank 0 to send microbatch 2 of F0 -> F1 to rank 1",
            r"cycle: rank 0 waits for rank 1, rank 1 waits for rank 0",
            r"StallError: Rank (\d) waited 3 s for rank \d to send microbatch 2 of F0 -> F1 to",
        ],
    ),
    "a collective of JAX": (
        ["multihost_utils.sync_global_devices('never')", "recv()"],
        [r"No rank has moved for 3 s", r"rank 0 on \S+: .*sync_global_devices"],
    ),
    "rank 0 is stopped": (
        [STOP, "group.barrier('test')"],
        [r"rank 0 on \S+: does not answer: it is stopped", r"mmrun: rank 0 on .* SIGSTOP"],
    ),
    "rank 1 is stopped": (
        ["group.barrier('test')", STOP],
        [r"rank 1 on \S+: does not answer: it is stopped", r"mmrun: rank 1 on .* SIGSTOP"],
    ),
    "a rank that never ends": (
        ["pass", "threading.Event().wait()"],
        [
            r"rank 0 on \S+: at its end, .*: waits \d\.\d s for rank 1 to end",
            r"Event\(\)\.wait\(\) \(for",
        ],
    ),
}


def check_report(ended, expected):
    assert ended.code == 1, ended.output
    began = re.search(r"hangs at ([\d.]+)", ended.stdout)
    if began:
        assert ended.at - float(began[1]) < TIMEOUT + 5, ended.output
    for pattern in expected:
        assert re.search(pattern, ended.stderr), ended.output
    assert ended.stderr.count("What every rank does:") <= 1


@pytest.mark.parametrize("name", ENDINGS)
def test_a_hang_is_reported(mmrun, write, name):
    (first, second), expected = ENDINGS[name]
    script = write(SCRIPT.format(first=first, second=second))
    check_report(mmrun(2, script, MULTIMESH_STALL_TIMEOUT=str(TIMEOUT)), expected)


def test_a_rank_that_ended_early_is_named_at_once(mmrun, write):
    script = write(STEPS.format(tests=TESTS, ending="raise SystemExit"))
    ended = mmrun(2, script)
    check_report(
        ended,
        [
            r"Rank 1 ended its program with exit code 0 after 3 steps, but rank 0, after 4, waits",
            r"waits for it to (send|receive) .*last instruction that this rank finished: \w+ \w+",
            r"mmrun: rank 1 on \S+ ended with exit code 0",
        ],
    )


def test_a_step_that_hangs_tells_its_instruction(mmrun, write):
    script = write(STEPS.format(tests=TESTS, ending="MPI.COMM_WORLD.recv(source=0)"))
    ended = mmrun(2, script, MULTIMESH_STALL_TIMEOUT="3", MULTIMESH_STACKS="1")
    check_report(
        ended,
        [
            r"rank 0 on \S+: in step 4, take .*, microbatch 0: waits \d\.\d s for rank 1 to send "
            r"microbatch 0 of .* to rank 0; the last instruction that it finished: \w+ .*",
            r"rank 1 on \S+: outside a step, 3 steps done: script.py:\d+: MPI.COMM_WORLD.recv",
            r"Thread MainThread:\n.*script.py.*, in <module>\n.*MPI.COMM_WORLD.recv\(source=0\)",
        ],
    )

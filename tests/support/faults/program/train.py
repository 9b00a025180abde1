"""A small training program, one of whose ranks is hit by a fault.

    mmrun -n 2 python train.py --ranks 2 --kind raise --rank 1 --moment in-step --struck FILE

It runs by itself under any launcher, and knows nothing of the tests. When the fault strikes, it
makes FILE.
"""

import argparse
import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax  # as users do; otherwise init imports it, and the ranks meet later
import numpy as np

from multimesh import init
from multimesh.launch.environment import detect_launcher

STEPS = 2
WIDTH = 2
FOREVER = 600  # seconds


class InjectedFault(Exception):
    pass


def main():
    options = parse_options()
    fault = Fault(options)
    fault.may_strike("before-init")
    init(cpus=options.ranks)
    # What takes seconds; meanwhile the others would not have come to where they wait.
    import multimesh.jax  # noqa: F401

    fault.may_strike("before-first-step")
    step_fn, state = build_step(options.ranks)
    for step in range(STEPS):
        if step == STEPS - 1:
            fault.may_strike("between-steps")
            fault.will_strike_in_step()
        loss, state = step_fn(state, make_batch(options.ranks))
        float(loss)
    fault.may_strike("at-end")


class Fault:
    """What goes wrong, on one rank."""

    def __init__(self, options):
        self.options = options
        self.is_mine = detect_launcher().rank == options.rank

    def may_strike(self, moment):
        if moment != self.options.moment:
            return
        if self.is_mine:
            self._strike()
        elif self.options.kind == "compile":
            build_step(self.options.ranks)  # compiling is what all ranks do together

    def will_strike_in_step(self):
        """Makes the fault strike when this rank sends: between its instructions."""
        if not self.is_mine or self.options.moment != "in-step":
            return
        from multimesh.transport import mpi

        mpi._MpiChannel.send = lambda *_: self._strike()

    def tell(self):
        """Marks the time at which it strikes."""
        Path(self.options.struck).touch()

    def _strike(self):
        if self.options.kind not in STRIKE_LATER:
            self.tell()
        STRIKES[self.options.kind](self)


def strike_raise(fault):
    raise InjectedFault("raise")


def strike_segfault(fault):
    ctypes.string_at(0)


def strike_receive(fault):
    """Waits for a message that nobody sends."""
    from mpi4py import MPI

    MPI.COMM_WORLD.recv(source=(fault.options.rank + 1) % fault.options.ranks, tag=1)


def strike_thread(fault):
    threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    raise InjectedFault("thread")


def strike_import(fault):
    import fails_to_import  # noqa: F401


def strike_compile(fault):
    def loss(params, batch):
        fault.tell()
        raise InjectedFault("compile")

    build_step(fault.options.ranks, loss)


def strike_loader(fault):
    def batches():
        yield make_batch(fault.options.ranks)
        raise InjectedFault("loader")

    for _ in batches():
        pass


def strike_at_exit(fault):
    def hook():
        fault.tell()
        raise InjectedFault("atexit")

    atexit.register(hook)


STRIKES = {
    "raise": strike_raise,
    "exit-3": lambda fault: sys.exit(3),
    "exit-0": lambda fault: sys.exit(0),
    "os-exit-0": lambda fault: os._exit(0),
    "sigkill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": strike_segfault,
    "sigstop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "receive": strike_receive,
    "thread": strike_thread,
    "import": strike_import,
    "compile": strike_compile,
    "loader": strike_loader,
    "atexit": strike_at_exit,
}
STRIKE_LATER = ("compile", "atexit")


def make_batch(rows):
    return np.ones((rows, WIDTH), np.float32)


def build_step(ranks, loss=None):
    """A pipeline of as many stages as ranks, each of which multiplies by its parameters."""
    from multimesh.jax import microbatch, parallelize, task

    stages = [task(multiply, f"stage_{rank}", devices=[rank]) for rank in range(ranks)]

    def default_loss(params, batch):
        for stage, scale in zip(stages, params, strict=True):
            batch = stage(scale, batch)
        return batch.sum()

    gradient = microbatch(jax.value_and_grad(loss or default_loss), 0, ranks // 2, argnum=1)

    def step(params, batch):
        value, gradients = gradient(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    step_fn, place = parallelize(step, initial_batch=make_batch(ranks))
    params = place([np.ones(WIDTH, np.float32)] * ranks)
    return step_fn, params


def multiply(scale, x):
    return x * scale


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="how many there are")
    parser.add_argument("--kind", required=True, help="what goes wrong")
    parser.add_argument("--rank", type=int, required=True, help="on which rank")
    parser.add_argument("--moment", required=True, help="when")
    parser.add_argument("--struck", required=True, metavar="FILE", help="made when it strikes")
    return parser.parse_args()


if __name__ == "__main__":
    main()

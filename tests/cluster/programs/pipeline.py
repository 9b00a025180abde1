"""Trains a pipeline on two ranks of each host; rank 0 prints the losses and what hosts exchange.

    pipeline.py LAYOUT STEPS ROWS WIDTH

LAYOUT is "four" (four stages of two devices) or "spread" (two stages, each on devices of all
ranks). STEPS is 0 for a training that does not end.
"""

import itertools
import json
import sys
from dataclasses import replace

import jax
import optax

from multimesh import init

init(cpus=8)

from support import cases  # noqa: E402

LAYOUTS = {
    "four": cases.wide(4),
    "spread": cases.Layout(((0, 2, 4, 6), (1, 3, 5, 7)), (4, 1)),
}


def sent_by_each_host(plan):
    """Bytes of a step's activations and cotangents that each host sends to another."""
    sent = {}
    for bundle in plan.bundles:
        source, target = (
            {rank // 2 for rank in plan.cut.submeshes[submesh].processes}
            for submesh in (bundle.source, bundle.target)
        )
        if source != target:
            (host,) = source
            sent[host] = sent.get(host, 0) + bundle.nbytes * len(bundle.microbatches)
    return sent


def main():
    layout = LAYOUTS[sys.argv[1]]
    steps, rows, width = map(int, sys.argv[2:])
    case = replace(cases.echo([width] * len(layout.devices)), optimizer=optax.sgd(0.1))
    step_fn, state, _ = cases.build(case, layout, rows, microbatches=4)
    losses = []
    for step in range(steps) if steps else itertools.count():
        loss, state = step_fn(state, case.make_batch(rows, step % 4))
        losses.append(float(loss))
        if step == 0 and jax.process_index() == 0:
            print("the first step is done", flush=True)
    if jax.process_index() == 0:
        print(json.dumps({"losses": losses, "sent": sent_by_each_host(step_fn.plan)}))


main()

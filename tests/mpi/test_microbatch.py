"""`microbatch`: the sum over slices, in every schedule, equals the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.functions import Pair, agrees, batch, positions, row, same

from multimesh.errors import ScheduleError, UsageError
from multimesh.jax import clear_tasks, microbatch, parallelize
from multimesh.schedule import build, format_schedule

pytestmark = pytest.mark.mpi(ranks=(1, 2))

CUSTOM = {
    "names": [["F0", "F0", "B0", "B0"], ["F1B1", "F1B1"]],
    "numbers of NumPy": [[(np.int64(0), "F0"), "F0", "B0", "B0"], ["F1B1", "F1B1"]],
    "pairs": [[(0, "F0"), (1, "F0"), (0, "B0"), (1, "B0")], [(0, "F1B1"), (1, "F1B1")]],
    "a registered name": [["F0", "B0", "F0", "B0"], ["second", "second"]],
}


@pytest.fixture(scope="module")
def pair():
    clear_tasks()
    return Pair(row(0, 4), row(4, 4))


def plain_sum(fun, params, x, size):
    """The sum over slices, in Python."""
    parts = [fun(params, x[first : first + size]) for first in range(0, len(x), size)]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)


@pytest.mark.mpi(ranks=(1, 2, 4))
@pytest.mark.parametrize("schedule", [None, "1f1b", "gpipe", "wavefront"])
def test_gradients_of_slices(pair, schedule):
    fun = jax.value_and_grad(pair.loss)
    sliced = microbatch(fun, dim=0, size=3, argnum=1, schedule=schedule)
    sharded, got = agrees(sliced, pair.params(), batch())
    same(got, plain_sum(fun, pair.params(), batch(), 3))
    assert sharded.plan.cut.step.microbatches == 4
    assert sorted(t.name for t in sharded.plan.tasks if t.section == "loop") == ["B0", "F0", "F1B1"]
    assert [positions(got[1][name]) for name in "ab"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    graph = sharded.plan.graph
    assert sharded.plan.schedule == format_schedule(graph, build(graph, schedule or "1f1b"))
    forward = [w for w in sharded.plan.schedule.splitlines()[0].split() if w.endswith("F0")]
    assert forward == ["0F0", "1F0", "2F0", "3F0"]
    if schedule == "gpipe":
        assert " ".join(forward) in sharded.plan.schedule


@pytest.mark.parametrize("table", CUSTOM)
def test_a_custom_schedule(pair, table):
    fun = jax.value_and_grad(pair.loss)
    sliced = microbatch(fun, 0, 6, argnum=1, schedule="custom", custom_schedule=CUSTOM[table])
    sharded, _ = agrees(sliced, pair.params(), batch())
    first = [word for word in sharded.plan.schedule.splitlines()[0].split() if word[0].isdigit()]
    expected = ["0F0", "0B0", "1F0", "1B0"] if "name" in table and " " in table else None
    assert first == (expected or ["0F0", "1F0", "0B0", "1B0"])


def test_a_custom_schedule_that_cannot_be(pair):
    def refused(words, table):
        sliced = microbatch(jax.value_and_grad(pair.loss), 0, 6, argnum=1, custom_schedule=table)
        sharded, _ = parallelize(sliced, initial_batch=batch())
        with pytest.raises(ScheduleError, match=words):
            sharded(pair.params(), batch())

    last = ["F1B1", "F1B1"]
    refused("exactly 2 times.*F0 1 times, B0 3 times", [["F0", "B0", "B0", "B0"], last])
    refused("has B0 not for microbatch 0", [["F0", "F0", (1, "B0"), (1, "B0")], last])
    refused("names 'F9' for submesh 0, whose tasks are F0, B0", [["F9"], last])
    refused("'F1B1' in list 0", [["F1B1"], last])
    refused("list for each of the 2", [["F0"], last, []])
    refused("wait", [["B0", "B0", "F0", "F0"], last])


def test_a_whole_training_step_with_slices(pair):
    import optax

    sliced = microbatch(jax.value_and_grad(pair.loss), dim=0, size=4, argnum=1)

    def train(state, x):
        params, opt_state = state
        loss, gradients = sliced(params, x)
        updates, opt_state = pair.optimizer.update(gradients, opt_state, params)
        return loss / 3, (optax.apply_updates(params, updates), opt_state)

    sharded, init = parallelize(train, init_params=pair.init_state, initial_batch=batch())
    state, expected = init(jax.random.key(0)), pair.init_state(jax.random.key(0))
    for seed in range(2):
        loss, state = sharded(state, batch(seed=seed))
        plain, expected = jax.jit(train)(expected, batch(seed=seed))
        same((loss, state), (plain, expected))


def test_a_forward_pass_over_slices(pair):
    agrees(microbatch(pair.loss, 0, 4, argnum=1), pair.params(), batch())


def test_a_gradient_of_the_whole(pair):
    whole = jax.value_and_grad(microbatch(pair.loss, 0, 4, argnum=1))
    agrees(whole, pair.params(), batch())
    agrees(lambda p, x: jax.grad(lambda x: whole(p, x)[0])(x), pair.params(), batch())


def test_two_loops(pair):
    def both(params, x):
        first = microbatch(pair.loss, 0, 4, argnum=1)(params, x)
        return first, microbatch(pair.loss, 0, 6, argnum=1)(params, x)

    agrees(both, pair.params(), batch())


def test_what_the_slices_are_made_of_before_the_loop(pair):
    sliced = microbatch(jax.value_and_grad(pair.loss), 0, 3, argnum=1)
    agrees(lambda params, x: sliced(params, jnp.sin(x["x"]) + 1), pair.params(), {"x": batch()})


def test_slices_may_be_sharded(pair):
    sliced = microbatch(pair.loss, 0, 4, argnum=1, arg_shardings=P("model"))
    sharded, _ = agrees(sliced, pair.params(), batch())
    equations = [node.eqn for task in sharded.plan.tasks for node in task.nodes]
    slices = [eqn for eqn in equations if eqn.invars and eqn.invars[0].aval.shape == (4, 8)]
    specs = [eqn.params["sharding"].spec for eqn in slices if "sharding" in eqn.params]
    assert P("model") in specs


def test_a_schedule_that_cannot_be_had_says_so(pair, caplog):
    whole = jax.grad(microbatch(pair.loss, 0, 4, argnum=1, schedule="gpipe"))
    agrees(whole, pair.params(), batch())
    assert "2 loops over microbatches are unrolled" in caplog.text


def test_sums_keep_their_dtypes():
    def fun(params, x):
        return x.astype(jnp.bfloat16).sum() * params, x.shape[0], (x > 0).sum()

    _sharded, got = agrees(microbatch(fun, 0, 4, argnum=1), np.float32(2), batch())
    assert [leaf.dtype for leaf in got] == [jnp.float32, jnp.int32, jnp.int32]


@pytest.mark.mpi(ranks=1)
def test_outside_of_parallelize():
    def fun(a, b, *, scale):
        return {"sum": (a["x"] * scale).sum(), "b": b}

    a = {"x": batch(rows=6, width=10), "y": np.ones((3, 10))}
    sliced = microbatch(fun, dim=1, size=5, argnum=0)
    same(sliced(a, 2.0, scale=3.0), {"sum": 3 * a["x"].sum(), "b": 4.0})
    same(jax.jit(sliced)(a, 2.0, scale=3.0), {"sum": 3 * a["x"].sum(), "b": 4.0})
    assert microbatch(lambda x: x, 0, np.int64(6))(a["x"]) is a["x"]  # a single slice
    same(microbatch(lambda x: x.sum(0), -1, 5)(a["x"]), a["x"][:, :5].sum(0) + a["x"][:, 5:].sum(0))


@pytest.mark.mpi(ranks=1)
def test_mistakes(caplog):
    def refused(words, *args, call=None, **options):
        with pytest.raises(UsageError, match=words):
            sliced = microbatch(lambda x: x, *args, **options)
            sliced(*call)

    x = batch(rows=6)
    refused("size must be an integer", 0, 1.5)
    refused("size must be positive", 0, 0)
    refused("dim must be an integer", None, 2)
    refused("must divide the length 6", 0, 4, call=(x,))
    refused("positional argument 1. Got 1", 0, 2, 1, call=(x,))
    refused("does not have", 2, 2, call=(x,))
    refused("one length", 0, 2, call=([x, x[:3]],))
    refused("no leaf", 0, 2, call=((),))
    refused("one of 1f1b, gpipe, wavefront, custom", 0, 2, schedule="2f2b")
    refused("needs custom_schedule", 0, 2, schedule="custom")
    refused("goes with", 0, 2, schedule="gpipe", custom_schedule=[["F0"]])
    refused("list for each submesh", 0, 2, custom_schedule="F0")
    refused("list for each submesh", 0, 2, custom_schedule=[[("F0", 0)]])
    caplog.clear()
    microbatch(lambda x: x, 0, 2, interleave=2, num_stages=4, unrolling=True)
    lines = [record.message.split(" is ignored")[0] for record in caplog.records]
    assert lines == [
        "microbatch(interleave=2)",
        "microbatch(num_stages=4)",
        "microbatch(unrolling=True)",
    ]

"""How whole scripts end: with the last step unread, and with `init` forgotten."""

import pytest
from support import jobs

# Rank 0 is done as soon as its sends are posted; rank 1 reads them a second later.
LAST_STEP_UNREAD = """
from multimesh import init
init(cpus=8)
import time
import jax
from support import cases
case = cases.echo([2**20, 2**20])
step_fn, state, _ = cases.build(case, cases.apart(2), rows=4, microbatches=4)
loss, state = step_fn(state, case.make_batch(4, 0))
if jax.process_index() == jax.process_count() - 1:
    time.sleep(1)
    print("loss", float(loss))
"""

NO_INIT = """
from support import cases
cases.build(cases.echo([4, 4]), cases.apart(2), rows=4)
"""


def _run(tmp_path, source, ranks):
    path = tmp_path / "script.py"
    path.write_text(source)
    return jobs.run_script(path, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_may_end_without_reading_its_last_step(tmp_path, ranks):
    result = _run(tmp_path, LAST_STEP_UNREAD, ranks)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss 30.0") == 1  # 1 + 4 + 9 + 16
    assert [line[:7] for line in result.stderr.splitlines()] == ["mmrun: "]  # what it chose


def test_several_ranks_without_init(tmp_path):
    result = _run(tmp_path, NO_INIT, 2)
    assert result.returncode != 0
    assert "StartupError" in result.stderr
    assert "init" in result.stderr

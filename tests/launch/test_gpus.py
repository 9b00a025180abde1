"""GPUs: what a rank sees, in faked environments, and which of them it uses."""

import pytest

from multimesh.errors import StartupError
from multimesh.launch.gpus import (
    VisibleGpus,
    count_gpus,
    divide_gpus,
    find_gpus,
    jax_can_use_gpus,
)
from multimesh.launch.places import Place


@pytest.mark.parametrize(
    ("environ", "count", "names"),
    [
        ({}, 0, ()),
        ({}, 3, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 4, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, 4, ("3", "1")),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 4, ()),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,1"}, 4, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": "0,4,1"}, 4, ("0",)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-7a"}, 1, ("GPU-8932f937", "MIG-7a")),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, 8, ("0", "1")),
    ],
)
def test_visible_gpus(environ, count, names):
    assert find_gpus(environ, count) == VisibleGpus(names)


@pytest.mark.parametrize(
    ("variables", "seen", "per_task"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "0", 1),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, "2,3", 2),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, "0", 1),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:a100:1"}, "0", 1),
        ({"SLURM_TRES_PER_TASK": "cpu:4"}, "0", None),
        # mpirun inside such a job: its ranks have the variable, and see the GPUs of all tasks.
        ({"SLURM_GPUS_PER_TASK": "1"}, "0,1", None),
        ({"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"}, "0,1", None),
    ],
)
def test_gpus_that_slurm_gave_to_one_task(variables, seen, per_task):
    environ = {"CUDA_VISIBLE_DEVICES": seen, **variables}
    assert find_gpus(environ, 8).per_task == per_task


def divide(*visible, hosts="a", asked=None):
    places = [Place(host) for host in (hosts if len(hosts) > 1 else hosts * len(visible))]
    return divide_gpus([VisibleGpus(*each) for each in visible], places, asked)


def test_one_gpu_for_each_rank_of_a_host():
    everything = [("0", "1", "2", "3")]
    assert divide(everything, everything) == [(0,), (1,)]
    assert divide(everything, everything, asked=2) == [(0, 1), (2, 3)]
    # The index counts what the rank sees, whatever its name.
    assert divide([("7", "GPU-5")], [("7", "GPU-5")]) == [(0,), (1,)]


def test_each_host_has_gpus_of_its_own():
    both = [("0", "1")]
    assert divide(both, both, both, both, hosts="aabb") == [(0,), (1,), (0,), (1,)]
    assert divide(both, both, both, both, hosts="abab") == [(0,), (0,), (1,), (1,)]


def test_ranks_that_see_only_their_own():
    assert divide([("0",), 1], [("0",), 1]) == [(0,), (0,)]  # SLURM's cgroups
    assert divide([("2", "3"), 2], [("4", "5"), 2]) == [(0, 1), (0, 1)]
    assert divide([("0",)], [("1",)]) == [(0,), (0,)]  # a wrapper script
    assert divide([("0", "1")], [("0", "1")], [("2", "3")], [("2", "3")]) == [(0,), (1,)] * 2


@pytest.mark.parametrize(
    ("ranks", "names", "asked", "message"),
    [
        (3, ("0", "1"), None, "a needs 3 GPUs for 3 ranks, with 1 each. Got 2 visible ones"),
        (2, ("0", "1", "5"), 2, r"needs 4 GPUs .* \(CUDA_VISIBLE_DEVICES=0,1,5\). Start at most 1"),
        (1, ("0",), 2, "a needs 2 GPUs for rank 0. Got 1 visible .* Ask for fewer, or use CPU"),
    ],
)
def test_too_few(ranks, names, asked, message):
    with pytest.raises(StartupError, match=message):
        divide(*[[names]] * ranks, asked=asked)


def test_a_host_without_gpus_among_others():
    with pytest.raises(StartupError, match=r"b needs 1 GPUs for rank 1\. Got 0 visible ones"):
        divide([("0",)], [()], hosts="ab")


def test_the_driver_shows_how_many_there_are(tmp_path):
    assert count_gpus(tmp_path) == 0
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert count_gpus(tmp_path) == 1
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(tmp_path) == 2


def test_jax_without_its_cuda_plugin_looks_for_no_gpus(tmp_path, monkeypatch):
    import jax_plugins

    assert not jax_can_use_gpus("cpu")
    monkeypatch.setattr(jax_plugins, "__path__", [str(tmp_path)], raising=False)
    assert not jax_can_use_gpus(None)
    (tmp_path / "xla_cuda13").mkdir()
    (tmp_path / "xla_cuda13" / "__init__.py").touch()
    assert jax_can_use_gpus(None)
    assert jax_can_use_gpus("cuda,cpu")
    assert not jax_can_use_gpus("cpu")

"""Cores: how a host describes them, and how its ranks divide them."""

import pytest

from multimesh.launch.rank.binding import cores_of_rank
from multimesh.launch.topology import Core, cpu_quota, read_cores


@pytest.fixture
def write_files(tmp_path):
    """Writes files below a folder and returns it."""

    def write_files(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write_files


def two_sockets():
    """2 NUMA nodes x 4 cores x 2 threads, numbered as Linux does: second threads come last."""
    files = {"node/node0/cpulist": "0-3,8-11", "node/node1/cpulist": "4-7,12-15"}
    for number in range(16):
        topology = f"cpu/cpu{number}/topology"
        files[f"{topology}/physical_package_id"] = number % 8 // 4
        files[f"{topology}/core_id"] = number % 4
    return files


def numbers(cores):
    return [core.number for core in cores]


def flat(*nodes):
    """Cores with one thread each, so many in each node."""
    where = [node for node, count in enumerate(nodes) for _ in range(count)]
    return [Core(node, node, number, number) for number, node in enumerate(where)]


def test_neighbours_are_close_together(write_files):
    system = write_files(two_sockets())
    assert numbers(read_cores(range(16), system)) == [
        *(0, 8, 1, 9, 2, 10, 3, 11),
        *(4, 12, 5, 13, 6, 14, 7, 15),
    ]
    assert read_cores({5, 13}, system) == [Core(1, 1, 1, 5), Core(1, 1, 1, 13)]


def test_only_the_cores_that_the_job_may_use(write_files):
    system = write_files(two_sockets())
    assert numbers(read_cores({0, 4, 8, 9, 15}, system)) == [0, 8, 9, 4, 15]


def test_a_host_that_describes_nothing(tmp_path):
    assert numbers(read_cores({3, 1, 2}, tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        (1, [[0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]]),
        (2, [[0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]]),
        (4, [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]),
        (8, [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]),
    ],
)
def test_shares_follow_nodes_and_physical_cores(write_files, ranks, shares):
    cores = read_cores(range(16), write_files(two_sockets()))
    assert [cores_of_rank(cores, rank, ranks) for rank in range(ranks)] == shares


@pytest.mark.parametrize(
    ("nodes", "ranks", "shares"),
    [
        ((4,), 2, [[0, 1], [2, 3]]),
        ((5,), 2, [[0, 1], [2, 3]]),
        ((1,), 1, [[0]]),
        ((2,), 2, [[0], [1]]),
        ((2,), 4, [[0], [1], [0], [1]]),
        # Five and five cores: none of four shares of two lies in both nodes.
        ((5, 5), 4, [[0, 1], [2, 3], [5, 6], [7, 8]]),
        ((4, 4, 4), 5, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
        # One node is too small for a share, and two of three ranks fit into the other.
        ((1, 8), 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        # Cores that nobody gets are in both nodes.
        ((4, 4), 6, [[0], [1], [2], [4], [5], [6]]),
    ],
)
def test_every_rank_gets_as_many_cores(nodes, ranks, shares):
    cores = flat(*nodes)
    assert [cores_of_rank(cores, rank, ranks) for rank in range(ranks)] == shares


@pytest.mark.parametrize("ranks", range(1, 20))
def test_shares_are_disjoint_while_there_are_enough_cores(ranks):
    shares = [cores_of_rank(flat(5, 3, 8), rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    used = [number for share in shares for number in share]
    assert len(used) == len(set(used)) or ranks > 16
    assert set(used) <= set(range(16))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"process/cgroup": "0::/"}, None),
        ({"process/cgroup": "0::/", "groups/cpu.max": "max 100000"}, None),
        ({"process/cgroup": "0::/", "groups/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "process/cgroup": "0::/job/step",
                "groups/job/cpu.max": "200000 100000",
                "groups/job/step/cpu.max": "400000 100000",
            },
            2,
        ),
        (
            {
                "process/cgroup": "5:memory:/\n4:cpu,cpuacct:/docker/1",
                "groups/cpu,cpuacct/cpu.cfs_quota_us": 400000,
                "groups/cpu,cpuacct/cpu.cfs_period_us": 100000,
            },
            4,
        ),
        (
            {
                "process/cgroup": "4:cpu:/",
                "groups/cpu/cpu.cfs_quota_us": -1,
                "groups/cpu/cpu.cfs_period_us": 100000,
            },
            None,
        ),
        ({}, None),
    ],
)
def test_the_limit_of_a_container(write_files, files, quota):
    root = write_files(files)
    assert cpu_quota(root / "process", root / "groups") == quota

"""The cores of this host: which belong together, and how many of them a container may keep busy.

Linux describes them in text files. Where these are missing, as on macOS or in some sandboxes,
the cores count as one node of unrelated cores.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Core", "cpu_quota", "read_cores"]


@dataclass(frozen=True, order=True)
class Core:
    """A hardware thread, which Linux calls a CPU; ordered so that neighbours are close together.

    Attributes:
      node: The NUMA node: the part of the memory that is near.
      package: The socket.
      core: The physical core; its hardware threads share it.
      number: Linux's number of this thread.
    """

    node: int
    package: int
    core: int
    number: int


def read_cores(numbers: Iterable[int], system: Path = Path("/sys/devices/system")) -> list[Core]:
    """Describes cores, in the order in which neighbours are close together.

    Args:
      numbers: Linux's numbers of them.
      system: The folder in which Linux describes them.
    """
    node_of = {}
    for folder in (system / "node").glob("node[0-9]*"):
        for number in _parse_list(_read(folder / "cpulist")):
            node_of[number] = int(folder.name.removeprefix("node"))
    return sorted(_read_core(number, node_of.get(number, 0), system) for number in numbers)


def _read_core(number, node, system):
    folder = system / "cpu" / f"cpu{number}" / "topology"
    package, core = (_read(folder / name) for name in ("physical_package_id", "core_id"))
    return Core(
        node,
        int(package) if package.isdecimal() else 0,
        int(core) if core.isdecimal() else number,
        number,
    )


def cpu_quota(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")):
    """How many cores' worth of time this container may use, which the set of cores does not show.

    Args:
      process: The folder in which Linux describes this process.
      groups: Where control groups are mounted, of version 2 or 1.

    Returns:
      The smallest limit of the process's group and those around it, or None without any.
    """
    limits = []
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits(groups, path, _limit_v2)
        elif "cpu" in controllers.split(","):
            limits += _limits(groups / controllers, path, _limit_v1)
            limits += _limits(groups / "cpu", path, _limit_v1)
    return min(limits, default=None)


def _limits(root, path, read):
    """The limits of a group and of all around it. A container sees its own group as the root."""
    group = Path(path.lstrip("/"))
    found = (read(root / folder) for folder in (group, *group.parents))
    return [limit for limit in found if limit is not None]


def _limit_v2(folder):
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None


def _limit_v1(folder):
    quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _parse_list(text):
    """Parses `0-3,8`."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:
        return ""

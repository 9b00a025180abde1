"""A SLURM of its own for the tests: a controller on this machine, a node on each emulated host.

Its configuration, state and logs are in a temporary folder, its ports are free ones, and
SLURM_CONF is how commands find it: another SLURM of this machine is neither used nor touched.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support import slurm_jobs
from support.host_lab import HOSTS, HostLab

__all__ = ["open_slurm"]

CPUS = 2  # of each node, however many there really are
_UP_SECONDS = 60
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller}({gateway})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SwitchType=switch/none
MpiDefault=none
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=30
{nodes}
PartitionName=tests Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_CGROUPS = "CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"


@contextlib.contextmanager
def open_slurm(folder: Path, hosts: HostLab) -> Iterator[slurm_jobs.Slurm]:
    """Starts a SLURM, and sets SLURM_CONF for what this process starts; ends it in the end.

    Args:
      folder: An empty folder.
      hosts: Where its nodes run.

    Raises:
      OSError: It cannot be had here; the message says why.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise FileNotFoundError(f"SLURM is not installed: there is no {', '.join(missing)}")
    configuration = _write_configuration(folder, hosts)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(configuration)
    daemons = []
    try:
        daemons.append(_start(["slurmctld", "-D"]))
        for host in HOSTS:
            daemons.append(_start(hosts.on(host, "slurmd", "-D", "-N", host)))
        _wait_for_nodes(folder, daemons)
        yield slurm_jobs.Slurm(hosts)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def _write_configuration(folder, hosts):
    for name in ("state", *(f"{kind}.{host}" for kind in ("spool", "tmp") for host in HOSTS)):
        (folder / name).mkdir()
    nodes = [
        f"NodeName={host} NodeAddr={hosts.addresses[host]} CPUs={CPUS} SocketsPerBoard=1 "
        f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN"
        for host in HOSTS
    ]
    (folder / "cgroup.conf").write_text(_CGROUPS)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            controller=socket.gethostname(),
            gateway=hosts.gateway,
            controller_port=_free_port(),
            node_port=_free_port(),
            # MPICH names its shared memory after the job, and a job that is killed leaves it behind
            # for the job with the same number of the next SLURM to trip over.
            first_job=1000 + secrets.randbelow(10**7),
            folder=folder,
            nodes="\n".join(nodes),
            names=",".join(HOSTS),
        )
    )
    return configuration


def _free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _start(command):
    return subprocess.Popen(
        # It dies with this process, even if that is killed.
        ["setpriv", "--pdeathsig=KILL", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_for_nodes(folder, daemons):
    deadline = time.monotonic() + _UP_SECONDS
    command = ["sinfo", "--noheader", "--format=%D %T"]
    while True:
        said = subprocess.run(command, capture_output=True, text=True).stdout
        if said.strip() == f"{len(HOSTS)} idle":
            return
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-1000:] for path in sorted(folder.glob("*.log")))
            raise OSError(f"SLURM did not start: {said.strip() or dead}\n{logs}")
        time.sleep(0.2)

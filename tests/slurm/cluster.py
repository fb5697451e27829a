"""A Slurm of three virtual nodes on this machine: its controller, a daemon for each node, and a munge of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from tests.network.cluster import DEADLINE_S
from tests.support.nodes import free_endpoint
from tests.support.watching import attempts

from keepstep.trust.tokens import write_private

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Names that are addresses: nothing has to resolve them."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
{lines}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def kill(processes: list[psutil.Process]) -> None:
    """Kills those that are still there, all at once: each is stopped before the first one is killed.

    Children go first: the kernel sends SIGHUP to stopped processes that lose their parent, and srun would act on it.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in sorted(processes, key=psutil.Process.create_time, reverse=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def variables_of(pid: int) -> set[str]:
    """The environment of a process, as it was started. What looks after a step has written its title into it."""
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    return set()


def fields(line: str) -> dict[str, str]:
    """What ``scontrol --oneliner show`` prints: name -> value, up to the next space."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def lacking() -> list[str]:
    """Programs of Slurm and munge that are not on this machine."""
    return [name for name in PROGRAMS if program(name) is None]


def program(name: str) -> str | None:
    """Where a program is. Not everyone's PATH has the folder of the daemons."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    """Returns a port on which no process listens at the moment."""
    return int(free_endpoint().rpartition(":")[2])


class Slurm:
    """The daemons, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: for all files of the daemons.
        """
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[Slurm]:
        """Yields it with all nodes idle. Kills the daemons and the processes of jobs that are left at the end."""
        try:
            self._start_munge()
            self._configure()
            self._start("slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait_for(lambda: self._states() == dict.fromkeys(NODES, "idle"), "all nodes are idle")
            yield self
        finally:
            kill(self._processes())
            for daemon in self._daemons:
                daemon.wait()

    def _start_munge(self) -> None:
        """With --force, for it has objections to a folder that other users cannot enter."""
        private = self.folder / "munge"
        private.mkdir(mode=0o700)
        write_private(private / "key", secrets.token_hex(32))
        files = [f"--{name}-file={private / name}" for name in ("key", "seed", "pid", "log")]
        self._start("munged", "--foreground", "--force", f"--socket={private / 'socket'}", *files)

    def _configure(self) -> None:
        """With the plugins that belong to the programs, wherever those are."""
        plugins = next(Path(program("slurmctld") or "").parent.parent.glob("lib/*/slurm-wlm"), None)
        lines = [] if plugins is None else [f"PluginDir={plugins}"]
        lines += [f"NodeName={node} NodeAddr={node} Port={free_port()} CPUs=1" for node in NODES]
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            port=free_port(),
            folder=self.folder,
            user=getpass.getuser(),
            lines="\n".join(lines),
        )
        (self.folder / "slurm.conf").write_text(text)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as output:
            command = [program(name) or name, *arguments]
            started = subprocess.Popen(command, env=self.environment, stdout=output, stderr=subprocess.STDOUT)
        self._daemons.append(started)
        return started

    def _states(self) -> dict[str, str]:
        """Of each node, as long as the controller answers."""
        command = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        said = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        return dict(line.split() for line in said.stdout.splitlines())

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node, as when it boots."""
        self._nodes[node] = self._start("slurmd", "-D", "-N", node, "-d", program("slurmstepd") or "")

    def power_off(self, node: str) -> None:
        """Kills all processes of a node at once, so that none of them can report the loss of another one."""
        tasks = self._processes(f"SLURMD_NODENAME={node}")
        parents = {parent for task in tasks if (parent := task.parent()) is not None}
        steps = [parent for parent in parents if parent.name() == "slurmstepd"]
        kill([psutil.Process(self._nodes[node].pid), *steps, *tasks])

    def _processes(self, *variables: str) -> list[psutil.Process]:
        """The daemons, the processes of jobs, and those that look after their steps; those with all these variables."""
        wanted = {f"SLURM_CONF={self.environment['SLURM_CONF']}", *variables}
        return [process for process in psutil.process_iter() if wanted <= variables_of(process.pid)]

    # ---- commands ---------------------------------------------------------------------------------------------------

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """What a command prints."""
        ended = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}\n{self.logs()}"
        return ended.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        return fields(self.call("scontrol", "--oneliner", "show", "job", number))

    def set_down(self, node: str) -> None:
        """What an administrator does about a node that fails."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something of which only Slurm's commands can tell."""
        for _ in attempts(self.folder, DEADLINE_S):
            if condition():
                return
        raise AssertionError(f"waited in vain until {what}\n{self.logs()}")

    def logs(self) -> str:
        """The ends of what the daemons have printed."""
        return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

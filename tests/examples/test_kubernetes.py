"""The JobSet manifest: its parts fit together and their schemas, and what its containers run is run on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.network.cluster import SCRIPT
from tests.support.nodes import SECRET, Nodes, await_training, end_all
from tests.test_docs import DEPLOY, section

from keepstep.cli.cluster import controller
from keepstep.launcher.cluster.flags import shape_of
from keepstep.launcher.flags import make_parser
from keepstep.protocol import recovery
from keepstep.trace.record import runfolder
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role

MANIFEST = Path(__file__).resolve().parent.parent.parent / "examples" / "kubernetes" / "jobset.yaml"
OBJECTS: dict[str, dict[str, Any]] = {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}
JOBS: dict[str, dict[str, Any]] = {job["name"]: job["template"] for job in OBJECTS["JobSet"]["spec"]["replicatedJobs"]}


def pod(name: str) -> dict[str, Any]:
    """The pod of one of the two jobs."""
    spec: dict[str, Any] = JOBS[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    """Its only container."""
    (found,) = pod(name)["containers"]
    assert found["name"] == name
    return dict(found)


def words(name: str) -> list[str]:
    """The command line of keepstep's in a container."""
    (text,) = container(name)["args"]
    line = text.replace("\\\n", "")[text.replace("\\\n", "").index(f"keepstep {name}") :].splitlines()[0]
    return shlex.split(line.replace('"$@"', "").replace("$INDEX", "0"))[2:]


# ---- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Service", "PersistentVolumeClaim", "NetworkPolicy"])
def test_an_object_fits_its_schema(kind: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["controller", "agent"])
def test_a_job_of_the_set_fits_the_schema_of_jobs(name: str) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **JOBS[name]}
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**job, "spec": {**job["spec"], "paralelism": 1}}, kubernetes_validate.latest_version(), strict=True
        )


def test_commands_are_understood() -> None:
    chosen = controller._parser().parse_args(words("controller"))
    agent = make_parser("keepstep agent")
    agent.add_argument("--controller")
    other = agent.parse_args(words("agent"))
    assert (chosen.nnodes, chosen.nproc_per_node, chosen.spares) == (
        other.nnodes, int(other.nproc_per_node), other.spares,
    )  # fmt: skip
    shape = shape_of(chosen.nnodes, chosen.nproc_per_node, chosen.spares)
    assert shape.max_nodes == JOBS["agent"]["spec"]["completions"] == JOBS["agent"]["spec"]["parallelism"]
    assert shape.max_nodes * shape.slots(None) >= shape.world_size + shape.num_spares
    assert other.grace < pod("agent").get("terminationGracePeriodSeconds", 30), "Kubernetes kills what is left then"
    service = OBJECTS["Service"]
    assert other.controller == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


def test_names_that_belong_together_are_the_same() -> None:
    name = OBJECTS["JobSet"]["metadata"]["name"]
    selector = OBJECTS["Service"]["spec"]["selector"]
    assert selector == {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": "controller",
    }
    (port,) = container("controller")["ports"]
    (target,) = OBJECTS["Service"]["spec"]["ports"]
    assert (target["targetPort"], target["port"]) == (port["name"], port["containerPort"])
    (claim,) = [v["persistentVolumeClaim"]["claimName"] for v in pod("controller")["volumes"] if "emptyDir" not in v]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    policy = OBJECTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert policy == {"jobset.sigs.k8s.io/jobset-name": name}
    for part in ("controller", "agent"):
        mounted = {mount["name"] for mount in container(part)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod(part)["volumes"]}


def test_the_secrets_are_those_that_the_page_makes() -> None:
    described = section(DEPLOY, "Kubernetes")
    secret = next(e["valueFrom"]["secretKeyRef"] for e in container("controller")["env"] if "JOB_SECRET" in e["name"])
    assert f"create secret generic {secret['name']} --from-file={secret['key']}=" in described
    (tokens,) = [v["secret"]["secretName"] for v in pod("agent")["volumes"] if "secret" in v]
    assert f"create secret generic {tokens} --from-file=tokens" in described
    indices = re.search(r"for i in ([\d ]+);", described)
    assert indices is not None
    assert indices[1].split() == [str(i) for i in range(JOBS["agent"]["spec"]["completions"])]
    assert not any("KEEPSTEP_JOB_SECRET" in json.dumps(each) for each in container("agent")["env"])


def test_the_jobs_own_exit_codes_end_it() -> None:
    rules = JOBS["controller"]["spec"]["podFailurePolicy"]["rules"]
    (codes,) = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
    assert codes == [recovery.EXIT_FAILED, 2, recovery.EXIT_NOTHING_TO_RECOVER, recovery.EXIT_TOO_FEW_RANKS]


@pytest.mark.parametrize("name", ["controller", "agent"])
def test_a_container_has_no_rights_that_it_does_not_need(name: str) -> None:
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert pod(name)["automountServiceAccountToken"] is False


# ---- what is run ----------------------------------------------------------------------------------------------------


class Pods(Nodes):
    """The containers of the set as processes: with fewer ranks, on this machine's loopback interface."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "run").mkdir()
        for index in range(3):
            claim = Claim(Role.AGENT, f"agent-{index}")
            (folder / f"agent-{index}").write_text(Credentials.of(SECRET, claim).text())

    def begin(self, output: str, part: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a container's command, with the variables that Kubernetes would set."""
        host, port = self.endpoint.split(":")
        (text,) = container(part)["args"]
        changes = {"--nnodes 3:4 --nproc-per-node 8 --spares 8": "--nnodes 2:3 --nproc-per-node 1 --spares 1"}
        if part == "agent":
            changes |= {"train-controller:29400": self.endpoint, " train.py": f" {SCRIPT} 200 0.02"}
            changes |= {"/run/keepstep/token": f"{self.folder}/agent-$INDEX"}
        else:
            changes |= {":29400": f":{port}"}
        for there, here in changes.items():
            assert there in text
            text = text.replace(there, here)
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "POD_IP": host, **variables}
        return self.launch(output, [*container(part)["command"], text], environment)

    def begin_controller(self, output: str) -> subprocess.Popen[bytes]:
        """The controller's container; the volume stays."""
        return self.begin(output, "controller", KEEPSTEP_JOB_SECRET=SECRET.text(), RUN=str(self.folder / "run" / "uid"))

    def begin_agent(self, output: str, index: int) -> subprocess.Popen[bytes]:
        """An agent's container."""
        return self.begin(output, "agent", INDEX=str(index), NODE=f"machine-{index}", HOME=str(self.folder))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Whatever is left of the processes is ended."""
    with Pods(tmp_path).running() as found:
        assert isinstance(found, Pods)
        yield found


def test_the_job_outlives_its_controller_and_a_pod_that_is_replaced(pods: Pods) -> None:
    first = pods.begin_controller("controller")
    for index in range(3):
        pods.begin_agent(f"agent-{index} ", index)
    await_training(pods.folder / "run" / "uid")
    end_all(pods.started["agent-1 "])
    pods.begin_agent("agent-1 restarted", 1)
    end_all(first)
    pods.begin_controller("controller restarted")
    ended = {name: pods.wait(name)[0] for name in ("controller restarted", "agent-0 ", "agent-1 restarted", "agent-2 ")}
    assert set(ended.values()) == {0}, pods.output("controller restarted")
    info = runfolder.read_info(pods.folder / "run" / "uid")
    assert info.ended is not None
    printed = "".join(pods.output(name) for name in ended)
    assert len(set(re.findall(r"^digest \d (\S+)", printed, re.MULTILINE))) == 1


def test_the_shell_keeps_sigterm_from_the_controller() -> None:
    """It would end the job. As process 1 of its container a shell has no default action for it either."""
    (text,) = container("controller")["args"]
    assert "exec" not in text
    assert text.splitlines()[-1] == "exit $?"
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    probe = subprocess.run([*unshare, "true"], capture_output=True, check=False, timeout=20)
    if probe.returncode != 0:
        pytest.skip("this user may make no namespace of processes")
    waiting = text.replace(text[text.index("keepstep controller") : text.index("exit $?")], "echo up; cat\n")
    environment = {"RUN": "/nowhere", "PATH": "/usr/bin:/bin"}
    command = [*unshare, "sh", "-c", waiting]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as shell:
        assert shell.stdout is not None
        assert shell.stdin is not None
        assert shell.stdout.readline() == b"up\n"
        (inner,) = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)
        shell.stdin.write(b"still there\n")
        shell.stdin.close()
        assert shell.stdout.readline() == b"still there\n"
        assert shell.wait(20) == 0

"""`polyad launch --via kubernetes`: an Indexed Job of torchrun agents, and a headless Service.

The manifest contains the configuration as a ConfigMap, so that the cluster needs only an image with
Polyad and a volume with data and runs. Kubernetes replaces pods that die; the agents reconnect, and
the run continues from its newest checkpoint.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyad.launch.via.hosts import DEFAULT_PORT, LaunchError, image_name, mount_path
from polyad.launch.via.submission import SubmissionError, check_gpus, find_program, hand_in
from polyad.train.errors import one_line, shown

MAX_JOB_NAME = 52
"""A pod's host name is the job's with `-` and its number, and has at most 63 characters."""
MOUNTED_CONFIG = "/etc/polyad/run.yaml"
GRACE_SLACK = 15
"""Seconds for agents to end after their processes."""
KILLED_BY_INPUT = 2
"""Exit status that a new pod would not change."""

# A Service's name starts with a letter (RFC 1035), and Job and ConfigMap share it; other names may
# start with a digit (RFC 1123), and a claim's consists of several of these separated by dots.
_SERVICE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
# kubectl's messages about an existing Job: it cannot be changed, or was not changed.
_JOB = re.compile(r"Job(?:\.batch)? \"?([a-z0-9-]+)")
_UNCHANGED = re.compile(r"^job\.batch/(\S+) unchanged", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A job for a cluster.

    Raises:
        LaunchError: a value is not valid for Kubernetes.
    """

    image: str | None = None
    """Image with Polyad installed, as built by the recipe in `docs/cluster/`."""
    claim: str | None = None
    """A PersistentVolumeClaim shared by all pods, with the data and the run's folder."""
    mount: str = "/polyad"
    """Mount point of the claim in a pod, to which relative paths in the configuration refer."""
    namespace: str | None = None
    """None: the namespace of kubectl's context."""
    job_name: str | None = None
    """None: derived from the name of the run's folder."""
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory_per_node: str | None = None
    """With a unit, K, M, G or T, powers of 1,024."""

    def __post_init__(self) -> None:
        for option, value, need in (
            ("--image", self.image, "that has Polyad"),
            ("--claim", self.claim, "of a PersistentVolumeClaim for data and run.folder"),
        ):
            if value is None:
                raise LaunchError(f"{option}: is missing; --via kubernetes needs the name {need}")
        image_name(self.image or "")
        dashes = "small letters, digits, and dashes inside"
        for option, value, form, most, allowed in (
            ("--claim", self.claim, _SUBDOMAIN, 253, f"{dashes}, in parts with dots between them"),
            ("--namespace", self.namespace, _LABEL, 63, dashes),
            ("--job-name", self.job_name, _SERVICE, MAX_JOB_NAME, f"a small letter, then {dashes}"),
        ):
            if value is not None and (not form.fullmatch(value) or len(value) > most):
                raise LaunchError(
                    f"{option}: {shown(value)} is not allowed; only {allowed}, at most {most}"
                )
        mount_path(self.mount)
        if self.memory_per_node is not None and not re.fullmatch(
            r"[1-9][0-9]{0,8}[KMGT]", self.memory_per_node
        ):
            raise LaunchError(
                f"--memory-per-node: {shown(self.memory_per_node)} is not allowed with --via "
                f"kubernetes; a number with K, M, G or T, as in 480G"
            )

    def resources(self) -> dict[str, Any]:
        """A pod's limits, which are also its requests."""
        limits: dict[str, Any] = {}
        if self.cpus_per_node is not None:
            limits["cpu"] = self.cpus_per_node
        if self.memory_per_node is not None:
            limits["memory"] = f"{self.memory_per_node}i"
        if self.gpus_per_node is not None:
            limits["nvidia.com/gpu"] = self.gpus_per_node
        return {"limits": limits} if limits else {}


def manifest(
    folder: str,
    job: KubernetesJob,
    config_text: str,
    agent: Sequence[str],
    nodes: int,
    processes_per_node: int,
    *,
    variables: Mapping[str, str],
    restarts: int,
    grace_seconds: float,
) -> str:
    """Returns the manifest: a Service, a ConfigMap and a Job.

    Args:
        folder: the run's folder, as in the configuration.
        job: the job.
        config_text: content of the configuration file.
        agent: torchrun's words after Python, without a rendezvous; the file is `MOUNTED_CONFIG`.
        nodes: number of pods.
        processes_per_node: P.
        variables: environment variables of all processes.
        restarts: how often each pod may be replaced.
        grace_seconds: maximum time for the processes to save their step.

    Raises:
        LaunchError: there are fewer GPUs than processes.
    """
    check_gpus(job.gpus_per_node, processes_per_node)
    name = job.job_name or _job_name(folder)
    labels = {"app.kubernetes.io/name": "polyad", "app.kubernetes.io/instance": name}
    about: dict[str, Any] = {"name": name, "labels": labels}
    if job.namespace is not None:
        about["namespace"] = job.namespace
    service = {
        "clusterIP": "None",  # headless: each pod has its own name
        "publishNotReadyAddresses": True,  # agents meet before a pod counts as ready
        "selector": labels,
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    pod = _pod(name, job, agent, {**_cores(job, processes_per_node), **variables})
    pod["terminationGracePeriodSeconds"] = int(grace_seconds) + 5 + GRACE_SLACK
    bad_input = {"containerName": "polyad", "operator": "In", "values": [KILLED_BY_INPUT]}
    drained = [{"type": "DisruptionTarget", "status": "True"}]  # or preempted by another job
    work = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": restarts * nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": bad_input},
                {"action": "Ignore", "onPodConditions": drained},
            ]
        },
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    files = {Path(MOUNTED_CONFIG).name: config_text}
    objects = [
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": files},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": work},
    ]
    return yaml.safe_dump_all(objects, sort_keys=False)


def _cores(job: KubernetesJob, processes: int) -> dict[str, str]:
    """Cores for the script in each pod to divide; without a limit it counts the node's cores."""
    known = {} if job.cpus_per_node is None else {"POLYAD_CORES": str(job.cpus_per_node)}
    return {"POLYAD_PROCESSES": str(processes), **known}


def _pod(
    name: str, job: KubernetesJob, agent: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    values = {
        "POLYAD_SERVICE": name,
        # Folders on the volume may have the same names as Polyad's packages.
        "PYTHONSAFEPATH": "1",
        **variables,
    }
    container = {
        "name": "polyad",
        "image": job.image,
        "workingDir": job.mount,
        "command": ["bash", "-c", _literal(_IN_EACH_POD), "agent"],
        "args": [_literal(word) for word in agent],
        "env": [{"name": key, "value": _literal(value)} for key, value in values.items()],
        "volumeMounts": [
            {"name": "work", "mountPath": job.mount},
            {"name": "config", "mountPath": str(Path(MOUNTED_CONFIG).parent), "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
        **({"resources": job.resources()} if job.resources() else {}),
    }
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "config", "configMap": {"name": name}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # for NCCL and the loader
        ],
    }


# "$@": -m polyad.launch.torchrun, its options, -m polyad.launch train CONFIG key=value
_IN_EACH_POD = """
threads=$((${POLYAD_CORES:-$(nproc)} / ${POLYAD_PROCESSES:-1}))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
is_host=false
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then is_host=true; fi
exec python "${@:1:2}" --rdzv-backend c10d \\
  --rdzv-endpoint "${HOSTNAME%-*}-0.$POLYAD_SERVICE:29400" --rdzv-id "$POLYAD_SERVICE" \\
  --rdzv-conf "is_host=$is_host" --local-addr "$HOSTNAME.$POLYAD_SERVICE" "${@:3}"
"""


def _literal(text: str) -> str:
    """Escapes `$(NAME)`, so that Kubernetes does not substitute variables."""
    return text.replace("$(", "$$(")


def _job_name(folder: str) -> str:
    """A valid Service name, derived from the run's folder."""
    name = re.sub(r"[^a-z0-9-]", "-", Path(folder).name.lower()).strip("-")
    if name[:1].isdigit():
        name = f"run-{name}"
    return name[:MAX_JOB_NAME].strip("-") or "polyad"


def find_kubectl() -> str:
    """Returns the path of `kubectl`; raises a LaunchError if there is none."""
    return find_program("kubernetes", "kubectl", "add --dry-run to write the manifest alone")


def apply(file: str, kubectl: str, namespace: str | None = None) -> str:
    """Applies a manifest in kubectl's context; see `hand_in`.

    Raises:
        SubmissionError: it was rejected, or a Job of this name exists (running or ended), which is
            not restarted.
    """

    def reason(said: str) -> str:
        there = _JOB.search(said) if "field is immutable" in said else None
        return (
            _is_there(there[1], namespace) if there else one_line(said.strip().rpartition("\n")[2])
        )

    said = hand_in([kubectl, "apply", "-f", file], "kubectl did not take", reason)
    unchanged = _UNCHANGED.search(said)
    if unchanged:
        raise SubmissionError(
            f"kubectl started nothing from {file}: {_is_there(unchanged[1], namespace)}"
        )
    return said


def _is_there(name: str, namespace: str | None) -> str:
    where = f" -n {namespace}" if namespace else ""
    return (
        f"the job {name} is there already, running or ended; `kubectl delete job {name}{where}` "
        f"makes room for it, and another --job-name starts one beside it"
    )

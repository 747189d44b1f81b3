"""Kubernetes: what is refused, and manifests by the published schema."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import latest_version, validate

from polyad.launch.cli import run
from polyad.launch.via.hosts import LaunchError
from polyad.launch.via.kubernetes import KubernetesJob, _job_name, manifest
from tests.helpers.started import write_command
from tests.launch.test_cli import error_line
from tests.launch.via.test_hosts import SHELL

ASKED = {"image": "registry.lab:5000/polyad:1", "claim": "work"}
KUBERNETES = (
    *("--via", "kubernetes", "--nodes", "2", "--processes-per-node", "1"),
    *("--image", ASKED["image"], "--claim", ASKED["claim"]),
)
AGENT = (
    *("-m", "polyad.launch.torchrun", "--nnodes", "2"),
    *("-m", "polyad.launch", "train", "run.yaml"),
)


def parts(agent: tuple[str, ...] = AGENT, **asked: Any) -> list[dict[str, Any]]:
    """The Service, the ConfigMap and the Job."""
    text = manifest(
        *("runs/My Run", KubernetesJob(**{**ASKED, **asked}), "run: {}\n", agent, 2, 2),
        variables={"NCCL_SOCKET_IFNAME": "=eth0"},
        restarts=3,
        grace_seconds=60.0,
    )
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("version", ["1.31", "1.34", ""])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"gpus_per_node": 8, "cpus_per_node": 64, "memory_per_node": "480G"},
        {"namespace": "lab", "job_name": "mine", "mount": "/data/work"},
    ],
)
def test_manifests_are_those_of_the_published_schema(version: str, asked: dict[str, Any]) -> None:
    for part in parts(**asked):
        validate(part, version or latest_version(), strict=True)


def test_the_job_has_a_pod_for_each_node_and_restarts_what_a_restart_can_help() -> None:
    service, files, job = parts(gpus_per_node=2)
    names = {part["metadata"]["name"] for part in (service, files, job)}
    assert names == {"my-run"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 6
    refused, disrupted = spec["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [2])
    assert disrupted["action"] == "Ignore"
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "=eth0"} in container["env"]
    assert files["data"] == {"run.yaml": "run: {}\n"}


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_starts_an_agent_that_meets_the_others_at_the_first(
    tmp_path: Path, index: int
) -> None:
    agent = (*AGENT, "run.folder=a b;$(touch x)", "seed='1'")
    (container,) = parts(agent)[2]["spec"]["template"]["spec"]["containers"]
    write_command(tmp_path / "python", 'printf \'%s\\0\' "$OMP_NUM_THREADS" "$@"')
    values = {each["name"]: each["value"] for each in container["env"]}
    assert values["POLYAD_PROCESSES"] == "2"
    # As Kubernetes hands over what stands in `command` and `args`: `$$(` is `$(`.
    words = [word.replace("$$(", "$(") for word in [*container["command"], *container["args"]]]
    done = subprocess.run(
        words, capture_output=True, check=True, text=True, cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"my-run-{index}", "POLYAD_SERVICE": "my-run", "POLYAD_CORES": "7",
            "POLYAD_PROCESSES": values["POLYAD_PROCESSES"],
        },
    )  # fmt: skip
    threads, *started = done.stdout.split("\0")[:-1]
    assert threads == "3"
    assert started == [
        *("-m", "polyad.launch.torchrun", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "my-run-0.my-run:29400", "--rdzv-id", "my-run"),
        *("--rdzv-conf", f"is_host={'true' if index == 0 else 'false'}"),
        *("--local-addr", f"my-run-{index}.my-run", *agent[2:]),
    ]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        *[({"image": value}, ["--image"]) for value in SHELL],
        *[({"claim": value}, ["--claim"]) for value in (*SHELL, "Work", "-x", "a" * 254)],
        *[({"namespace": value}, ["--namespace"]) for value in (*SHELL, "kube.system")],
        ({"job_name": "a" * 53}, ["--job-name", "at most 52"]),
        ({"mount": "data"}, ["--mount", "'data'"]),
        ({"mount": "/a b"}, ["--mount"]),
        ({"memory_per_node": "480GB"}, ["--memory-per-node", "'480GB'"]),
        ({"gpus_per_node": 1}, ["--gpus-per-node: 1", "--processes-per-node 2"]),
    ],
)
def test_what_kubernetes_would_not_take_is_one_line(
    asked: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        parts(**asked)
    assert len(str(caught.value).splitlines()) == 1
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_dry_run_writes_the_manifest(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", str(config), *KUBERNETES, "--dry-run", "seed=7"]) == 0
    file = config.parent / "run" / "launch" / "job.yaml"
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == (f"kubectl apply -f {file}\n", "")
    _, files, job = yaml.safe_load_all(file.read_text())
    assert files["data"]["run.yaml"] == config.read_text()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["train", "/etc/polyad/run.yaml", "seed=7"]


def test_a_layout_that_does_not_fit_is_refused(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*KUBERNETES, "--dry-run", "parallel.tensor_parallel_size=3"]
    assert run(["launch", str(config), *arguments]) == 2
    line = error_line(capfd.readouterr().err)
    assert "--nodes 2 x --processes-per-node 1 = 2" in line
    assert not (config.parent / "run").exists()


def test_the_manifest_is_applied(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(config.parent / "none"))
    assert run(["launch", str(config), *KUBERNETES]) == 2
    assert "kubectl, which is not on the PATH" in error_line(capfd.readouterr().err)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{config.parent}:{os.environ['PATH']}")
    write_command(config.parent / "kubectl", 'echo "applied $1 $2 $3"')
    assert run(["launch", str(config), *KUBERNETES]) == 0
    file = config.parent / "run" / "launch" / "job.yaml"
    assert f"applied apply -f {file}\n" in capfd.readouterr().out
    write_command(config.parent / "kubectl", "echo 'first' >&2; echo 'no server' >&2; exit 1")
    assert run(["launch", str(config), *KUBERNETES]) == 1
    assert f"kubectl did not take {file}: no server" in error_line(capfd.readouterr().err)


@pytest.mark.parametrize(
    "said",
    [
        "echo 'service/run unchanged'; echo 'job.batch/run unchanged'",
        """echo 'The Job "run" is invalid: spec.template: Invalid value: core.PodTemplateSpec{}: """
        """field is immutable' >&2; exit 1""",
    ],
)
def test_a_job_that_is_there_is_not_taken_for_a_new_one(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], said: str
) -> None:
    monkeypatch.setenv("PATH", f"{config.parent}:{os.environ['PATH']}")
    write_command(config.parent / "kubectl", said)
    assert run(["launch", str(config), *KUBERNETES, "--namespace", "team"]) == 1
    line = error_line(capfd.readouterr().err)
    assert "the job run is there already, running or ended" in line
    assert "`kubectl delete job run -n team`" in line


SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, as the API checks it


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/3b", "run-3b"),
        ("runs/2026-11-26_gpt2.v2", "run-2026-11-26-gpt2-v2"),
        ("runs/GPT2.Small", "gpt2-small"),
        ("runs/-9-", "run-9"),
        ("runs/é9é", "run-9"),
        ("runs/日本", "polyad"),
        ("runs/" + "1" * 80, "run-" + "1" * 48),
        ("runs/" + "a" * 51 + "-b", "a" * 51),
        ("runs/...", "polyad"),
    ],
)
def test_the_name_of_a_job_is_one_that_a_service_may_have(folder: str, name: str) -> None:
    assert _job_name(folder) == name
    assert SERVICE.fullmatch(name)
    assert len(f"{name}-12345678") <= 63  # a pod's host name


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("job_name", "3b", "--job-name: '3b' is not allowed; only a small letter, then small "),
        ("job_name", "a.b", "--job-name"),
        ("job_name", "a-", "--job-name"),
        ("job_name", "A", "--job-name"),
        ("namespace", "a.b", "--namespace"),
        ("namespace", "n" * 64, "at most 63"),
        ("claim", "a..b", "--claim"),
        ("claim", "c" * 254, "at most 253"),
        ("claim", "A.b", "--claim"),
    ],
)
def test_names_that_the_api_would_refuse_are_refused_before(
    option: str, value: str, allowed: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        KubernetesJob(**{"image": "i", "claim": "c", option: value})
    assert allowed in str(caught.value)


def test_names_that_the_api_takes_are_taken() -> None:
    KubernetesJob(image="i", claim="data.team-1.3", namespace="1lab", job_name="a1-b")

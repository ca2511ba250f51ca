"""configs/deploy/: their command lines are accepted, and what they name exists and agrees."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from async_rl.addresses import split_address
from async_rl.cli import app
from async_rl.config import Config, load_config
from async_rl.http import StatusServer
from tests.conftest import Spawn

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "configs" / "deploy" / "slurm.sbatch"
KUBERNETES = ROOT / "configs" / "deploy" / "kubernetes.yaml"
VALUES = {
    "$(POD_NAME)": "async-rl-generator-7d4-x2x",
    "$POD_IP": "10.0.0.5",
    "$host": "10.0.0.5",
    "$port": "29400",
    "$http_port": "29401",
    "$weights_port": "29402",
    "$keys": "keys",
    "generator-$2": "generator-1",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file that stands for the user's own."""
    path = tmp_path / "mine.toml"
    path.write_text('model = { path = "m" }\nenvironment = { type = "arithmetic" }\nrun = { dir = "runs/mine" }\n')
    return path


def filled(words: list[str], config: Path) -> list[str]:
    """A command line with the values that it has when it runs."""
    for name, value in VALUES.items():
        words = [word.replace(name, value) for word in words]
    return [str(config) if word.endswith(".toml") else word for word in words if word != "&"]


def loaded(words: list[str]) -> tuple[Config, dict[str, Any]]:
    """The settings and options of `async-rl WORDS...`, by the real command line and the real checks."""
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    with command.make_context(words[0], words[1:]) as context:
        return load_config(context.params["config"], list(context.params["overrides"] or ())), context.params


# --- Kubernetes ------------------------------------------------------------------------------------


def objects() -> dict[str, dict[str, Any]]:
    """Kind -> object; there is one of each."""
    found = [item for item in yaml.safe_load_all(KUBERNETES.read_text()) if item]
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


def container(kind: str) -> dict[str, Any]:
    """The container of a workload."""
    (only,) = objects()[kind]["spec"]["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def learner_script() -> str:
    shell, option, script = container("Job")["command"]
    assert (shell, option) == ("/bin/sh", "-c")
    return str(script)


def test_the_commands_of_kubernetes_are_accepted_and_meet_each_other(config: Path) -> None:
    (line,) = [line for line in learner_script().splitlines() if line.strip().startswith("async-rl")]
    learner, _ = loaded(filled(shlex.split(line)[1:], config))
    generator, options = loaded(filled(container("Deployment")["command"][1:], config))
    service = objects()["Service"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    transport = learner.transport
    assert ports == {
        "messages": transport.port, "http": transport.http_port, "rendezvous": learner.weights.port,
    }  # fmt: skip
    assert {p["name"]: p["containerPort"] for p in container("Job")["ports"]} == ports
    assert split_address(options["learner"]) == (service["metadata"]["name"], transport.port)
    assert service["spec"]["selector"] == objects()["Job"]["spec"]["template"]["metadata"]["labels"]
    assert transport.host == VALUES["$POD_IP"] and transport.keys == generator.transport.keys == "/keys"


def test_the_volumes_of_kubernetes_hold_what_the_settings_name(config: Path) -> None:
    for kind, role in (("Job", "learner"), ("Deployment", "generator")):
        pod = objects()[kind]["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(kind)["volumeMounts"]}
        assert mounts["/keys"]["secret"] == {"secretName": f"async-rl-{role}", "defaultMode": 0o400}
        assert mounts["/config"]["configMap"]["name"] == "async-rl-config"
        assert "fsGroup" not in str(pod), "keys that a group can read are refused"
    claim = objects()["PersistentVolumeClaim"]["metadata"]["name"]
    runs = next(v for v in objects()["Job"]["spec"]["template"]["spec"]["volumes"] if v["name"] == "runs")
    assert runs["persistentVolumeClaim"]["claimName"] == claim
    assert "run.dir=/runs/" in learner_script()


def test_the_probe_of_kubernetes_asks_for_a_page_that_is_served() -> None:
    probe = container("Job")["readinessProbe"]["httpGet"]
    assert probe["port"] == "http"
    server = StatusServer(dict)
    port = server.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", probe["path"])
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.close()


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_learner_of_kubernetes_ends_with_its_own_code(tmp_path: Path, spawn: Spawn, code: int) -> None:
    executable(tmp_path / "async-rl", f"#!/bin/sh\nexit {code}\n")
    shell = spawn(["/bin/sh", "-c", learner_script()], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert shell.wait(120) == code


def test_the_learner_of_kubernetes_that_is_told_to_go_is_not_complete(tmp_path: Path, spawn: Spawn) -> None:
    """It saves and exits with 0, which would end the Job."""
    waits = "trap 'touch saved; exit 0' TERM\ntouch started\nwhile :; do sleep 0.1; done\n"
    executable(tmp_path / "async-rl", f"#!/bin/sh\n{waits}")
    shell = spawn(["/bin/sh", "-c", learner_script()], cwd=tmp_path, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    until((tmp_path / "started").exists)
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(120) == 75
    assert (tmp_path / "saved").exists()


def until(what: Any) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- Slurm -----------------------------------------------------------------------------------------


def slurm_words() -> Iterator[list[str]]:
    """Command lines of async-rl in the script, settings filled in."""
    text = SLURM.read_text().replace("\\\n", " ")
    settings = re.search(r"^settings=\((.*?)\)$", text, re.M | re.S)
    assert settings is not None
    given = ["mine.toml", *shlex.split(settings[1])[1:]]
    for command in ("learner", "generator"):
        line = re.search(rf"async-rl ({command} .*?)(?: &| \|\|)", text)
        assert line is not None
        words = shlex.split(line[1])
        place = words.index("${settings[@]}")
        yield [*words[:place], *given, *words[place + 1 :]]


def test_the_commands_of_slurm_are_accepted_and_meet_each_other(config: Path) -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=60)
    (learner, _), (generator, options) = (loaded(filled(words, config)) for words in slurm_words())
    assert split_address(options["learner"]) == (learner.transport.host, learner.transport.port)
    assert learner.transport == generator.transport
    ports = {learner.transport.port, learner.transport.http_port, learner.weights.port}
    assert len(ports) == 3 and 0 not in ports


def test_the_slurm_script_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SLURM)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr

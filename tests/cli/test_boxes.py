"""Test the container file and the service files, as far as possible without a container tool."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_serve_command import served
from tests.support import ROOT
from tests.support.deployments import ONE_THREAD
from tests.support.helpers import run_edge
from tests.support.namespaces import need
from tests.support.trust import Cluster
from tests.support.workers import worker

WAIT_S = 60
UNITS = ("edge-serve.service", "edge-worker-system.service")


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the container file, with its arguments."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for instruction, rest in instructions():
        if instruction == "FROM":
            parts[rest.rpartition(" ")[2]] = own = []
        own.append((instruction, rest))
    return parts[name]


def health_check(name: str) -> list[str]:
    """The command of a stage's health check."""
    (check,) = [rest for instruction, rest in stage(name) if instruction == "HEALTHCHECK"]
    command: list[str] = json.loads(check.partition("CMD ")[2])
    return command


def test_images_run_as_a_user_without_rights_and_keep_nothing_of_the_build() -> None:
    steps = instructions()
    names = [instruction for instruction, _ in stage("base")]
    assert ("USER", "edge") in steps
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert not any("g++" in rest for _, rest in stage("base"))
    assert all(":latest" not in rest and (":" in rest or rest.startswith("base")) for i, rest in steps if i == "FROM")
    for name, command in (("serve", "serve"), ("worker", "worker")):
        (last,) = [json.loads(rest) for instruction, rest in stage(name) if instruction == "CMD"]
        assert last[0] == command
    assert steps[-1] == stage("serve")[-1]  # what is built without a target


def test_the_health_check_of_a_server_fails_once_it_has_ended() -> None:
    command = [sys.executable, *health_check("serve")[1:]]
    with served("--port", "0", "--prefix-cache", "0") as server:
        command[-1] = command[-1].replace("http://127.0.0.1:8080", server.url)
        assert subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False).returncode == 0
    assert subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False).returncode != 0


def test_the_health_check_of_a_worker_fails_once_it_has_ended(tmp_path: Path) -> None:
    """It may not ask another member of its cluster what it is, nor itself; but it answers by TLS."""
    command = [sys.executable, *health_check("worker")[1:]]
    cluster = Cluster(tmp_path / "cluster", time.time())
    cluster.joined("box")
    shutil.copytree(cluster.at("box"), tmp_path / "one" / "config" / "edge" / "credentials")
    with worker(tmp_path / "one", "--no-announce", *ONE_THREAD, listen="0.0.0.0:0") as daemon:
        command[-1] = command[-1].replace("7070", str(daemon.port))
        assert subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False).returncode == 0
    assert subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False).returncode != 0


def test_the_user_can_be_made_in_a_chroot(tmp_path: Path) -> None:
    """Over this system, of which nothing changes; what the step says is done as it stands."""
    need(os.geteuid() == 0, "a chroot needs root")
    need(shutil.which("unshare") is not None, "a mount of its own needs unshare, of util-linux")
    (step,) = [rest for instruction, rest in stage("base") if instruction == "RUN" and "useradd" in rest]
    script = f"""set -e
mount -t tmpfs tmpfs {tmp_path} && mkdir {tmp_path}/upper {tmp_path}/work {tmp_path}/root
mount -t overlay overlay -o lowerdir=/,upperdir={tmp_path}/upper,workdir={tmp_path}/work {tmp_path}/root || exit 99
chroot {tmp_path}/root /bin/sh -ec '{step}; id -u edge; stat -c %U /data'"""
    command = ["unshare", "--mount", "/bin/sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    is_mounted = done.returncode != 99 and "unshare" not in done.stderr
    need(is_mounted, f"no overlay may be mounted here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.split()) == (0, ["10001", "edge"]), done.stderr
    assert not Path("/data").exists() or Path("/data").owner() != "edge"


@pytest.mark.parametrize("name", UNITS)
def test_systemd_understands_the_units(name: str, tmp_path: Path) -> None:
    need(shutil.which("systemd-analyze") is not None, "units are checked by systemd-analyze, of systemd")
    unit = tmp_path / name
    unit.write_text((ROOT / "docs" / name).read_text().replace("/opt/edge/bin/edge", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    own = [line for line in done.stderr.splitlines() if name in line]
    assert (done.returncode, own) == (0, [])


@pytest.mark.parametrize("name", UNITS)
def test_units_start_commands_that_there_are(name: str) -> None:
    """With options that those take."""
    (line,) = re.findall(r"^ExecStart=/opt/edge/bin/edge (.*)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
    command, *options = line.split()
    words = run_edge(command, "--help-all").stdout
    assert all(option in words for option in options if option.startswith("--"))

"""Test the command `edge cluster`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apps.commands import cluster
from apps.options import Parser
from devices.errors import TrustError
from devices.paths import authority_folder, credentials_folder
from devices.trust import credentials
from devices.trust.authority import Authority
from devices.trust.invitation import parse_token
from tests.support import ROOT
from tests.support.trust import csr_for


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def edge_cluster(*args: str) -> int:
    """Run the command in this process."""
    parser = Parser(prog="edge cluster")
    cluster.add_arguments(parser)
    result = parser.parse_args(args)
    code: int = result.run(result)
    return code


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the output of the command, which must succeed."""
    capsys.readouterr()
    assert edge_cluster(*args) == 0
    return capsys.readouterr().out


def test_from_init_to_revoke(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    built = answer(capsys, "init", "--name", "desk")
    authority = Authority.open(authority_folder(), credentials_folder())
    assert built == f"cluster {authority.fingerprint}, owned by desk\n"

    token = answer(capsys, "invite", "pi").removesuffix("\n")
    assert parse_token(token).token() == token  # one line, and nothing else
    credentials.store_token(tmp_path / "pi", token)
    listed = answer(capsys, "list")
    assert "pi    worker, invited, expires 20" in listed

    current = credentials.load(tmp_path / "pi")
    assert current is not None
    assert current.holder.name == "pi"
    authority.enroll(current.certificate, csr_for("pi"))
    listed = answer(capsys, "list")
    assert listed.splitlines()[0] == f"cluster {authority.fingerprint}"
    assert "desk  owner, joined, since 20" in listed
    assert "pi    worker, joined, since 20" in listed

    assert "pi is revoked" in answer(capsys, "revoke", "pi")
    assert "nothing changed" in answer(capsys, "revoke", "pi")
    assert "pi    worker, revoked, since 20" in answer(capsys, "list")


def test_json(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    built = json.loads(answer(capsys, "init", "--name", "desk", "--json"))
    assert (built["owner"], built["folder"]) == ("desk", str(home / "edge" / "authority"))
    invited = json.loads(answer(capsys, "invite", "pi", "--expires", "2d", "--json"))
    assert invited.keys() == {"name", "token", "expires"}
    listed = json.loads(answer(capsys, "list", "--json"))
    assert listed["cluster"] == built["cluster"]
    assert [(m["name"], m["role"], m["state"]) for m in listed["members"]] == [
        ("desk", "owner", "joined"),
        ("pi", "worker", "invited"),
    ]
    assert listed["members"][1]["expires"] == invited["expires"]
    revoked = {"name": "pi", "state": "revoked", "changed": True}
    assert json.loads(answer(capsys, "revoke", "pi", "--json")) == revoked
    assert json.loads(answer(capsys, "revoke", "pi", "--json")) == {**revoked, "changed": False}


def test_help_for_people_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    edge_cluster("init")
    assert "edge cluster invite NAME" in capsys.readouterr().err
    edge_cluster("invite", "pi", "--expires", "15m")
    assert "edge worker --join TOKEN" in capsys.readouterr().err


@pytest.mark.parametrize("args", [("invite", "pi"), ("revoke", "pi"), ("list",)])
def test_without_a_cluster(args: tuple[str, ...]) -> None:
    with pytest.raises(TrustError, match="run `edge cluster init`"):
        edge_cluster(*args)


def test_init_twice(home: Path) -> None:
    edge_cluster("init", "--name", "desk")
    with pytest.raises(TrustError, match=f"owned by desk since .* delete {home}/edge/authority"):
        edge_cluster("init")


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 64])
def test_bad_names_are_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        edge_cluster("invite", name)
    assert caught.value.code == 2
    assert "a device's name has 1 to 56" in capsys.readouterr().err


@pytest.mark.parametrize("expires", ["", "1", "h", "59s", "31d", "-1h", "1.5h", "9999999999d", "1h\n", "٣h"])
def test_bad_times_are_wrong_usage(expires: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        edge_cluster("invite", "pi", f"--expires={expires}")
    assert caught.value.code == 2
    assert "60s to 30d" in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    code = """
import argparse, sys
from apps.commands import cluster
from apps.options import Parser
parser = argparse.ArgumentParser()
cluster.add_arguments(parser)
parser.format_help()
print(sorted(sys.modules.keys() & {"cryptography", "grpc", "ssl"}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

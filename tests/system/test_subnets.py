"""Two workers, each in a subnet of its own with the owner, linked over a third subnet that the owner does not have."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from devices.trust.authority import Authority
from tests.support.namespaces import Host, owner_between_two_workers
from tests.system.test_trust_network import Device, RunningWorker, join

ANSWERS = """
import json, sys
from edge.cluster.llm_ranks import LlmRanks, Exchange
from edge.cluster.fleet import Fleet
from edge.models.demo import MODEL_PATH
from edge.llm.engine import Engine
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from partition.model.file import ModelFile
from quant.gguf.file import GgufFile
from tests.support.deployments import OPTIONS, greedy_answers, pipeline, tensor

ASKED = ["What is 12 + 30?", "Which is heavier, a phone or a tablet?"]
*addresses, transport = sys.argv[1:]
model = ModelFile.open(MODEL_PATH)
with Engine(MODEL_PATH, OPTIONS) as engine:
    said = {"one device": greedy_answers(engine, ASKED, 12, {})}
for how in (pipeline(1, 1, 1), tensor(1, 1, 1)):
    plan = make_plan(limits(model), "demo", "", [LOCAL, *addresses], **how)
    with Fleet(addresses) as fleet:
        with LlmRanks(fleet, plan, model, OPTIONS, Exchange(transport=transport)) as deployment:
            said[how["parallel"]] = greedy_answers(deployment.engine, ASKED, 12, {})
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host, Host]]:
    with owner_between_two_workers() as all_three:
        yield all_three


@pytest.fixture
def devices(hosts: tuple[Host, Host, Host], tmp_path: Path) -> Iterator[list[Device]]:
    """A desk, which owns a cluster, and its members near and far."""
    with ExitStack() as stack:
        built = [Device(host, tmp_path / name) for host, name in zip(hosts, ("desk", "near", "far"), strict=True)]
        for device in built:
            stack.callback(device.close)
        yield built


def running(devices: list[Device], *options: str) -> list[RunningWorker]:
    """A worker on each device but the first."""
    with ThreadPoolExecutor(2) as pool:
        rest = ("--listen", "0.0.0.0:0", "--no-announce", "--threads", "1", *options)
        return list(pool.map(lambda device: device.worker(*rest, "--name", device.folder.name), devices[1:]))


def answers(desk: Device, workers: list[RunningWorker], transport: str) -> Any:
    """The answers of one device and of both plans."""
    words = [*(worker.address for worker in workers), transport]
    done = desk.host.run([sys.executable, "-c", ANSWERS, *words], {**os.environ, **desk.env}, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_members_are_linked_over_a_subnet_that_the_owner_lacks(devices: list[Device], transport: str) -> None:
    desk = devices[0]
    Authority.create(desk.authority_folder, "desk", desk.credentials)
    for device in devices[1:]:
        join(desk.authority(), device.credentials, device.folder.name)
    said = answers(desk, running(devices), transport)
    assert said["pipeline"] == said["tensor"] == said["one device"]


def test_insecure_workers_are_linked_over_it_too(devices: list[Device]) -> None:
    """`edge link` shows over which address."""
    workers = running(devices, "--insecure")
    link = devices[0].says("link", "--insecure", *(worker.address for worker in workers))
    assert "; at 10.77.3." in link

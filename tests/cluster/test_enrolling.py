"""Test that a device creates one key if two programs of its owner enrol it at once: the owner signs only one."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from devices.errors import TrustError
from devices.trust import certificates, credentials
from edge.worker.limits import WorkerOptions
from edge.worker.service import Worker
from tests.support.trust import Cluster, membership_in
from transport import edge_pb2 as pb


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, time.time())


@pytest.fixture
def pi(cluster: Cluster) -> Worker:
    """A worker that was invited. It has no store: nothing here asks it for a slice."""
    cluster.invited("pi")
    options = WorkerOptions("pi", "127.0.0.1", 1, None, None, cluster.at("pi"))
    return Worker(options, cast(Any, None), cast(Any, None), cast(Any, None))


def enroll(worker: Worker) -> Any:
    return worker.Enroll(pb.EnrollRequest(), cast(Any, None))


def test_two_at_once_are_given_the_same_request(pi: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    make, both = certificates.new_key, threading.Barrier(2)

    def slow() -> certificates.PrivateKey:
        try:
            both.wait(0.3)  # for another that makes one at the same time
        except threading.BrokenBarrierError:
            return make()
        pytest.fail("two keys are made")

    monkeypatch.setattr(certificates, "new_key", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: certificates.key_of_request(enroll(pi).csr_pem), range(2))
    assert first == second


def test_what_was_installed_is_not_asked_for_again(pi: Worker, cluster: Cluster) -> None:
    request = enroll(pi)
    certificate = cluster.authority.enroll(request.invitation_pem, request.csr_pem)
    provided = pb.Certificate(certificate_pem=certificate)
    assert pi.Install(provided, cast(Any, None)).name == "pi"
    assert membership_in(cluster.at("pi")).holder.role == "worker"
    with pytest.raises(TrustError, match="pi is a member already"):
        enroll(pi)
    with pytest.raises(TrustError, match="without a pending request"):
        pi.Install(provided, cast(Any, None))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_worker_that_restarts_before_it_has_the_answer_joins_all_the_same(
    pi: Worker, cluster: Cluster, damaged: bool
) -> None:
    """The owner has signed its key, and signs no other one."""
    pending = cluster.at("pi") / credentials.PENDING_FILE
    request = enroll(pi)
    if damaged:  # before the owner saw the request
        pending.write_text("damaged")
    else:
        cluster.authority.enroll(request.invitation_pem, request.csr_pem)
    restarted = Worker(pi._options, cast(Any, None), cast(Any, None), cast(Any, None))
    request = enroll(restarted)
    assert pending.stat().st_mode & 0o777 == 0o600
    certificate = cluster.authority.enroll(request.invitation_pem, request.csr_pem)
    assert restarted.Install(pb.Certificate(certificate_pem=certificate), cast(Any, None)).name == "pi"
    assert membership_in(cluster.at("pi")).holder.role == "worker"
    assert not pending.exists()


def test_a_worker_that_runs_while_another_token_is_stored_asks_with_another_key(pi: Worker, cluster: Cluster) -> None:
    old = certificates.key_of_request(enroll(pi).csr_pem)
    cluster.invited("pi")
    request = enroll(pi)
    assert certificates.key_of_request(request.csr_pem) != old
    certificate = cluster.authority.enroll(request.invitation_pem, request.csr_pem)
    assert pi.Install(pb.Certificate(certificate_pem=certificate), cast(Any, None)).name == "pi"


def test_a_device_is_told_that_it_was_refused(pi: Worker, caplog: pytest.LogCaptureFixture) -> None:
    enroll(pi)
    with caplog.at_level("WARNING"):
        pi.Install(pb.Certificate(refused="used already\n"), cast(Any, None))
    assert 'refused name=pi why="used already"' in caplog.text
    assert enroll(pi).csr_pem  # it may be asked again

"""Constraints that take for ever, or all of memory: each ends alone, and leaves nothing behind."""

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge.errors import ConstraintUnavailable, SamplingError
from edge.llama.llama import Model
from edge.models.demo import MODEL_PATH
from edge.text.constraints.constraint import Constraint
from edge.text.constraints.process import process_of
from tests.support.forked_modules import running
from tests.support.hostile import doubling

# Its parses explode behind the first letters, where an answer is under way.
_BEFORE = "edge, edge, edge and edge"
_LATE = doubling(12).replace("root ::= ", f'root ::= "{_BEFORE}" ')
_CHILD = "edge.text.constraints.child"


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model(MODEL_PATH, vocabulary_only=True)
    yield model
    model.close()


def processes() -> list[psutil.Process]:
    """Those that were started for models, and have not ended."""
    return [item for item in running(_CHILD) if item.status() != psutil.STATUS_ZOMBIE]


def forks() -> list[psutil.Process]:
    """The processes that follow a constraint now."""
    return [fork for process in processes() for fork in process.children()]


def followed(constraint: Constraint, model: Model) -> str:
    """The text of the first tokens that may come, until none may or 40 have come."""
    pieces = []
    for _ in range(40):
        allowed = np.isfinite(constraint.restrict(np.zeros(model.n_vocab, np.float32)))
        token = int(allowed.argmax())
        if model.is_end(token):
            break
        assert constraint.allows(token)
        constraint.accept(token)
        pieces.append(model.piece(token))
    return b"".join(pieces).decode()


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("grammar", doubling(30), "grammar takes more than 1 s of processor time to be compiled"),
        ("grammar", f'root ::= "{"a" * (10 << 20)}"', "grammar takes more than 1 s|192 MiB of memory"),
        ("regex", "." * (1 << 20), "regular expression cannot be compiled within 192 MiB of memory"),
        ("json_schema", '{"anyOf":[' * 100_000, "not valid JSON"),
        ("grammar", "root ::= \ud800", "grammar cannot be used|constraint cannot be used"),
    ],
)
def test_what_takes_too_much_is_refused_and_the_next_is_followed(
    model: Model, kind: str, source: str, reason: str
) -> None:
    with pytest.raises(SamplingError, match=reason):
        Constraint(model, kind, source)
    constraint = Constraint(model, "regex", "edge")
    assert followed(constraint, model) == "edge"


def test_one_that_explodes_under_way_ends_alone_and_says_why_each_time(model: Model) -> None:
    other, late = Constraint(model, "grammar", 'root ::= "edge!"'), Constraint(model, "grammar", _LATE)
    with pytest.raises(SamplingError, match=r"grammar takes more than .* a token of processor time to be followed"):
        followed(late, model)
    with pytest.raises(SamplingError, match="to be followed"):
        late.allows(0)
    late.accept(0)  # nobody is told
    assert followed(other, model) == "edge!"


def test_what_nobody_waits_for_is_not_compiled_to_its_end(model: Model) -> None:
    saved = Constraint(model, "regex", "edge")
    (fork,) = forks()
    with pytest.raises(SamplingError, match="not needed any more"):
        Constraint(model, "grammar", doubling(30), given_up=lambda: True)
    _, alive = psutil.wait_procs([item for item in forks() if item != fork], 30)
    assert not alive
    saved.close()
    assert not psutil.wait_procs([fork], 30)[1]


def test_nothing_is_left_when_the_model_is_closed(model: Model) -> None:
    constraint = Constraint(model, "regex", "a{1,20}")
    left = [*processes(), *forks()]
    assert len(left) == 2
    model.close()
    assert not psutil.wait_procs(left, 30)[1]
    with pytest.raises(
        SamplingError, match="regular expression cannot be followed: the process that does so was ended"
    ):
        constraint.allows(0)


def test_processes_that_were_killed_are_replaced(model: Model) -> None:
    constraint = Constraint(model, "regex", "edge")
    (fork,) = forks()
    fork.kill()
    with pytest.raises(SamplingError, match="its process was ended by signal 9"):
        constraint.allows(0)
    (first,) = processes()
    first.kill()
    psutil.wait_procs([first], 30)
    assert followed(Constraint(model, "regex", "edge"), model) == "edge"


def test_a_busy_machine_is_reported_apart_from_an_unusable_expression(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise ChildProcessError("the machine is very busy")

    monkeypatch.setattr("edge.text.constraints.process.ConstraintProcess.start", refuse)
    with pytest.raises(ConstraintUnavailable, match="expression cannot be started: the machine is very busy"):
        Constraint(model, "regex", "edge")


def test_a_mask_that_comes_in_part_ends_one_answer_alone(model: Model) -> None:
    """A process that stands still behind the first bytes of it is given up like one that has not answered at all."""
    constraint = Constraint(model, "regex", "edge")
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:
        ours.settimeout(0.1)  # nothing more comes
        constraint._socket, constraint._stream = ours, stream
        theirs.sendall(b'{"mask": [true]}\nx')
        assert constraint.masks([]) is None
        with pytest.raises(ConstraintUnavailable, match="expression was not followed in 20 s: the machine is busy"):
            constraint.restrict(np.zeros(model.n_vocab, np.float32))


def test_a_process_that_ends_within_a_mask_ends_the_answer(model: Model) -> None:
    """The rest of the mask is not taken for tokens that may not come next."""
    constraint = Constraint(model, "regex", "edge")
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rb") as stream:
        with theirs:
            theirs.sendall(b'{"mask": [true]}\nx')
        constraint._socket, constraint._stream = ours, stream
        with pytest.raises(SamplingError, match="cannot be followed: the process that does so was ended"):
            constraint.restrict(np.zeros(model.n_vocab, np.float32))


def test_a_file_that_has_gone_is_an_error(model: Model, tmp_path: Path) -> None:
    model.path = str(tmp_path / "gone.gguf")
    with pytest.raises(SamplingError, match="the process that does so was ended"):
        Constraint(model, "regex", "edge")


def test_there_is_one_process_for_a_model(model: Model) -> None:
    assert process_of(model) is process_of(model)
    constraints = [Constraint(model, "regex", f"edge{n}") for n in range(3)]
    assert len(processes()) == 1
    assert len(forks()) == 3
    assert [followed(constraint, model) for constraint in constraints] == ["edge0", "edge1", "edge2"]

"""Conversion between messages of transport/edge.proto and Python values.

Unknown fields are ignored. Absent fields have their default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from devices.profile import DeviceProfile
from edge.errors import EdgeError
from transport import edge_pb2 as pb
from transport.link import Deadlines

if TYPE_CHECKING:  # describing a device needs neither llama.cpp nor numpy
    from edge.llm.options import EngineOptions
    from edge.onnx.wire import Boundary, Tensor
    from partition.plan.onnx_plan import OnnxStage

_MOST_DEADLINE_S = 86_400.0
_MOST_TEXT = 300  # maximum characters of a peer's text in an error message
_OF_ONE_DEVICE = frozenset(  # engine options that each device sets for itself, and options of the owner alone
    {"prefixes", "most_gpu_layers", "gpu_memory", "least_memory", "prefer"}
    | {"draft_rows", "draft_bytes", "lora", "attention_window"}
)

T = TypeVar("T")


def profile_message(profile: DeviceProfile) -> pb.DeviceProfile:
    """Return a profile as a message. None becomes an absent field."""
    return pb.DeviceProfile(**profile.to_json())


def profile_from(message: pb.DeviceProfile) -> DeviceProfile:
    """Return the profile in a message. Raises ValueError if a field is missing or out of range."""
    return DeviceProfile.from_json(_present(message))


def deadlines_of(request: pb.Open) -> Deadlines:
    """Return the deadlines of a session's links. Raises EdgeError for an invalid time, such as NaN."""
    seconds = {}
    for name, usual in dataclasses.asdict(Deadlines()).items():
        value = getattr(request, name) or usual
        if not 0 < value <= _MOST_DEADLINE_S:
            raise EdgeError(f"{name} is {value:g}; expected seconds above 0, up to {_MOST_DEADLINE_S:g}")
        seconds[name] = value
    return Deadlines(**seconds)


def options_message(options: EngineOptions) -> pb.EngineOptions:
    """Return engine options as a message. None becomes an absent field."""
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in _OF_ONE_DEVICE}
    if not options.rollback:
        del values["rollback"]
    return pb.EngineOptions(**values)


def options_from(message: pb.EngineOptions) -> EngineOptions:
    """Return the engine options in a message. Raises EngineError if an option is out of range."""
    from edge.llm.options import EngineOptions

    return EngineOptions(**_present(message))


def stage_message(stage: OnnxStage, takes: Boundary, gives: Boundary) -> pb.Stage:
    """Return a stage of a plan, with the tensors at its boundaries, as a message."""
    takes_, gives_ = _boundary_message(takes), _boundary_message(gives)
    return pb.Stage(takes=takes_, gives=gives_, threads=stage.threads, provider=stage.provider)


def boundaries_from(message: pb.Stage) -> tuple[Boundary, Boundary]:
    """Return the boundaries before and after a stage. Raises EdgeError if a field is invalid."""
    return _boundary(message.takes, "takes"), _boundary(message.gives, "gives")


def _present(message: Any) -> dict[str, Any]:
    """Return the values of the present fields by name."""
    return {field.name: value for field, value in message.ListFields()}


def _boundary_message(boundary: Boundary) -> pb.Boundary:
    tensors = [
        pb.Tensor(name=t.name, type=t.type, shape=t.shape, open=t.open, any_rank=t.any_rank) for t in boundary.tensors
    ]
    return pb.Boundary(tensors=tensors, inner=boundary.inner, passed=boundary.passed)


def _boundary(message: pb.Boundary, field: str) -> Boundary:
    from edge.onnx.wire import Boundary

    tensors = [_tensor(tensor, f"{field}.tensors[{i}]") for i, tensor in enumerate(message.tensors)]
    return _named(lambda: Boundary(tuple(tensors), message.inner, message.passed), f"{field}.passed")


def _tensor(message: pb.Tensor, field: str) -> Tensor:
    from edge.onnx.wire import Tensor

    arguments = (message.name, message.type, tuple(message.shape), tuple(message.open), message.any_rank)
    return _named(lambda: Tensor(*arguments), field)


def _named(make: Callable[[], T], field: str) -> T:
    """Call `make`, and raise EdgeError with the field's name instead of its ValueError."""
    try:
        return make()
    except ValueError as error:
        why = f"{field}: {error}"
        raise EdgeError(
            f"the description of this stage is invalid: {why:.{_MOST_TEXT}}; update both devices"
        ) from error

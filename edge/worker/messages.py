"""What passes between owner and worker as messages of transport/edge.proto, and as the values that it stands for.

A field that this version does not know is ignored. A field that is absent has its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from devices.profile import DeviceProfile
from edge.errors import EdgeError
from transport import edge_pb2 as pb

if TYPE_CHECKING:  # who asks what a device is loads neither llama.cpp nor numpy
    from edge.llm.options import EngineOptions
    from edge.onnx.wire import Boundary, Tensor
    from partition.plan.onnx_plan import OnnxStage

_MOST_TEXT = 300  # characters of what a peer sent, in an error

T = TypeVar("T")


def profile_message(profile: DeviceProfile) -> pb.DeviceProfile:
    """A profile as a message. What is None is absent."""
    return pb.DeviceProfile(**profile.to_json())


def profile_of(message: pb.DeviceProfile) -> DeviceProfile:
    """The profile that a message holds. ValueError names the field that is missing, or out of its range."""
    return DeviceProfile.from_json(_given(message))


def options_message(options: EngineOptions) -> pb.EngineOptions:
    """Engine options as a message. What is None is absent."""
    values = dataclasses.asdict(options)
    del values["prefixes"], values["most_gpu_layers"]  # each device has its own
    del values["draft_rows"], values["draft_bytes"]  # are for what the owner is told
    return pb.EngineOptions(**values)


def options_of(message: pb.EngineOptions) -> EngineOptions:
    """The engine options that a message holds. EngineError names the option that is out of its range."""
    from edge.llm.options import EngineOptions

    return EngineOptions(**_given(message))


def stage_message(stage: OnnxStage, takes: Boundary, gives: Boundary) -> pb.Stage:
    """A stage of a plan, and what crosses its boundaries, as a message."""
    takes_, gives_ = _boundary_message(takes), _boundary_message(gives)
    return pb.Stage(takes=takes_, gives=gives_, threads=stage.threads, provider=stage.provider)


def boundaries_of(message: pb.Stage) -> tuple[Boundary, Boundary]:
    """(what the stage takes, what it gives). EdgeError names the field that cannot be."""
    return _boundary(message.takes, "takes"), _boundary(message.gives, "gives")


def _given(message: Any) -> dict[str, Any]:
    """The values of the fields that are present, by name."""
    return {field.name: value for field, value in message.ListFields()}


def _boundary_message(boundary: Boundary) -> pb.Boundary:
    tensors = [
        pb.Tensor(name=t.name, type=t.type, shape=t.shape, open=t.open, any_rank=t.any_rank) for t in boundary.tensors
    ]
    return pb.Boundary(tensors=tensors, inner=boundary.inner, passed=boundary.passed)


def _boundary(message: pb.Boundary, field: str) -> Boundary:
    from edge.onnx.wire import Boundary

    tensors = [_tensor(one, f"{field}.tensors[{i}]") for i, one in enumerate(message.tensors)]
    return _named(lambda: Boundary(tuple(tensors), message.inner, message.passed), f"{field}.passed")


def _tensor(message: pb.Tensor, field: str) -> Tensor:
    from edge.onnx.wire import Tensor

    given = (message.name, message.type, tuple(message.shape), tuple(message.open), message.any_rank)
    return _named(lambda: Tensor(*given), field)


def _named(make: Callable[[], T], field: str) -> T:
    """What `make` makes. EdgeError with the field's name where it raises ValueError."""
    try:
        return make()
    except ValueError as error:
        why = f"{field}: {error}"
        raise EdgeError(f"this stage is not described as needed: {why:.{_MOST_TEXT}}; update both devices") from error

"""Test the OpenAPI description of the server, and generated requests from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from edge.serve.devices.devices import ServedDevices
from edge.serve.endpoints import endpoints
from edge.serve.http.openapi import Endpoint, openapi
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.support.thorough import some

if TYPE_CHECKING:
    import schemathesis


def all_endpoints() -> list[Endpoint]:
    models = ScriptedModels()
    return endpoints(models, ServeOptions(), ServedDevices(models, ServeOptions()))


DESCRIPTION = openapi(all_endpoints())
OPERATIONS = [f"{method} {path}" for path, methods in DESCRIPTION["paths"].items() for method in methods]
WITH_BODIES = {
    f"{method} {path}"
    for path, methods in DESCRIPTION["paths"].items()
    for method, operation in methods.items()
    if "requestBody" in operation
}


def unbounded(schema: Any, *, bounded: bool = False) -> Iterator[Any]:
    """The lists and objects in a validator's schema that collect an error of each of their items."""
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from unbounded(part)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        items = schema.get("values_schema" if kind == "dict" else "items_schema", {})
        may_err = kind in ("list", "dict") and not items.get("schema_ref", "").startswith("pydantic.types.JsonValue")
        if may_err and not (bounded or schema.get("fail_fast")):
            yield schema
        for key, part in schema.items():
            if key not in ("metadata", "serialization", "default"):
                yield from unbounded(part, bounded=kind == "function-before")


def test_no_list_or_object_of_a_request_collects_an_error_of_each_item() -> None:
    for endpoint in all_endpoints():
        if endpoint.request is not None:
            assert not list(unbounded(endpoint.request.__pydantic_core_schema__)), endpoint.path


LIMITS = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}


def test_all_that_is_answered_is_described(server: str) -> None:
    response = httpx.get(f"{server}/openapi.json").json()
    assert response == DESCRIPTION
    assert response["openapi"].startswith("3.1")
    assert len(OPERATIONS) == len(all_endpoints())


def keep_short(case: schemathesis.Case) -> None:
    """Answers that fill the context many times over would take long, and show nothing."""
    if isinstance(case.body, dict):
        if case.path == "/v1/cluster/invitations":  # a cluster and the pages of browsers stay after the test
            case.body = {**case.body, "init": False, "browser": False}
            return
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 2)
        if case.path.startswith("/api/"):
            case.body = {**case.body, "options": {"num_predict": 4}, "keep_alive": 300}
            return
        limit = LIMITS.get(case.path, "max_tokens")
        if case.body.get(limit) is None or isinstance(case.body[limit], int):
            case.body[limit] = min(case.body.get(limit) or 4, 4)


MODES = ("positive", "negative")


# What breaks the description in its body, or follows it; where there is no body, nothing can be broken.
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in OPERATIONS for mode in MODES if name in WITH_BODIES or mode == "positive"],
)
def test_no_request_is_answered_with_a_server_error(
    server: str, name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import schemathesis  # takes seconds: not where tests are collected
    from schemathesis.generation import GenerationMode

    async def planned(*_: object) -> dict[str, Any]:
        """Measure nothing, because that takes long."""
        return {"points": [], "rows": [], "devices": [], "notes": []}

    monkeypatch.setattr("edge.serve.planning.fronts.planned", planned)
    monkeypatch.setattr("edge.serve.planning.advice.planned", planned)
    method, path = name.split()
    operation = schemathesis.openapi.from_dict(DESCRIPTION)[path][method]

    @settings(max_examples=some(3, 200), database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case: schemathesis.Case) -> None:
        keep_short(case)
        response = case.call(base_url=server, timeout=60)
        assert response.status_code < 500, response.text

    ask()

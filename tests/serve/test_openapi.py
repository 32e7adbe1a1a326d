"""The description of the server in OpenAPI, and requests made from it that nobody thought of."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from edge.serve.app import create_app
from edge.serve.endpoints import endpoints
from edge.serve.http.openapi import openapi
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.thorough import some

DESCRIPTION = openapi(endpoints(ScriptedModels(), ServeOptions()))
OPERATIONS = {
    f"{one.ok().method} {one.ok().path}": one.ok()
    for one in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions())) as address:
        yield address


def test_all_that_is_answered_is_described(url: str) -> None:
    told = httpx.get(f"{url}/openapi.json").json()
    assert told == DESCRIPTION
    assert told["openapi"].startswith("3.1")
    assert len(OPERATIONS) == len(endpoints(ScriptedModels(), ServeOptions()))


# What breaks the description in its body, or follows it; where there is no body, nothing can be broken.
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in OPERATIONS for mode in GenerationMode if name.startswith("post") or mode.is_positive],
)
def test_no_request_is_answered_with_a_server_error(url: str, name: str, mode: Any) -> None:
    @settings(max_examples=some(5, 200), database=None, suppress_health_check=list(HealthCheck))
    @given(OPERATIONS[name].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        told = case.call(base_url=url, timeout=60)
        assert told.status_code < 500, told.text

    ask()

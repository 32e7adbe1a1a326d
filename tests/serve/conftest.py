"""Fixtures: the bundled model on a real server, once for each test file.

Its official clients take seconds to import: tests import them where they run, not where they are collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

OPTIONS = EngineOptions(threads=1, sequences=4)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address; the model is named `edge-demo-q8_0`."""
    router = Router({MODEL_PATH.stem: EngineConfig(str(MODEL_PATH), OPTIONS, prefix_cache=0)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


@pytest.fixture(scope="module")
def openai(server: str) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(server: str) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=server, api_key="none", max_retries=0, timeout=300) as client:
        yield client

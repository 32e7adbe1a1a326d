"""Test that a key reveals nothing about prompts of another key: in the cache, on disk, and after a restart."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving

KEYS = ("sk-first", "sk-second")
SECRET = "The number of my account is 4711 0815, and its password is swordfish. " * 2


@contextmanager
def server(keys: tuple[str, ...] = KEYS, *, shared: bool = False, disk_bytes: int = 0) -> Iterator[str]:
    router = Router(
        {"demo": EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=5), prefix_cache=disk_bytes)}
    )
    options = ServeOptions(api_keys=keys, shared_prefixes=shared)
    with serving(create_app(router, options), at_end=router.close) as address:
        yield address


def cached(url: str, key: str, text: str = SECRET) -> int:
    """Return how much of a prompt need not be computed, as its answer says."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        ask = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = httpx.post(url + path, json={**ask, "max_tokens": 2, "temperature": 0}, headers=headers, timeout=120)
        result = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        if result:
            return int(result)
    return 0


@pytest.mark.parametrize("disk_bytes", [0, 1 << 24], ids=["in the cache", "on disk"])
def test_each_key_has_its_own(disk_bytes: int) -> None:
    first, second = KEYS
    with server(disk_bytes=disk_bytes) as url:
        assert cached(url, first) == 0
        assert cached(url, second) == 0
        assert cached(url, first) > 30
        assert cached(url, second) > 30
        assert cached(url, second, SECRET[:60]) > 8
    if not disk_bytes:
        return
    with server((*KEYS, "sk-third"), disk_bytes=disk_bytes) as url:
        assert cached(url, "sk-third") == 0
        assert cached(url, first) > 30
    with server((), disk_bytes=disk_bytes) as url:
        assert cached(url, "") == 0


def test_keys_that_share_have_one() -> None:
    first, second = KEYS
    with server(shared=True) as url:
        assert cached(url, first) == 0
        assert cached(url, second) > 30


def test_without_keys_all_is_shared_also_with_who_gives_one() -> None:
    with server(()) as url:
        assert cached(url, "") == 0
        assert cached(url, "sk-any") > 30
        assert cached(url, "") > 30

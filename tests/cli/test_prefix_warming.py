"""`edge serve --prefix-warming`: on, off, seconds of an hour, and what is refused."""

import urllib.error

import pytest

from tests.cli.test_serve_command import refused, served
from tests.support.helpers import until

TEXT = "You are a pirate who knows the seven seas, and who likes to talk about each of them."


def cached_tokens(*options: str) -> int:
    """Return how many tokens of a chat's second prompt were there when it came, behind what its client has added."""
    with served("--prefix-cache", "0", "--draft", "off", *options) as server:
        chat = [{"role": "user", "content": "What is 3 plus 4?"}]
        answer = server.post("/v1/chat/completions", {"messages": chat, "temperature": 0})
        if options:
            until(lambda: server.status()["warming"]["computed_tokens"] > 0, "the turn that is computed ahead")
        chat += [answer["choices"][0]["message"], {"role": "user", "content": "And 2 plus 2?"}]
        chat[1].pop("refusal", None)
        usage = server.post("/v1/chat/completions", {"messages": chat, "temperature": 0, "max_tokens": 1})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_the_turn_before_need_not_be_computed() -> None:
    """Also the last token of the answer, and what the template writes behind it."""
    assert cached_tokens("--prefix-warming", "on") > cached_tokens()


def test_announcing_needs_it() -> None:
    with served("--prefix-cache", "0", "--prefix-warming", "60") as server:
        assert server.post("/v1/prefixes", {"prompt": TEXT})["tokens"] > 10
    with served("--prefix-cache", "0") as server, pytest.raises(urllib.error.HTTPError):
        server.post("/v1/prefixes", {"prompt": TEXT})


@pytest.mark.parametrize("how", ["never", "0", "-1", "3601", "nan"])
def test_what_is_no_part_of_an_hour_is_refused(how: str) -> None:
    code, said = refused("--prefix-warming", how)
    assert code == 2
    assert "--prefix-warming" in said


def test_a_reproducible_server_computes_nothing_ahead() -> None:
    code, said = refused("--prefix-warming", "on", "--reproducible")
    assert code == 2
    assert "leave one of them out" in said

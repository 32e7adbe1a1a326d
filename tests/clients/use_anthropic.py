"""Anthropic's own client."""

from anthropic import Anthropic
from common import MODEL, QUESTION, SCHEMA, URL, follows, main, said, streamed

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}]}


def hello() -> str:
    return said(client.messages.create(**ASKED).content[0].text)


def stream() -> str:
    with client.messages.stream(**ASKED) as response:
        return streamed(list(response.text_stream))


def tools() -> str:
    tool = {"name": "forecast", "description": "The weather of a city.", "input_schema": SCHEMA}
    response = client.messages.create(**ASKED, tools=[tool], tool_choice={"type": "any"})
    return follows(next(block for block in response.content if block.type == "tool_use").input)


def structured() -> str:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return follows(client.messages.create(**ASKED, output_config=form).content[0].text)


def thoughts() -> str:
    request = {**ASKED, "model": "thinker", "thinking": {"type": "enabled", "budget_tokens": 8}}
    request["extra_body"] = {"temperature": 0}
    thought, text = client.messages.create(**request).content
    assert (thought.type, text.type) == ("thinking", "text"), (thought, text)
    with client.messages.stream(**request) as response:
        streamed, _ = response.get_final_message().content
    assert (streamed.thinking, streamed.signature) == (thought.thinking, thought.signature)
    return said(thought.thinking)


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured, "thoughts": thoughts})

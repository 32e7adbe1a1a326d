"""smolagents: its model of OpenAI's API, and the functions of its agents."""

from typing import Literal

from common import MODEL, QUESTION, SCHEMA, URL, follows, main, said, streamed
from smolagents import OpenAIServerModel, tool
from smolagents.models import ChatMessage, MessageRole

model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=200, temperature=0)
ASKED = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


@tool
def forecast(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


def hello() -> str:
    return said(model.generate(ASKED).content)


def stream() -> str:
    return streamed([delta.content or "" for delta in model.generate_stream(ASKED)])


def tools() -> str:
    response = model.generate(ASKED, tools_to_call_from=[forecast], tool_choice="required").tool_calls[0].function
    assert response.name == "forecast", response
    return str(response.arguments)


def structured() -> str:
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    return follows(model.generate(ASKED, response_format=schema).content)


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

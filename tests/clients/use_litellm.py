"""litellm, as it speaks with a server of OpenAI's API."""

import litellm
from common import MODEL, QUESTION, SCHEMA, URL, follows, main, said, streamed

ASKED = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": QUESTION}],
}


def hello() -> str:
    return said(litellm.completion(**ASKED).choices[0].message.content)


def stream() -> str:
    return streamed([chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ASKED, stream=True)])


def tools() -> str:
    tool = {"type": "function", "function": {"name": "forecast", "description": "Weather.", "parameters": SCHEMA}}
    response = litellm.completion(**ASKED, tools=[tool], tool_choice="required")
    return follows(response.choices[0].message.tool_calls[0].function.arguments)


def structured() -> str:
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    return follows(litellm.completion(**ASKED, response_format=schema).choices[0].message.content)


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

"""OpenAI's own client: chats and responses."""

from common import MODEL, QUESTION, SCHEMA, URL, follows, main, said, streamed
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
FUNCTION = {"name": "forecast", "description": "The weather of a city.", "parameters": SCHEMA}
LIMIT = {"model": MODEL, "max_tokens": 200}


def hello() -> str:
    return said(client.chat.completions.create(messages=MESSAGES, **LIMIT).choices[0].message.content)


def stream() -> str:
    chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **LIMIT)
    return streamed([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])


def tools() -> str:
    response = client.chat.completions.create(
        messages=MESSAGES, tools=[{"type": "function", "function": FUNCTION}], tool_choice="required", **LIMIT
    )
    return follows(response.choices[0].message.tool_calls[0].function.arguments)


def structured() -> str:
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    response = client.chat.completions.create(messages=MESSAGES, response_format=schema, **LIMIT)
    follows(response.choices[0].message.content)
    schema = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}
    return follows(client.responses.create(input=QUESTION, model=MODEL, max_output_tokens=200, text=schema).output_text)


def thoughts() -> str:
    request = {"messages": MESSAGES, "model": "thinker", "temperature": 0, "extra_body": {"reasoning_budget": 8}}
    message = client.chat.completions.create(**request).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    items = client.responses.create(input=QUESTION, model="thinker", max_output_tokens=40).output
    assert items[0].type == "reasoning", items
    return said(message.reasoning_content)


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured, "thoughts": thoughts})

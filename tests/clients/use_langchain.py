"""LangChain, by OpenAI's API or by Anthropic's: the first argument says which."""

import sys

from common import MODEL, QUESTION, SCHEMA, URL, follows, main, said, streamed
from langchain_core.tools import tool

if sys.argv[1] == "anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=200, max_retries=0)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200, max_retries=0)


def hello() -> str:
    return said(model.invoke(QUESTION).text)


def stream() -> str:
    return streamed([chunk.text for chunk in model.stream(QUESTION)])


def tools() -> str:
    @tool(args_schema=SCHEMA)
    def forecast(city: str, days: int) -> str:
        """The weather of a city."""
        return "sunny"

    return follows(model.bind_tools([forecast], tool_choice="any").invoke(QUESTION).tool_calls[0]["args"])


def structured() -> str:
    titled = {"title": "trip", "description": "A trip.", **SCHEMA}
    return follows(model.with_structured_output(titled, method="json_schema").invoke(QUESTION))


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

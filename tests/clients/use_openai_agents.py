"""openai-agents: an agent by OpenAI's responses, with a function, and with an answer of a model."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.agent import StopAtTools
from common import MODEL, QUESTION, URL, follows, main, said, streamed
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
called: list[dict[str, object]] = []


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@function_tool
def forecast(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    called.append({"city": city, "days": days})
    return "sunny"


def agent(choice: str | None = None, **more: object) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(max_tokens=200, tool_choice=choice)
    return Agent("helper", model=OpenAIResponsesModel(MODEL, client), model_settings=settings, **more)


def hello() -> str:
    return said(asyncio.run(Runner.run(agent(), QUESTION)).final_output)


def stream() -> str:
    async def pieces() -> list[str]:
        events = Runner.run_streamed(agent(), QUESTION).stream_events()
        raw = [event.data async for event in events if event.type == "raw_response_event"]
        return [item.delta for item in raw if item.type == "response.output_text.delta"]

    return streamed(asyncio.run(pieces()))


def tools() -> str:
    stops = StopAtTools(stop_at_tool_names=["forecast"])
    asyncio.run(Runner.run(agent("required", tools=[forecast], tool_use_behavior=stops), QUESTION))
    return follows(called[0])


def structured() -> str:
    return follows(asyncio.run(Runner.run(agent(output_type=Trip), QUESTION)).final_output.model_dump())


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

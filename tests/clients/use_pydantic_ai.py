"""pydantic-ai: an agent with a function, and with an answer of a model."""

import asyncio
from typing import Literal

from common import MODEL, QUESTION, URL, follows, main, said, streamed
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
SETTINGS = {"max_tokens": 200}


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def hello() -> str:
    return said(Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output)


def stream() -> str:
    async def pieces() -> list[str]:
        async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as response:
            return [piece async for piece in response.stream_text(delta=True, debounce_by=None)]

    return streamed(asyncio.run(pieces()))


def tools() -> str:
    agent = Agent(model, output_type=ToolOutput(Trip), model_settings=SETTINGS)
    return follows(agent.run_sync(QUESTION).output.model_dump())


def structured() -> str:
    agent = Agent(model, output_type=NativeOutput(Trip), model_settings=SETTINGS)
    return follows(agent.run_sync(QUESTION).output.model_dump())


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

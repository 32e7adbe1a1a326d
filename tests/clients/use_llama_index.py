"""LlamaIndex, by its model of servers that are like OpenAI's."""

from typing import Literal

from common import MODEL, QUESTION, URL, follows, main, said, streamed
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ASKED = [ChatMessage(role="user", content=QUESTION)]


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def model(**more: object) -> OpenAILike:
    where = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
    return OpenAILike(
        model=MODEL,
        **where,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=200,
        context_window=2048,
        **more,
    )


def hello() -> str:
    return said(model().chat(ASKED).message.content)


def stream() -> str:
    return streamed([piece.delta or "" for piece in model().stream_chat(ASKED)])


def tools() -> str:
    def forecast(city: Literal["Rome", "Oslo"], days: int) -> str:
        """The weather of a city."""
        return "sunny"

    first = FunctionTool.from_defaults(forecast, fn_schema=Trip)
    response = model().chat_with_tools([first], chat_history=ASKED, tool_required=True)
    return follows(model().get_tool_calls_from_response(response)[0].tool_kwargs)


def structured() -> str:
    structured_model = model(should_use_structured_outputs=True).as_structured_llm(Trip)
    return follows(structured_model.chat(ASKED).raw.model_dump())


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

"""instructor: answers as models of pydantic."""

from typing import Literal

import instructor
from common import MODEL, QUESTION, URL, follows, main, streamed
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

raw = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}


class Trip(BaseModel):
    # Other properties are allowed otherwise, and a small model goes on with them until `max_tokens`.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def structured(mode: instructor.Mode = instructor.Mode.JSON_SCHEMA) -> str:
    trip = instructor.from_openai(raw, mode=mode).chat.completions.create(response_model=Trip, **ASKED)
    return follows(trip.model_dump())


def tools() -> str:
    return structured(instructor.Mode.TOOLS)


def stream() -> str:
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
    return streamed([str(part) for part in client.chat.completions.create_partial(response_model=Trip, **ASKED)])


main({"stream": stream, "tools": tools, "structured": structured})

"""llm, the command, with the server among its models."""

import json
import os
import sys
import tempfile
from pathlib import Path

from common import MODEL, QUESTION, SCHEMA, URL, command, follows, main, said

folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": "edge",
                "model_name": MODEL,
                "api_base": f"{URL}/v1",
                "supports_schema": True,
                "supports_tools": True,
            }
        ]
    )
)
LLM = [str(Path(sys.executable).with_name("llm")), "-m", "edge", "-o", "max_tokens", "200"]
ENVIRONMENT = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
FORECAST = "def forecast(city: str) -> str:\n    'The weather of a city.'\n    return 'sunny in ' + city\n"


def answer_of(*more: str) -> str:
    return command([*LLM, *more, QUESTION], env=ENVIRONMENT)


def hello() -> str:
    return said(answer_of("--no-stream"))


def stream() -> str:
    return said(answer_of())


def tools() -> str:
    return said(answer_of("--functions", FORECAST, "--chain-limit", "3"))


def structured() -> str:
    return follows(answer_of("--no-stream", "--schema", json.dumps(SCHEMA)))


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

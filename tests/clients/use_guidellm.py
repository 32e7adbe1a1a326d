"""guidellm, a load generator: some requests at once to each API that it knows, which say how long answers are to be."""

import json
import os
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL, command, main

folder = Path(tempfile.mkdtemp())
questions = folder / "questions.jsonl"
questions.write_text(
    "".join(json.dumps({"prompt": f"What is {n} + {n}?", "output_tokens_count": 12}) + "\n" for n in range(8))
)
RUN = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).with_name("stand_ins")), "HF_HUB_OFFLINE": "1"}


def load(api: str, stream: bool) -> str:
    report = folder / f"{api.replace('/', '-')}-{stream}.json"
    backend = {"kind": "openai_http", "target": URL, "model": MODEL, "request_format": api, "stream": stream}
    options = {
        "backend": {**backend, "http2": False},
        "data": {"kind": "json_file", "path": str(questions)},
        "profile": {"kind": "concurrent", "streams": 4},
        "constraint": {"kind": "max_requests", "count": 8},
        "output": {"kind": "json", "path": str(report)},
    }
    command(
        [*RUN, *(word for name, value in options.items() for word in (f"--{name}", json.dumps(value)))], env=ENVIRONMENT
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 8, totals
    return f"{api}: {totals['successful']} answers"


def whole() -> str:
    return ", ".join(load(api, False) for api in ("/v1/chat/completions", "/v1/completions", "/v1/responses"))


def stream() -> str:
    return ", ".join(load(api, True) for api in ("/v1/chat/completions", "/v1/completions", "/v1/responses"))


main({"hello": whole, "stream": stream})

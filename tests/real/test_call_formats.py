"""Formats of calls in the templates that models ship: recognized, and rendered with earlier calls that parse again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edge.serve.tools.conversation import conversation
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.parser import CallParser
from edge.text.templates.formats import format_of
from edge.text.templates.process import TemplateProcess
from edge.text.templates.template import ChatTemplate
from tests.real.templates import templates
from tests.serve.calls import merged

FORMATS = {
    "apriel": "Apriel-1.6-15b-Thinker-fixed unsloth-Apriel-1.5",
    "cohere": "Cohere2MoE CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "deepseek": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-dsml": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-r1": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
    " llama-cpp-deepseek-r1",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "functionary": "meetkai-functionary-medium-v3.1",
    "gemma": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "gigachat": "GigaChat3.1-10B-A1.8B",
    "glm": "GLM-4.6 GLM-4.7-Flash Spark2.5 inclusionai-ling-3.0-flash poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1"
    " poolside-Laguna-XS.2",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "harmony": "openai-gpt-oss-120b",
    "hermes": "Bielik-11B-v3.0-Instruct MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
    " NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Reka-Edge"
    " ibm-granite-granite-4.0 ibm-granite-granite-4.1 HuggingFaceTB-SmolLM3-3B",
    "kimi": "Kimi-K2-Instruct Kimi-K2-Thinking moonshotai-Kimi-K2",
    "lfm2": "LFM2-8B-A1B LFM2.5-8B-A1B LFM2.5-Instruct",
    "llama3": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct",
    "minicpm": "openbmb-MiniCPM5-1B",
    "minimax": "MiniMax-M2",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-args": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512"
    " unsloth-mistral-Devstral-Small-2507",
    "nemotron": "NVIDIA-Nemotron-Nano-v2",
    "qwen-xml": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash",
    "seed": "ByteDance-Seed-OSS",
    "solar": "upstage-Solar-Open-100B",
}
MODELS = [pytest.param(name, form, id=name) for form, names in FORMATS.items() for name in names.split()]
CALLS: list[dict[str, Any]] = [
    {"name": "weather", "arguments": {"city": "Zürich", "days": 3}},
    {"name": "note", "arguments": {"text": 'a "b" < c', "tags": ["x", "y"]}},
]
STRING: Any = {"type": "string", "description": "A text."}
FUNCTIONS = [
    Function(
        "weather", "Tells.", {"type": "object", "properties": {"city": STRING, "days": {**STRING, "type": "integer"}}}
    ),
    Function("note", "Notes.", {"type": "object", "properties": {"text": STRING, "tags": {**STRING, "type": "array"}}}),
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "QUESTION"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "THOUGHT",
        "tool_calls": [
            {"id": f"call_{number:024}", "type": "function", "function": call} for number, call in enumerate(CALLS)
        ],
    },
    {"role": "tool", "tool_call_id": f"call_{0:024}", "content": "RESULT-A"},
    {"role": "tool", "tool_call_id": f"call_{1:024}", "content": "RESULT-B"},
]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return templates()


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.mark.parametrize(("name", "form"), MODELS)
def test_the_format_of_a_template_is_known(sources: dict[str, str], name: str, form: str) -> None:
    assert format_of(sources[name]).name == form


@pytest.mark.parametrize(("name", "form"), MODELS)
def test_earlier_calls_and_results_are_in_the_prompt_as_the_model_writes_them(
    sources: dict[str, str], process: TemplateProcess, name: str, form: str
) -> None:
    """They parse again, whether the template writes them or we do."""
    said = conversation(MESSAGES, FunctionUse(FUNCTIONS), sources[name])
    template = ChatTemplate(sources[name], bos="<s>", eos="</s>", process=process)
    prompt = template.render(said.messages, tools=said.tools)
    places = [prompt.index(text) for text in ("weather", "QUESTION", "RESULT-A", "RESULT-B")]
    assert places == sorted(places)
    assert "'tags'" not in prompt[places[1] :]
    calls = []
    parser = said.parser()
    assert parser is not None
    for part in _answers(prompt[places[1] :], parser.form.bare):
        parser = CallParser(parser.form, {function.name: function.parameters for function in FUNCTIONS})
        calls += [call for call in merged([*parser.add(part), *parser.end()]) if isinstance(call, dict)]
    assert calls == CALLS


def _answers(prompt: str, bare: str) -> list[str]:
    """Return the parts of a prompt in which calls may be: where these need no mark, each that begins like one."""
    return [prompt] if not bare else [bare + part for part in prompt.split(f"\n\n{bare}")[1:]]


def test_every_template_with_functions_renders_or_says_why(sources: dict[str, str], process: TemplateProcess) -> None:
    refused = []
    for name, source in sources.items():
        said = conversation(MESSAGES, FunctionUse(FUNCTIONS), source)
        try:
            prompt = ChatTemplate(source, bos="<s>", eos="</s>", process=process).render(
                said.messages, tools=said.tools
            )
        except Exception as error:
            refused.append(f"{name}: {error}")
        else:
            assert "QUESTION" in prompt
            assert "RESULT-A" in prompt
            assert "RESULT-B" in prompt
    assert [line.partition(":")[0] for line in refused] == [
        "fireworks-ai-llama-3-firefunction-v2",  # takes functions under another name
    ], refused

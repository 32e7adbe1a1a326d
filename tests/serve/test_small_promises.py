"""Test small guarantees of a server: a change of one line broke each of these once, and no test failed."""

import asyncio
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.api.config import EngineConfig
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE
from edge.deployment.deployed import DeployedModel
from edge.deployment.kinds import RunningPlan
from edge.errors import EngineGone
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.apis.fields import repeated
from edge.serve.apis.messages_fields import MessagesInput, conversation_of
from edge.serve.apis.metrics import metrics
from edge.serve.apis.tokens import count_tokens
from edge.serve.app import create_app
from edge.serve.engine.status import EngineStatus
from edge.serve.http.own_names import OwnNames
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from edge.serve.served import Generation
from edge.serve.tools.parser import CallParser
from edge.text.templates.formats import format_of
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from tests.serve.scripted import Scripted, ScriptedModels
from tests.serve.serving import events_of, serving
from tests.serve.test_streams import ASK, CALL, CHAT, MESSAGES, RESPONSES, TOOLS

CONFIG = EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=1, context=128), prefix_cache=0)


@pytest.mark.parametrize("host", ["edge.example", "Edge.Example", "EDGE.EXAMPLE:8080"])
def test_names_of_hosts_have_no_case(host: str) -> None:
    with serving(create_app(ScriptedModels(), ServeOptions(allow_hosts=("Edge.Example",)))) as url:
        assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("option", ["nas.lan", "nas.lan.", "NAS.Lan."])
def test_dot_of_the_root_is_no_part_of_a_name_in_options_and_requests(option: str) -> None:
    names = OwnNames(ServeOptions(allow_hosts=(option,)))
    assert all(host in names for host in ("nas.lan", "nas.lan.", "NAS.lan:80", "nas.lan.:80"))
    assert "nas.lan.example" not in names


def test_an_empty_list_is_an_answer_and_no_call() -> None:
    parser = CallParser(format_of("[TOOL_CALLS]"), {"weather": {}})
    parts = [*parser.add("[TOOL_CALLS][]"), *parser.end()]
    assert all(isinstance(part, str) for part in parts)
    assert "[]" in "".join(map(str, parts))


def test_the_model_that_was_not_used_for_longest_is_unloaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def available(n_bytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": n_bytes}))

    async def run() -> list[str]:
        said: list[str] = []
        router = Router(dict.fromkeys(("first", "second", "third"), CONFIG), say=said.append)
        try:
            available(1 << 40)
            for name in ("first", "second", "first"):  # the last time it is loaded already, and used
                await router.model(name)
            available(1 << 20)
            await router.model("third")
        finally:
            await router.close()
        return [line for line in said if "unloaded because" in line]

    assert [line.partition(":")[0] for line in asyncio.run(run())] == ["second", "first"]


@pytest.mark.parametrize("path", TOOLS)
def test_an_answer_that_is_cut_after_a_call_says_that_it_is_cut(path: str) -> None:
    models = ScriptedModels()
    models.scripted.says = f"{CALL} And then?"
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    with serving(create_app(models, ServeOptions())) as url:
        body = {**ASK[path], **TOOLS[path], limit: len(CALL) + 4}
        response = httpx.post(url + path, json=body, timeout=60).json()
    if path == CHAT:
        assert response["choices"][0]["finish_reason"] == "length"
        assert response["choices"][0]["message"]["tool_calls"]
    elif path == MESSAGES:
        assert response["stop_reason"] == "max_tokens"
    else:
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_probabilities_are_of_text_and_not_of_calls() -> None:
    models = ScriptedModels()
    models.scripted.says = f"{CALL}Done."
    with serving(create_app(models, ServeOptions())) as url:
        body = {**ASK[CHAT], **TOOLS[CHAT], "logprobs": True}
        [choice] = httpx.post(url + CHAT, json=body, timeout=60).json()["choices"]
    assert choice["message"]["tool_calls"]
    response = "".join(token["token"] for token in choice["logprobs"]["content"])
    assert response.endswith("Done.")
    assert "{" not in response


def test_metrics_count_slots_that_compute_and_skip_models_without_counters() -> None:
    status = asyncio.run(Scripted("one").status())
    status["slots"] = [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}]
    loading = {key: value for key, value in status.items() if key != "counters"}
    text = metrics([status, loading]).decode()
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["edge_slots_busy"] == 1
    assert samples["edge_slots"] == 8
    assert text.count('edge_slots_busy{model="one"}') == 1
    assert 'edge_gaps_total{model="one"}' not in text


def test_metrics_count_what_was_within_targets() -> None:
    status = asyncio.run(Scripted("one").status())
    aimed = {**status, "model": {**status["model"], "name": "aimed"}}
    aimed["latency"] = {"gaps": 9, "gaps_within": 8, "first_tokens": 3, "first_tokens_within": None}
    families = text_string_to_metric_families(metrics([{**status, "latency": None}, aimed]).decode())
    samples = {(s.name, s.labels["model"]): s.value for family in families for s in family.samples}
    counted = {name: value for (name, model), value in samples.items() if model == "aimed" and "_t" in name}
    assert (counted["edge_gaps_total"], counted["edge_gaps_within_total"]) == (9, 8)
    assert counted["edge_first_tokens_total"] == 3
    assert ("edge_first_tokens_within_total", "aimed") not in samples
    assert ("edge_gaps_total", "one") not in samples


def test_metrics_count_drafts_by_what_drafts() -> None:
    status = asyncio.run(Scripted("one").status())
    other = {**status, "speculation": {"draft": "mtp", "drafted": 40, "accepted": 30}}
    text = metrics([{**status, "speculation": None}, other]).decode()
    assert 'edge_drafted_tokens_total{draft="mtp",model="one"} 40.0' in text
    assert 'edge_accepted_tokens_total{draft="mtp",model="one"} 30.0' in text
    assert text.count("edge_drafted_tokens_total{") == 1


@pytest.mark.parametrize("failed", [True, False])
def test_a_tool_that_failed_is_told_to_the_model(failed: bool) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no network", "is_error": failed}
    request = MessagesInput.model_validate({"messages": [{"role": "user", "content": [result]}]})
    [message] = conversation_of(request, "").messages
    assert "no network" in message["content"]
    assert ("Error: no network" in message["content"]) == failed


def test_the_failure_of_a_response_has_the_next_number() -> None:
    models = ScriptedModels()
    models.scripted.fails = EngineGone("it was killed by signal 9")
    with serving(create_app(models, ServeOptions())) as url:
        response = events_of(httpx.post(url + RESPONSES, json={**ASK[RESPONSES], "stream": True}, timeout=60).text)
    assert response[-1]["type"] == "error"
    assert [event["sequence_number"] for event in response] == list(range(len(response)))
    assert len(response) > 2


@pytest.mark.parametrize(("prompt", "tokens"), [("Hi", 3), ("\x01Hi", 3)])
def test_the_token_that_begins_a_text_is_counted_once(prompt: str, tokens: int) -> None:
    """Templates write it, or the tokenizer adds it."""

    class Templated(Scripted):
        async def render(self, *_: Any) -> str:
            return prompt

    request = MessagesInput.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    assert asyncio.run(count_tokens(request, Templated())) == {"input_tokens": tokens}


def test_status_shows_the_plan_that_runs_now(demo: Engine) -> None:
    cut = limits(demo.file)
    before, after = (make_plan(cut, "demo", "", list(devices), "pipeline") for devices in ((LOCAL, "a:1"), (LOCAL,)))
    deployed = DeployedModel(
        demo, RunningPlan(demo, before, "measured", ("this device", "a")), DEFAULT_EXCHANGE, demo.close
    )
    status = EngineStatus(demo, deployed, "")
    assert len(status.to_json()["plan"]["stages"]) == 2
    deployed.change(RunningPlan(demo, after, "a is lost", ("this device",)))
    response = status.to_json()
    assert len(response["plan"]["stages"]) == 1
    assert response["why"] == "a is lost"
    own, left = response["devices"]
    assert (own["name"], left["name"], left["layers"]) == ("this device", "a", None)
    assert left["left_s"] >= 0
    assert "left_s" not in own
    deployed.change(RunningPlan(demo, before, "a is back", ("this device", "a")))
    assert ["left_s" in device for device in status.to_json()["devices"]] == [False, False]


def test_several_answers_have_places() -> None:
    """By which they differ where no seed is given and answers are reproducible."""
    generation = Generation(prompt="Hi")
    assert [item.place for item in repeated(generation, 3)] == [0, 1, 2]
    seeded = [item.sampling["seed"] for item in repeated(Generation(prompt="Hi", sampling={"seed": 7}), 3)]
    assert seeded == [7, 8, 9]

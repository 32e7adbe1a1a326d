"""Test plans made by a server: fronts, previews, advice, and the switch to a plan over a worker."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edge.errors import EngineGone, Interrupted, Overloaded, UnknownModel
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.http.errors import NotThere
from edge.serve.options import ServeOptions
from edge.serve.planning import advice as advising
from edge.serve.planning import fronts as making
from edge.serve.planning.advice import Advice
from edge.serve.planning.fronts import Fronts
from edge.serve.planning.preview import alone, preview
from edge.serve.planning.process import planned
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from tests.cli.test_serve_command import served
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.workers import worker

WAIT_S = 300.0
ATTIC = "10.0.0.7:7070"
NAMES = {"devices": [{"name": "local", "address": LOCAL}, {"name": "attic", "address": ATTIC}]}
LIMITS = limits(ModelFile.open(MODEL_PATH))


def plan_over(*devices: str, parallel: str = "pipeline") -> Plan:
    return make_plan(LIMITS, "edge demo", "", [LOCAL, *devices], parallel)


async def no_workers() -> list[str]:
    return []


def test_plans_over_a_worker_are_made_previewed_and_run(tmp_path: Path) -> None:
    with (
        worker(tmp_path / "w", "--threads", "1", "--name", "attic") as attic,
        served("--workers", attic.address, "--prefix-cache", "0") as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        with client.stream("POST", "/v1/front", json={}) as response:
            lines = [json.loads(line) for line in response.iter_lines()]
            assert response.headers["content-type"] == "application/x-ndjson"
        assert lines[-1] == {"status": "success"}
        assert any(line.get("total") for line in lines), lines
        front = client.get("/v1/front").json()
        assert client.get("/v1/front", params={"model": MODEL_PATH.stem}).json() == front
        assert (front["model"], front["format"]) == (MODEL_PATH.stem, "edge-pareto-1")
        assert [device["address"] for device in front["devices"]] == [LOCAL, attic.address]
        assert [point for point in front["points"] if point["knee"]]
        single = next(point for point in front["points"] if len(point["devices"]) == 1)
        both = plan_over(attic.address).to_json()
        assert client.post("/v1/plan", json={"plan": single["plan"]}).json() == {"status": "ok"}
        changes = client.post("/v1/plan", json={"plan": both, "preview": True}).json()
        assert [entry["name"] for entry in changes["devices"]] == ["this device", "attic"]
        assert changes["send_bytes"] == sum(entry["send_bytes"] for entry in changes["devices"]) > 0
        for plan, layers in ((both, [[0, 4], [4, 8]]), (single["plan"], [[0, 8]])):
            assert client.post("/v1/plan", json={"plan": plan}).json() == {"status": "ok"}
            assert [device["layers"] for device in server.status()["devices"]] == layers
            assert client.post("/v1/plan", json={"plan": plan, "preview": True}).json()["same"] is True
            assert server.answer() == "3 plus 4 is 7."
        assert server.status()["model"]["embeds"]  # on this device alone the model needs no plan


def test_preview_says_in_words_what_changes_and_what_is_sent() -> None:
    both = plan_over(ATTIC)
    point = {"latency_s": 0.05, "throughput_per_s": 60.0, "ttft_s": 1.0, "memory_bytes": {}, "in_flight": 4}
    now = {**point, "latency_s": 0.1, "throughput_per_s": 30.0}
    points = [{"plan": both.to_json(), "predicted": point}, {"plan": alone(both).to_json(), "predicted": now}]
    values = preview(MODEL_PATH, both, alone(both), {**NAMES, "points": points})
    [_, sent] = values["devices"]
    assert (sent["name"], sent["layers"], values["send_bytes"]) == ("attic", [4, 8], sent["send_bytes"])
    assert 0 < sent["send_bytes"] < MODEL_PATH.stat().st_size
    assert values["changes"][:2] == [
        "The model will run on this device and attic instead of this device.",
        "This device: layers 0-3; attic: layers 4-7.",
    ]
    assert values["changes"][-1] == "Expected: 20.0 tokens/s for one answer (now 10.0), 60.0 for 4 at once (now 30.0)."
    back = preview(MODEL_PATH, alone(both), both, {**NAMES, "points": points})
    assert back["send_bytes"] == 0
    assert "attic will not be used any more." in back["changes"]
    shares = preview(MODEL_PATH, plan_over(ATTIC, parallel="tensor"), both, NAMES)
    assert "This device: all layers, heads 0-3; attic: all layers, heads 4-7." in shares["changes"]
    assert (shares["predicted"], shares["now"]) == (None, None)
    again = preview(MODEL_PATH, both, both, NAMES)
    assert (again["same"], again["changes"], again["send_bytes"]) == (True, ["The model already runs like this."], 0)


PREDICTED = {"latency_s": 0.1, "throughput_per_s": 9.0, "ttft_s": 1.0, "memory_bytes": {}, "in_flight": 4}
DAMAGED: tuple[dict[str, Any], ...] = (
    {"latency_s": 0}, {"latency_s": None}, {"throughput_per_s": "9"}, {"throughput_per_s": None},
)  # fmt: skip


@pytest.mark.parametrize(
    "front",
    [
        None, [], {"points": 1}, {"devices": 1}, {"points": [1, {"plan": 1}, {}]},
        *({"points": [{"plan": plan_over(ATTIC).to_json(), "predicted": {**PREDICTED, **wrong}}]} for wrong in DAMAGED),
    ],
)  # fmt: skip
def test_preview_of_a_plan_with_a_damaged_front_has_no_prediction(front: Any) -> None:
    plan = plan_over(ATTIC)
    assert preview(MODEL_PATH, plan, alone(plan), front)["predicted"] is None


def test_preview_changes_nothing_and_checks_the_devices() -> None:
    models = ScriptedModels()
    with serving(create_app(models, ServeOptions(devices=(ATTIC,), api_keys=("k",), admin_keys=("a",)))) as address:
        client = httpx.Client(base_url=address, headers={"x-api-key": "k"}, timeout=WAIT_S)
        body = {"plan": plan_over(ATTIC).to_json(), "preview": True}
        assert client.post("/v1/plan", json=body).json()["status"] == "preview"
        assert client.post("/v1/plan", json={**body, "preview": False}).status_code == 403
        assert client.post("/v1/plan", json={**body, "plan": {}}).status_code == 400
        assert client.post("/v1/front", json={}).status_code == 403
        assert models.plans == []
        client.close()


class Waiting:
    """A planning process that waits for the test."""

    def __init__(self) -> None:
        self.may_end, self.begun, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.fails: Exception | None = None

    async def planned(self, do: str, arguments: Mapping[str, Any], limit_s: float, *progress: Any) -> dict[str, Any]:
        self.begun.set()
        for report in progress:
            report({"status": "Measuring", "completed": 1, "total": 2})
        try:
            await self.may_end.wait()
            if self.fails is not None:
                raise self.fails
            return {"points": [], "rows": [1], "devices": [], "notes": []}
        finally:
            self.ended.set()


def test_only_one_front_is_made_at_a_time_and_a_client_that_goes_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        process = Waiting()
        monkeypatch.setattr(making, "planned", process.planned)
        fronts = Fronts(ScriptedModels(), None, no_workers)
        with pytest.raises(UnknownModel):
            fronts.make("gone")
        lines = fronts.make(None)
        assert json.loads(await anext(lines))["status"] in ("Starting", "Measuring")
        with pytest.raises(Overloaded, match="plans for scripted are being made"):
            fronts.make(None)
        await process.begun.wait()
        await lines.aclose()
        await asyncio.wait_for(process.ended.wait(), WAIT_S)
        await asyncio.sleep(0)
        assert await fronts.get() == {"points": []}
        process.begun.clear()
        unread = fronts.make(None)
        await process.begun.wait()
        process.ended.clear()
        del unread  # the client has gone before the first line
        await asyncio.wait_for(process.ended.wait(), WAIT_S)
        await asyncio.sleep(0)
        process.may_end.set()
        assert [json.loads(line) async for line in fronts.make(None)][-1] == {"status": "success"}
        assert (await fronts.get())["model"] == "scripted"
        process.fails = EngineGone("it ended")
        assert [json.loads(line) async for line in fronts.make(None)][-1]["error"]["message"] == "it ended"
        assert (await fronts.get())["model"] == "scripted"  # the last front stays

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_front_of_a_model_is_its_own_or_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def planned(do: str, arguments: Any, limit_s: float, progress: Any) -> dict[str, Any]:
        progress({"status": "Measuring", "total": 2})
        progress({"status": "Planning"})
        return {"points": [{"device": arguments["config"]}]}

    async def run() -> None:
        monkeypatch.setattr(making, "planned", planned)
        configs = {name: SimpleNamespace(to_json=lambda name=name: f"of {name}") for name in "ab"}
        models: Any = SimpleNamespace(names=("a", "b"), configs=configs)
        file, front = tmp_path / "front.json", {"model": "b", "points": [{"device": "of the file"}]}
        file.write_text(json.dumps(front))
        fronts = Fronts(models, file, no_workers)
        assert [await fronts.get(name) for name in (None, "a", "b")] == [front, {"points": []}, front]
        file.write_text(json.dumps(front | {"model": "of another server"}))
        assert (await fronts.get("a"))["points"] == front["points"]
        for name in "aba":
            newest = {"status": "Starting", "completed": 1}
            await fronts._make(name, newest)
            assert newest == {"status": "Planning"}
        assert [(await fronts.get(name))["model"] for name in (None, "a", "b")] == ["a", "a", "b"]
        assert await fronts.devices() == {"of a", "of b", "of the file"}
        for n_bytes, is_read in ((file.stat().st_size, True), (file.stat().st_size - 1, False)):
            monkeypatch.setattr(making, "MAX_FRONT", n_bytes)
            with nullcontext() if is_read else pytest.raises(NotThere, match="is not a front"):
                assert await fronts.devices()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_advice_is_answered_before_it_is_complete_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advising.ANSWER_S < 5

    async def run() -> None:
        process = Waiting()
        monkeypatch.setattr(advising, "planned", process.planned)
        monkeypatch.setattr(advising, "ANSWER_S", 0.01)
        own = Advice()
        assert (await own.get({}))["state"] == "computing"
        process.may_end.set()
        monkeypatch.setattr(advising, "ANSWER_S", WAIT_S)
        assert (await own.get({}))["state"] == "ready"
        process.may_end.clear()
        assert (await own.get({}))["rows"] == [1]  # from before
        assert own._making is None
        monkeypatch.setattr(advising, "FRESH_S", 0.0)
        process.fails = EngineGone("it ended")
        assert (await own.get({}))["state"] == "ready"  # is made again meanwhile
        process.may_end.set()
        while (state := await own.get({}))["state"] == "ready":
            await asyncio.sleep(0)
        assert (state["error"], state["rows"]) == ("it ended", [1])
        monkeypatch.setattr(advising, "FRESH_S", WAIT_S)
        while own._making is not None:
            await asyncio.sleep(0)
        assert (await own.get({}))["state"] == "failed"
        assert own._making is None  # a failure is not repeated at once
        monkeypatch.setattr(advising, "FRESH_S", 0.0)
        process.fails = None
        while (await own.get({}))["state"] == "failed":
            await asyncio.sleep(0)
        process.fails = OSError("no process")
        while (state := await own.get({}))["state"] == "ready":
            await asyncio.sleep(0)
        assert state["error"] == "no process"

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_planning_process_ends_with_its_time_and_reports_errors() -> None:
    async def run() -> None:
        with pytest.raises(Interrupted, match=r"more than 0\.01 s"):
            await planned("advice", {"devices": [], "insecure": False, "threads": 1, "memory": None}, 0.01)
        config = {"path": "/nowhere.gguf", "options": {}}
        with pytest.raises(Exception, match="nowhere"):
            await planned("front", {"config": config, "devices": []}, WAIT_S)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))

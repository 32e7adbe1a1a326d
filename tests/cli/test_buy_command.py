"""`edge buy`: what is printed, what each option does, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apps.commands import buy
from devices.catalog import CATALOG
from edge.models.demo import MODEL_PATH
from edge.planning import cheapest
from edge.profiling.profile import ASSUMED_LINK
from tests.support.commands import Run, assert_refused, main

KEYS = {
    "format", "model", "type", "size_bytes", "by", "currency", "arrivals_per_s", "limits", "prompt_tokens",
    "gen_tokens", "concurrency", "requests", "seed", "link", "kinds", "cheaper", "planned", "cluster", "notes",
}  # fmt: skip
QUICK = ("--gen-tokens", "8", "--requests", "30")
# One Pi 4 takes 2.8 ms a token and 74 ms for the first, one Pi 5 1.2 and 21 ms.
ASKED = (MODEL_PATH, "--arrivals", "0.5", "--max-latency", "1000", *QUICK)
MINE = """
currency = "EUR"
delay_ms = 0.25
bandwidth_mbps = 800

[[device]]
preset = "pi4"
price = 60
source = "a shop, 2026-03-01"
"""


@pytest.fixture(name="edge")
def in_this_process(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        return main("buy", *args), *capsys.readouterr()

    return run


@pytest.fixture(name="mine")
def catalog_of_one(tmp_path: Path) -> Path:
    path = tmp_path / "devices.toml"
    path.write_text(MINE)
    return path


def bought(edge: Run, *args: str | Path) -> dict[str, Any]:
    code, out, error = edge(*args, "--json")
    assert code == 0, error
    values: dict[str, Any] = json.loads(out)
    return values


def test_names_that_are_copied_for_a_quick_help() -> None:
    assert (buy.BY, buy.PERCENTILES, buy.MOST_DEVICES) == (cheapest.BY, cheapest.PERCENTILES, cheapest.MOST_DEVICES)
    targets = cheapest.Targets(1.0)
    assert (targets.requests, targets.tokens) == (buy.REQUESTS, buy.GEN_TOKENS)


@pytest.mark.parametrize(
    ("cheaper", "planned", "text"),
    [
        (0, 0, "no cluster that costs less was tried: this is the first in the order of cost"),
        (1, 0, "1 cluster that costs no more cannot reach the limits: bounds show it without a plan"),
        (1, 1, "1 cluster that costs no more cannot reach the limits: planned and simulated"),
        (1200, 0, "1,200 clusters that cost no more cannot reach the limits: bounds show it without a plan"),
        (
            1200,
            3,
            "1,200 clusters that cost no more cannot reach the limits; bounds rule out 1,197 of them, and 3 were"
            " planned and simulated",
        ),
    ],
)
def test_a_note_says_what_came_of_cheaper_clusters(cheaper: int, planned: int, text: str) -> None:
    assert buy.before(cheaper, planned) == text


def test_json_has_what_is_documented(edge: Run) -> None:
    result = bought(edge, *ASKED)
    assert result.keys() == KEYS
    assert (result["format"], result["by"], result["currency"]) == ("edge-buy-1", "price", "USD")
    assert result["limits"] == {"latency_s": 1.0, "ttft_s": None, "percentile": "p90"}
    assert result["link"] == {
        "latency_s": ASSUMED_LINK.latency_s, "bytes_per_s": ASSUMED_LINK.bytes_per_s, "assumed": True,
    }  # fmt: skip
    cluster = result["cluster"]
    assert cluster.keys() == {"devices", "counts", "price", "watts", "planned", "simulated"}
    assert (cluster["counts"], cluster["price"], cluster["watts"]) == ({"pi4": 1}, 55.0, CATALOG["pi4"].watts)
    [device] = cluster["devices"]
    assert device.keys() == {"name", "kind", "title", "price", "price_source", "watts", "memory_bytes"}
    assert device["price_source"] == CATALOG["pi4"].source["price_usd"]
    assert cluster["simulated"]["tpot_s"]["p90"] <= 1.0
    assert {kind["name"] for kind in result["kinds"]} == {
        name for name, preset in CATALOG.items() if preset.price_usd is not None
    }
    assert any("left out because their price is unknown: phone" in note for note in result["notes"])


def test_what_was_bought_can_be_simulated_by_itself(
    edge: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bought(edge, *ASKED)
    path = tmp_path / "planned.json"
    path.write_text(json.dumps(result["cluster"]["planned"]))
    how = ("--arrivals", "poisson:0.5", "--gen-tokens", "8", "--requests", "30", "--json")
    assert main("simulate", path, *how) == 0
    again = json.loads(capsys.readouterr().out)
    assert {key: again[key] for key in result["cluster"]["simulated"]} == result["cluster"]["simulated"]


def test_the_table_says_what_to_buy(edge: Run) -> None:
    code, out, error = edge(*ASKED)
    assert (code, error) == (0, "")
    assert out.startswith("1 pi4: 55.00 USD, 6.00 W while all devices compute, for ")
    assert "pi4     1      55.00 USD   6.00   the 4 GB board alone, raspberrypi.com, 2019-06-24" in out
    assert "first token         -" in out
    assert "each further token  1,000 ms" in out
    assert "0.500 requests arrive per second; the devices can answer " in out
    assert "links are assumed: 2.00 ms one way, 100 Mbit/s between any two devices" in out


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (("--max-latency", "2"), {"pi5": 1}),
        (("--max-latency", "5"), {"pi4": 1}),
        (("--max-latency", "5", "--percentile", "p99"), {"pi5": 1}),
        (("--max-ttft", "0.05"), {"pi5": 1}),
        (("--arrivals", "20"), {"pi5": 1}),
        (("--by", "watts"), {"phone": 1}),
        (("--by", "devices"), {"pi4": 1}),
        (("--kinds", "apple-m4,pi5"), {"pi5": 1}),
    ],
)
def test_options_choose(edge: Run, options: tuple[str, ...], counts: dict[str, int]) -> None:
    assert bought(edge, *ASKED, *options)["cluster"]["counts"] == counts


def test_options_of_the_work_change_what_it_takes(edge: Run) -> None:
    plain = bought(edge, *ASKED)["cluster"]["simulated"]
    for options in (
        ("--prompt-tokens", "64"), ("--concurrency", "1"), ("--seed", "1"), ("--requests", "31"), ("--gen-tokens", "9"),
        ("--kv-type", "f32"),
    ):  # fmt: skip
        assert bought(edge, *ASKED, *options)["cluster"] != plain


def test_more_devices_where_one_is_not_enough(edge: Run, mine: Path) -> None:
    mine.write_text(MINE + 'memory = "206MiB"\n')  # of which a process takes 200
    small = (*ASKED, "--catalog", mine)
    cluster = bought(edge, *small)["cluster"]
    assert cluster["counts"] == {"pi4": 2}
    assert [device["name"] for device in cluster["devices"]] == ["pi4", "pi4:2"]
    assert_refused(
        edge(*small, "--max-devices", "1"), 2, "no cluster of up to 1", "no cluster has room for the model's 9.03"
    )


def test_what_is_near_is_told(edge: Run) -> None:
    """Where more devices do not help, fewer are near."""
    refused = edge(*ASKED, "--arrivals", "50", "--kinds", "pi4")
    assert_refused(
        refused, 2, "at 50.0 requests a second; the nearest of those tried, ", " pi4, takes ", "has room for "
    )


def test_a_catalog_takes_the_place_of_the_presets(edge: Run, mine: Path) -> None:
    result = bought(edge, *ASKED, "--catalog", mine)
    assert (result["currency"], result["cluster"]["price"]) == ("EUR", 60.0)
    assert result["link"] == {"latency_s": 0.00025, "bytes_per_s": 100e6, "assumed": False}
    assert result["cluster"]["devices"][0]["price_source"] == "a shop, 2026-03-01"
    assert not any("left out" in note for note in result["notes"])


def test_a_model_of_the_catalog_is_not_downloaded(edge: Run) -> None:
    result = bought(edge, "Qwen3-0.6b", "--arrivals", "0.05", "--max-latency", "500", *QUICK)
    assert (result["model"], result["type"], result["cluster"]["counts"]) == ("qwen3-0.6b", "q8_0", {"pi5": 1})
    other = bought(edge, "qwen3-0.6b", "--type", "q4_0", "--arrivals", "0.05", "--max-latency", "500", *QUICK)
    assert (other["type"], other["size_bytes"] < result["size_bytes"]) == ("q4_0", True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((MODEL_PATH, "--arrivals", "1"), "needs a limit: --max-latency MS"),
        ((*ASKED, "--gen-tokens", "1"), "--max-latency limits tokens after the first, but --gen-tokens 1 has none"),
        ((*ASKED, "--prompt-tokens", "2000000"), "use fewer"),
        ((*ASKED, "--kinds", "pi5,phone"), "no price in USD is known for phone; give one in the catalog"),
        ((*ASKED, "--max-latency", "0.001"), "no cluster of up to 8 of these devices reaches 0.00100 ms a token"),
        (("no-such-model", *ASKED[1:]), "'no-such-model' is neither a file nor a model in the catalog, which has "),
        (("net.onnx", *ASKED[1:]), "edge buy is for language models"),
        ((*ASKED, "--type", "q8_0"), "--type is for models in the catalog; a file has its types already"),
    ],
)
def test_bad_input_is_one_line(edge: Run, args: tuple[str, ...], message: str) -> None:
    code, out, error = edge(*args)
    assert_refused((code, out, error), 2, message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-latency", "20ms"), "argument --max-latency: needs a number"),
        (("--arrivals", "0"), "argument --arrivals: needs a number from 1e-06"),
        (("--max-devices", "9"), "argument --max-devices: needs a whole number from 1 to 8, got 9"),
    ],
)
def test_values_that_cannot_be(
    edge: Run, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        edge(*ASKED, *args)
    assert message in capsys.readouterr().err


def test_a_catalog_that_cannot_be_used(edge: Run, mine: Path) -> None:
    mine.write_text(MINE.replace("60", '"60 EUR"'))
    message = "device[0].price needs a number from 0 to 1e+09, without a unit; got '60 EUR'"
    assert_refused(edge(*ASKED, "--catalog", mine), 3, message)
    mine.write_text(MINE.replace("price = 60", ""))
    assert_refused(edge(*ASKED, "--catalog", mine), 2, "no price in EUR is known for pi4; give one in the catalog")
    assert_refused(edge(*ASKED, "--kinds", "cray"), 3, "no kind of device is called 'cray'; known are pi4")

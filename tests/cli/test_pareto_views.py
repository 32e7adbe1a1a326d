"""Test the views of `edge pareto`: the table, the picture and the page, also with malicious data."""

import base64
import hashlib
import json
import re
import shutil
import struct
import subprocess
from copy import deepcopy
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from apps import planning
from apps.cli import build_parser
from apps.commands.pareto import _command, show
from edge.errors import PictureError
from edge.pictures.front import KIND_COLORS, TYPE_COLORS, _figure, write_picture
from edge.pictures.front_points import (
    best_single,
    dominated,
    figure,
    front,
    fullest,
    has_quality,
    latency_s,
    line,
    lines,
    notes,
    relative_error,
    roles,
    several_types,
    staircase,
    table,
    throughput,
    type_label,
    visible_plans,
)
from edge.pictures.page import embedded, page, write_page
from tests.support.helpers import ROOT
from tests.support.pareto_results import pareto_result

SIX = ("local", "laptop", "pi", "phone", "attic-box", "old-laptop")
MEASURED = pareto_result(measured=5)
TYPES = pareto_result(400, types=("q4_0", "q8_0"), devices=SIX, measured=8)
ONNX = pareto_result(60, kind="onnx", types=(None,), devices=("local", "pi"), n_layers=60)
WIDE = pareto_result(300, devices=SIX, spread=2.4)
ALONE = pareto_result(1, devices=("local",))
QUALITY = pareto_result(500, types=("q4_0", "q5_0", "q6_k", "q8_0"), devices=SIX[:4], divergence=True)
RESULTS = {"quality": QUALITY, "measured": MEASURED, "types": TYPES, "onnx": ONNX, "wide": WIDE, "alone": ALONE}
EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--<script> {{data}} \\u003c $x^$ \u2028 \ud800"
    "\x1b[2J"
)

each = pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())


def evil(result: dict[str, Any]) -> dict[str, Any]:
    """The same, with all names from elsewhere such that they would do something."""
    result = deepcopy(result)
    result["model"] = EVIL
    for device in result["devices"]:
        device["name"] = EVIL
    for i, point in enumerate(result["points"]):
        point.update(label=EVIL, type=f"_{EVIL}{i % 3}", error=EVIL, devices=[EVIL], plan={EVIL: EVIL})
        point["predicted"].update(bound=EVIL, memory_bytes={EVIL: 1})
    return result


def with_figures(figures: list[tuple[float, float]]) -> list[dict[str, Any]]:
    return [{"predicted": {"latency_s": latency, "throughput_per_s": rate}} for latency, rate in figures]


def rows(drawn: Any) -> list[str]:
    """The rows of the table below a picture, without their numbers."""
    return [text.get_text() for text in drawn.axes[1].texts[1::2]]


# What all three read.


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1))
def test_the_line_has_just_what_none_dominates(figures: list[tuple[float, float]]) -> None:
    line = [
        (point["predicted"]["latency_s"], point["predicted"]["throughput_per_s"])
        for point in staircase(with_figures(figures))
    ]
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(line))
    for latency, rate in figures:
        assert any(a <= latency and b >= rate for a, b in line)


@each
def test_what_is_shown(result: dict[str, Any]) -> None:
    shown, near = visible_plans(result)
    ids = [point["id"] for point in (*shown, *near)]
    assert len(set(ids)) == len(ids)
    assert {point["id"] for point in front(result)} <= {point["id"] for point in shown}
    single = best_single(result)
    assert single in shown
    assert all(not point["on_front"] for point in near)
    assert latency_s(single) == min(latency_s(point) for point in result["points"] if point["parallel"] == "single")


def test_without_a_single_device_there_is_no_best_one() -> None:
    points = [point for point in MEASURED["points"] if point["parallel"] != "single"]
    result = {**MEASURED, "points": points}
    assert best_single(result) is None
    assert "best single device" not in "".join(rows(_figure(result)))
    assert fullest({}) is None
    assert fullest({"memory_bytes": {"a": 1, "b": 3, "c": 2}}) == ("b", 3)


# The table.


@each
def test_the_table_has_the_front(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    columns, rows = table(result)
    assert [row[0].removesuffix(" *") for row in rows] == [point["id"] for point in front(result)]
    assert sum(row[0].endswith(" *") for row in rows) == 1
    assert ("type" in columns) == (result in (TYPES, QUALITY))
    assert ("divergence nats" in columns) == (result is QUALITY)
    assert columns.count("measured") == 2 * any(point["measured"] for point in front(result))
    assert all(len(row) == len(columns) for row in rows)
    show(result)
    shown = capsys.readouterr().out
    assert all(point["label"] in shown for point in front(result))
    n = len(dominated(result))
    assert (f"{n} other plan" in shown) == (n > 0)


def test_measured_figures_are_beside_the_predicted_ones() -> None:
    result = deepcopy(MEASURED)
    point = front(result)[0]
    point["predicted"].update(latency_s=0.0021, throughput_per_s=83.14, memory_bytes={"pi": 2 << 20, "laptop": 3 << 20})
    point["measured"].update(latency_s=0.0020, throughput_per_s=100, memory_bytes={"pi": 5 << 20, "laptop": 3 << 20})
    _, rows = table(result)
    assert rows[0][2:] == ["2.1", "2 (+5 %)", "83.1", "100 (-17 %)", "5.00 MiB"]
    assert relative_error(point, "latency_s") == pytest.approx(0.05)
    point["measured"] = None  # type: ignore[index]
    assert relative_error(point, "latency_s") is None
    _, rows = table(result)
    assert rows[0][2:] == ["2.1", "-", "83.1", "-", "3.00 MiB"]


def test_the_line_is_what_was_measured() -> None:
    """The first plan measures far worse than it was predicted to be, and the second better: the line is theirs."""
    result = deepcopy(MEASURED)
    for point in result["points"]:
        point.update(measured=None, on_front=False, knee=False)
    a, b = result["points"][:2]
    a.update(on_front=True, measured={"latency_s": 0.9, "throughput_per_s": 50.0, "memory_bytes": {}, "spread": 0.4})
    b.update(on_front=True, knee=True, measured={"latency_s": 1e-3, "throughput_per_s": 9.0, "memory_bytes": {}})
    result["points"][2]["on_front"] = True  # only predicted
    assert line(result) == [b, a]
    assert [(latency_s(item), throughput(item)) for item in line(result)] == [(1e-3, 9.0), (0.9, 50.0)]
    axes = _figure(result).axes[0]
    drawn = [sorted(set(map(tuple, built.get_xydata()))) for built in axes.lines]
    assert any({(1.0, 9.0), (900.0, 50.0)} <= set(corners) for corners in drawn)
    said = "\n".join(notes(result))
    assert "Front and knee are those of the 2 measured plans" in said
    assert f"Predicted more than 50 % off: {a['id']}, {b['id']}; they were measured again." in said
    assert f"disturbed measurements, by: {a['id']} 40 %." in said


def test_what_is_noted() -> None:
    result = deepcopy(TYPES)
    result.update(exact=False, pairs_gap=0.034)
    for point in result["points"][:7]:
        point["error"] = "the worker is gone"
    said = "\n".join(notes(result))
    assert "there may be better ones" in said
    assert "first tokens are within 3.4 % of the soonest possible" in said
    assert "Estimated, not measured: phone." in said
    assert said.count("the worker is gone") == 5
    assert "2 more could not be measured" in said
    assert not notes({**ALONE, "points": [{**ALONE["points"][0], "knee": False}]})


def test_figures_keep_three_digits() -> None:
    assert [figure(x) for x in (0.01234, 9.996, 12.34, 999.4, 999.6, 12345.6)] == [
        "0.0123", "10", "12.3", "999", "1000", "12346",
    ]  # fmt: skip


def test_types_are_told_by_their_divergence() -> None:
    assert has_quality(QUALITY)
    assert not has_quality(TYPES)
    assert several_types(QUALITY) == ["q8_0", "q6_k", "q5_0", "q4_0"]  # the nearest to the model first
    assert type_label(QUALITY, "q5_0") == "q5_0: 0.0131 nats"
    columns, rows = table(QUALITY)
    at = columns.index("divergence nats")
    assert [row[at] for row in rows] == [
        {"q4_0": "0.042", "q5_0": "0.0131", "q6_k": "0.0049", "q8_0": "0.00071"}[row[2]] for row in rows
    ]
    assert not lines(TYPES)
    for name, corners in lines(QUALITY).items():  # each type has a line of its own plans
        assert {point["type"] for point in corners} == {name}
        assert all(
            any(latency_s(a) <= latency_s(b) and throughput(a) >= throughput(b) for a in corners)
            for b in QUALITY["points"]
            if b["type"] == name and b["on_front"]
        )
    left_out = [
        {"type": "q2_k", "divergence": 0.4123, "left_out": True},
        {"type": "x", "divergence": 0.0, "left_out": False},
    ]
    said = "\n".join(notes({**QUALITY, "types": left_out}))
    assert "Left out by the limit of divergence: q2_k (0.412 nats a token)." in said
    assert "mean KL of the type's predictions" in said


# The picture.


def test_types_that_are_chosen_between_have_the_colors() -> None:
    drawn = _figure(QUALITY)
    (legend,) = drawn.legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert entries[:4] == ["q8_0: 0.00071 nats", "q6_k: 0.0049 nats", "q5_0: 0.0131 nats", "q4_0: 0.042 nats"]
    stairs = {built.get_color() for built in drawn.axes[0].lines if built.get_linestyle() == "-"}
    assert {*TYPE_COLORS[:4]} <= stairs
    marks = {built.get_color() for built in drawn.axes[0].lines if built.get_linestyle() == "None"}
    assert marks == {*TYPE_COLORS[:4]}
    view = Elements(page(QUALITY, ["edge", "pareto"], "")).data["view"]
    assert view["by_type"]
    assert view["type_labels"]["q4_0"] == "q4_0: 0.042 nats"
    assert [*view["lines"]] == view["types"]
    assert all(set(ids) <= set(view["shown"]) for ids in view["lines"].values())


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "front.png"
    write_picture(TYPES, path)
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width == 1350
    assert height > 900  # with the table
    with Image.open(path) as image:
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20)}
    assert len(colors) > 200
    kinds = {point["parallel"] for point in TYPES["points"]}
    assert kinds == KIND_COLORS.keys() - {"replicas"}
    assert {tuple(bytes.fromhex(KIND_COLORS[kind][1:])) for kind in kinds} <= colors
    assert [file.name for file in tmp_path.iterdir()] == ["front.png"]
    write_picture(ALONE, path)  # replaces it
    with Image.open(path) as image:
        assert tuple(bytes.fromhex(KIND_COLORS["tensor"][1:])) not in {
            color for _, color in image.convert("RGB").getcolors(1 << 20)
        }


def test_a_front_of_first_tokens_has_the_soonest_at_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a plan that computes prompts on other devices is not one of a single device."""
    result = deepcopy(QUALITY)
    result["objectives"] = ["latency_s", "ttft_s", "divergence"]
    for i, point in enumerate(result["points"]):
        point["measured"] = None
        point["predicted"].update(ttft_s=0.5 + (7 * i) % 30 / 10, prompt=1024)
    drawn: list[Any] = []
    monkeypatch.setattr("edge.pictures.front.save", lambda figure, path: drawn.append(figure))
    write_picture(result, tmp_path / "front.png")
    axes = drawn[0].axes[0]
    assert max(axes.lines[0].get_ydata()) <= 2  # first tokens a second: none is sooner than 0.5 s
    assert axes.get_ylabel() == "first token of a prompt of 1024 tokens (s)"
    shown = [axes.yaxis.get_major_formatter()(rate, 0) for rate in (0.5, 2.0)]
    assert shown == ["2", "0.5"]
    said = " ".join(rows(drawn[0]))
    assert "soonest first token" in said
    assert "throughput" not in said
    single = best_single(result)
    assert single is not None
    single["devices"].append("mac")
    assert best_single(result) is not single


@each
def test_each_number_in_the_picture_has_a_row_in_the_table(result: dict[str, Any]) -> None:
    drawn = _figure(result)
    axes, below = drawn.axes
    numbers = [text.get_text() for text in axes.texts if not text.get_text().startswith("on ")]
    written = [text.get_text() for text in below.texts]
    assert written[::2] == numbers
    points = {point["id"]: point for point in visible_plans(result)[0]}
    assert len(numbers) == min(len(points), 20)
    assert numbers == [point["id"] for point in points.values() if point["id"] in numbers]
    for number, row in zip(numbers, rows(drawn), strict=True):
        latency = f"{figure(1e3 * latency_s(points[number]))} ms"
        assert row.startswith(", ".join((latency, f"{figure(throughput(points[number]))} ")))
        assert all(f", {role}" in row for role in roles(result).get(number, ()))
        assert row.endswith((points[number]["label"], "..."))
    assert roles(result).keys() <= set(numbers)
    single = best_single(result)
    assert single is not None
    assert "best single device" in roles(result)[single["id"]]
    has_knee = any("knee" in words for words in roles(result).values())
    assert has_knee == (len(front(result)) > 1)
    (legend,) = drawn.legends
    explained = legend.get_title().get_text()
    assert ("Knee: beyond it, a little more of one costs much of the other." in explained) == has_knee
    assert ("Dominated: no better in anything, worse in some." in explained) == any(
        "dominated" in entry.get_text() for entry in legend.get_texts()
    )
    drawn.draw_without_rendering()  # computes the layout
    inside = drawn.get_window_extent()
    for text in below.texts:
        box = text.get_window_extent()
        assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, text


def test_axes_are_logarithmic_where_values_span_much() -> None:
    axes, _ = _figure(MEASURED).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    far = deepcopy(MEASURED)
    front(far)[-1]["predicted"].update(latency_s=3.0, throughput_per_s=5000.0)
    axes, _ = _figure(far).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_a_picture_of_any_names(tmp_path: Path) -> None:
    result = evil(TYPES)
    result["points"][0]["parallel"] = EVIL
    write_picture(result, tmp_path / "front.png")
    write_picture({**ALONE, "model": "模型 $x$"}, tmp_path / "front.png")
    with Image.open(tmp_path / "front.png") as image:
        assert image.width == 1350


# The page.


class Elements(HTMLParser):
    """The elements of a page, and what is in its scripts and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style", "title") and data.strip():
            self.inside.append((self.tags[-1][0], data))

    @property
    def data(self) -> Any:
        """Return the data that the page shows."""
        return json.loads(next(text for tag, text in self.inside if tag == "script"))


@pytest.mark.parametrize("result", [*RESULTS.values(), evil(MEASURED)], ids=[*RESULTS, "evil"])
def test_the_page_holds_the_data_and_no_other_code(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "front.html"
    write_page(result, path, command=("edge", "pareto", EVIL), model=EVIL)
    assert [file.name for file in tmp_path.iterdir()] == ["front.html"]
    assert 'title="Dominated: another plan is at least as good in everything' in path.read_text()
    text = path.read_text(encoding="ascii")
    elements = Elements(text)
    assert elements.data["result"] == result
    tags = [tag for tag, _ in elements.tags]
    assert tags.count("script") == 2
    assert not {"img", "link", "iframe", "object", "base", "form"} & set(tags)
    assert not any(
        name.startswith("on") or name in ("src", "href", "style") for _, attrs in elements.tags for name in attrs
    )

    policy = next(
        attrs["content"] for _, attrs in elements.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    data, script = (code for tag, code in elements.inside if tag == "script")
    parts = [(ROOT / "edge" / "pictures" / f"{name}.js").read_text() for name in ("axes", "chart", "page")]
    assert script == "".join(parts).replace("export function scale", "function scale")
    style = next(code for tag, code in elements.inside if tag == "style")
    for name, code in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert not re.search(
        r"\beval\b|innerHTML|outerHTML|insertAdjacentHTML|document\.write|new Function|fetch\(", script
    )
    assert not re.search(r"url\(|@import", style)
    assert "<" not in data


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_data_come_out_as_they_went_in(values: Any) -> None:
    text = embedded(values)
    assert json.loads(text) == values
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_what_the_page_is_told() -> None:
    view = Elements(page(TYPES, ["edge", "pareto", "my model.gguf", "--cluster", "c.toml"], "")).data["view"]
    assert view["line"] == [point["id"] for point in line(TYPES)]
    assert all(point["measured"] for point in line(TYPES))
    assert view["commands"].keys() == {point["id"] for point in TYPES["points"]}
    assert set(view["shown"]) | set(view["near"]) <= view["commands"].keys()
    assert view["types"] == ["q4_0", "q8_0"]
    assert view["roles"] == roles(TYPES)
    for point in TYPES["points"]:
        assert view["commands"][point["id"]] == (
            ["edge chat"]
            if point["plan"] is None
            else [
                f"edge pareto 'my model.gguf' --cluster c.toml --pick {point['id']} --save plan.json",
                "edge chat --plan plan.json",
            ]
        )
    presets = [device | {"preset": device["name"] == "phone"} for device in TYPES["devices"]]
    view = Elements(page(TYPES | {"devices": presets}, ["edge", "pareto"], "")).data["view"]
    for point in TYPES["points"]:
        joins = view["commands"][point["id"]][0] == "edge cluster invite phone"
        assert joins == ("phone" in point["devices"] and point["plan"] is not None)
    view = Elements(page(ONNX, ["edge", "pareto"], "net $1.onnx")).data["view"]
    assert ["edge run 'net $1.onnx'"] in view["commands"].values()
    assert all(commands[-1].startswith("edge run 'net $1.onnx'") for commands in view["commands"].values())


@pytest.mark.parametrize(
    "typed",
    [
        "m.gguf --workers 10.0.0.2:1,pi:7070 --insecure --transport tcp --wire f16 --threads 3 --memory 2GiB"
        " --context 512 --concurrency 2 --prompt-tokens 9 --depth 7 --kv-type q8_0 --draft self --draft-worker pi:7070"
        " --acceptance 0.5 --types q4_0,q8_0 --max-divergence 0.0123456789 --text t.txt --axes latency,memory",
        "net.onnx --cluster c.toml --dim batch=2 --dim x[1]=3 --input a=a.npz --input b.npz",
        "",
    ],
)
def test_the_page_repeats_all_that_says_what_is_explored(typed: str) -> None:
    args = build_parser("pareto").parse_args(["pareto", *typed.split()])
    again = build_parser("pareto").parse_args(_command(args)[1:])
    assert {**vars(again), "parser": None} == {**vars(args), "parser": None}


def test_the_devices_of_a_lab_are_named_as_a_command_would(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = SimpleNamespace(addresses={"pi": "10.213.0.2:7070"}, shaped=True)
    monkeypatch.setattr("edge.profiling.cluster.lab_status", lambda: lab)
    args = build_parser("pareto").parse_args(["pareto", "m.gguf"])
    planning.cluster_of(args)
    assert _command(args) == ("edge", "pareto", "m.gguf", "--workers", "10.213.0.2:7070", "--insecure")


def test_the_parts_of_the_page_are_installed() -> None:
    packaged = (ROOT / "pyproject.toml").read_text()
    for path in (ROOT / "edge" / "pictures").iterdir():
        if path.suffix in (".js", ".css", ".html"):
            assert f'"*{path.suffix}"' in packaged


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to read the script")
@pytest.mark.parametrize("name", ["axes.js", "chart.js", "page.js"])
def test_the_script_is_valid(name: str) -> None:
    script = ROOT / "edge" / "pictures" / name
    done = subprocess.run(["node", "--check", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("write", [write_picture, write_page])
def test_where_nothing_can_be_written(write: Any, tmp_path: Path) -> None:
    ending = "png" if write is write_picture else "html"
    for path in (tmp_path / "front.txt", tmp_path / "nowhere" / f"front.{ending}"):
        with pytest.raises(PictureError, match=re.escape(str(path))):
            write(MEASURED, path)
    with pytest.raises(PictureError, match="no plan"):
        write({**MEASURED, "points": []}, tmp_path / f"front.{ending}")
    (tmp_path / f"folder.{ending}").mkdir()
    with pytest.raises(PictureError, match="folder"):
        write(MEASURED, tmp_path / f"folder.{ending}")
    assert [file.name for file in tmp_path.iterdir()] == [f"folder.{ending}"]

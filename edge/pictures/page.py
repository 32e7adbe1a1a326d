"""Page of `edge pareto`: one self-contained HTML file with the chart and all plans."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devices.files import temporary_beside
from edge.arguments import checked
from edge.errors import PictureError
from edge.models.paths import PathLike
from edge.pictures import front_points
from edge.pictures.front_points import Point, Result
from edge.planning.describe import joining_commands
from partition.predict.objectives import OBJECTIVES

SAVED = "plan.json"  # file name of a saved plan in the displayed commands
_FOLDER = Path(__file__).parent
AXES = _FOLDER / "axes.js"  # module that the server's page loads unchanged


def check_page(path: Path) -> None:
    """Raise PictureError if no page can be written to `path`. Called before any computation."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise PictureError(f"{path}: the page is HTML, so its name must end in .html")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise PictureError(f"{path}: expected the name of a file in a folder that exists")


@checked
def write_page(
    result: Result, path: PathLike, *, command: Sequence[str] = ("edge", "pareto", "MODEL"), model: str = ""
) -> None:
    """Write the object of `edge pareto --json` as an HTML page, which also works offline.

    command: arguments that produced the object, without output options. The page shows how to pick a plan with them.
    model: model file in the displayed `edge chat` or `edge run` commands.
    The page appears under its name only when it is complete.
    Raises PictureError if the page cannot be written or there are no plans.
    """
    path = Path(path)
    check_page(path)
    if not front_points.front(result):
        raise PictureError("no plan can be shown, because none fits these devices")
    text = page(result, command, model)
    with temporary_beside(path) as temporary:
        temporary.write_text(text, encoding="ascii")
        temporary.replace(path)


def page(result: Result, command: Sequence[str], model: str) -> str:
    """Return the whole page in ASCII.

    Its content security policy has the digests of this project's script and style, so that no other code runs. The
    script writes the figures as text.
    """
    axes = AXES.read_text(encoding="utf-8").replace("export function", "function")  # a single file has no modules
    script, style = axes + _part("chart.js") + _part("page.js"), _part("page.css")
    title = html.escape(f"{result['model']}: latency against throughput")
    parts = {
        "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'",
        "title": title.encode("ascii", "xmlcharrefreplace").decode(),
        "style": style,
        "script": script,
        "data": embedded({"result": result, "view": _view(result, command, model)}),
    }
    # One pass, so that placeholders in inserted text stay as they are.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def embedded(values: Any) -> str:
    """Return ASCII JSON that can neither end its script element nor begin a comment."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _view(result: Result, command: Sequence[str], model: str) -> dict[str, Any]:
    """Return the values that the page shows in addition to the object."""
    shown, near = front_points.visible_plans(result)
    return {
        "log_from": front_points.LOG_FROM,
        "figures": [  # memory has a row for each device
            {"key": row.key, "scale": row.scale, "name": f"{row.label}, {row.unit_of(front_points.unit(result)[:-1])}"}
            for name, row in OBJECTIVES.items()
            if name != "memory"
        ],
        "devices": front_points.names(result),
        "types": front_points.several_types(result),
        "type_labels": {name: front_points.type_label(result, name) for name in front_points.several_types(result)},
        "by_type": front_points.has_quality(result),
        "lines": {name: [point["id"] for point in points] for name, points in front_points.lines(result).items()},
        "line": [point["id"] for point in front_points.line(result)],
        "shown": [point["id"] for point in shown],
        "near": [point["id"] for point in near],
        "roles": front_points.roles(result),
        "commands": {point["id"]: _commands(result, point, command, model) for point in result["points"]},
        "notes": front_points.notes(result),
    }


def _commands(result: Result, point: Point, command: Sequence[str], model: str) -> list[str]:
    """Return the commands that save and use a plan.

    If the plan is this device, return only the command that uses the model. If the plan has presets, return the
    commands that join devices in their place and plan again.
    """
    if point["type"] is not None:
        model = str(point.get("model") or model)  # file of the plan's type
    use = (
        ["edge", "chat", *([model] if model else [])] if result["kind"] == "llm" else ["edge", "run", model or "MODEL"]
    )
    if point["plan"] is None:
        return [shlex.join(use)]
    if steps := joining_commands(result, point["devices"], model or None):
        return steps
    return [
        shlex.join([*command, "--pick", str(point["id"]), "--save", SAVED]),
        shlex.join([*use, "--plan", SAVED]),
    ]


def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="ascii")


def _digest(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"

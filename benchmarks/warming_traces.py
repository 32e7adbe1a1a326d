"""Recorded turns of two clients: a home assistant and a coding agent.

The home assistant sends the time at the beginning of each system prompt, 20 tools, the states of 24 devices, and short
questions. The coding agent sends the date at the beginning, the instructions of this project, 8 tools, and a history
that grows by parts of files that it reads. Answers are the model's own, and calls are forced to the recorded function.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import ROOT

MOST_CHARACTERS = 24  # of an argument. Small models end no call by themselves: neither a text nor a list of arguments


@dataclass(frozen=True)
class TraceTurn:
    """Something that a client sends."""

    gap_s: float  # since the answer before it
    text: str  # of a user, or of what the function returned that the answer before it called
    calls: str | None = None  # the function that the answer calls


@dataclass(frozen=True)
class Trace:
    """A conversation of a client."""

    system: str  # in which {stamp} is the time
    stamp: str  # form of the time
    tools: list[dict[str, Any]]
    turns: list[TraceTurn]

    def system_at(self, now: float) -> str:
        """Return the system prompt at a time."""
        return self.system.replace("{stamp}", time.strftime(self.stamp, time.localtime(now)))


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {
        key: {"type": "string", "description": text, "maxLength": MOST_CHARACTERS} for key, text in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": [*parameters], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_AREA = "name of the area, such as kitchen"
_NAME = "name of the device, as it is in the list"
_HOME_TOOLS = [
    _tool("turn_on", "Turn on a device, or open a cover.", name=_NAME, area=_AREA),
    _tool("turn_off", "Turn off a device, or close a cover.", name=_NAME, area=_AREA),
    _tool("get_state", "Tell the state of a device.", name=_NAME),
    _tool("light_set", "Set the brightness or the colour of a light.", name=_NAME, brightness="0 to 100", color="name"),
    _tool("climate_set", "Set the temperature of a thermostat.", name=_NAME, temperature="degrees Celsius"),
    _tool("cover_set", "Set the position of a cover.", name=_NAME, position="0 is closed, 100 is open"),
    _tool("fan_set", "Set the speed of a fan.", name=_NAME, percentage="0 to 100"),
    _tool("media_play", "Go on playing.", name=_NAME),
    _tool("media_pause", "Pause what is played.", name=_NAME),
    _tool("media_next", "Skip to the next track.", name=_NAME),
    _tool("media_volume", "Set the volume.", name=_NAME, volume="0 to 100"),
    _tool("media_search", "Search for music and play it.", name=_NAME, query="artist, album or song"),
    _tool("timer_start", "Start a timer.", minutes="how long", label="what it is for"),
    _tool("timer_cancel", "Cancel a timer.", label="what it was for"),
    _tool("timer_status", "Tell how long a timer still runs.", label="what it is for"),
    _tool("list_add", "Add an item to a list.", list="name of the list", item="text"),
    _tool("list_complete", "Mark an item of a list as done.", list="name of the list", item="text"),
    _tool("vacuum_start", "Start the vacuum cleaner.", name=_NAME, area=_AREA),
    _tool("vacuum_return", "Send the vacuum cleaner back to its dock.", name=_NAME),
    _tool("broadcast", "Say something on all speakers.", message="what is said"),
]
_ROOMS = ("kitchen", "living room", "bedroom", "bathroom", "office", "hall")
_DEVICES = (("light", "off"), ("window sensor", "closed"), ("thermostat", "20.5 degrees"), ("blind", "open"))
HOME = Trace(
    "The current time is {stamp}. You are the voice assistant of a house. Answer in one short sentence, in plain"
    " words. Use the tools to control devices, and never say that something was done which was not. If a device is not"
    " in this list, say so.\nDevices:\n"
    + "\n".join(f"- {room} {device} (area: {room}): {state}" for room in _ROOMS for device, state in _DEVICES),
    "%H:%M on %A, %B %d, %Y",
    _HOME_TOOLS,
    [
        TraceTurn(0, "Turn on the light in the kitchen.", calls="turn_on"),
        TraceTurn(1, "done"),
        TraceTurn(9, "Is the bathroom window closed?"),
        TraceTurn(12, "Make it a bit warmer in the office.", calls="climate_set"),
        TraceTurn(1, "office thermostat: 21.5 degrees"),
        TraceTurn(10, "Start a timer for the pasta, nine minutes.", calls="timer_start"),
        TraceTurn(1, "timer pasta: 9 minutes"),
        TraceTurn(14, "Close all the blinds, please."),
        TraceTurn(9, "What is on the shopping list?"),
        TraceTurn(10, "Put milk on it."),
        TraceTurn(11, "Good night."),
    ],
)


_PATH = "path of a file, from the root of the project"
_AGENT_TOOLS = [
    _tool("read_file", "Read some lines of a file.", path=_PATH, first="number of a line", last="number of a line"),
    _tool("write_file", "Write a file, in place of what it held.", path=_PATH, content="all of its text"),
    _tool("edit_file", "Replace a text that comes once in a file.", path=_PATH, old="text", new="text"),
    _tool("list_files", "List the files in a folder.", path="path of a folder"),
    _tool("search", "Search for a regular expression in all files.", pattern="regular expression"),
    _tool("run", "Run a command in a shell, and return what it printed.", command="the command"),
    _tool("tests", "Run tests, and return those that failed.", path="file or folder of tests"),
    _tool("done", "End the task.", summary="what was changed, and why"),
]


def _lines(path: str, first: int, last: int) -> str:
    return "\n".join((ROOT / path).read_text().splitlines()[first - 1 : last])


AGENT = Trace(
    "Today is {stamp}.\nYou are a coding agent. You work on the project that is described below, with the tools that"
    " you have. Read before you write, change as little as the task needs, and run the tests before you end.\n\n"
    + (ROOT / "CONTRIBUTING.md").read_text()
    + (ROOT / "docs" / "engine.md").read_text()[:1500],
    "%Y-%m-%d",
    _AGENT_TOOLS,
    [
        TraceTurn(0, "close() of some objects is called twice. Find out whether that is safe.", calls="search"),
        TraceTurn(
            1, "edge/closing.py: class Closing\nedge/llm/scheduler.py: class Scheduler(Closing)", calls="read_file"
        ),
        TraceTurn(1, _lines("edge/closing.py", 1, 16), calls="read_file"),
        TraceTurn(1, _lines("edge/llm/scheduler.py", 48, 58), calls="search"),
        TraceTurn(1, "tests/unit/edge/test_closing.py", calls="read_file"),
        TraceTurn(1, _lines("tests/unit/edge/test_closing.py", 1, 16), calls="tests"),
        TraceTurn(8, "2 passed in 0.31s", calls="edit_file"),
        TraceTurn(1, "edge/closing.py: 1 replacement", calls="tests"),
        TraceTurn(8, "2 passed in 0.30s", calls="run"),
        TraceTurn(1, " edge/closing.py | 3 ++-\n 1 file changed, 2 insertions(+), 1 deletion(-)"),
        TraceTurn(12, "Thanks. Is it said in the changelog, too?"),
    ],
)
TRACES = {"home": HOME, "agent": AGENT}

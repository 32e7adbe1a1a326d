"""Home Assistant in this process: its Ollama and OpenAI integrations, each with a conversation of several turns."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType

from common import MODEL, QUESTION, URL, main, said

os.environ["OPENAI_BASE_URL"] = f"{URL}/v1"
# Home Assistant imports a package for its cloud; a stub replaces the package.
sys.path.append(str(Path(__file__).with_name("stand_ins")))

from agent_calls import END, SCRIPT
from homeassistant import auth, config_entries, loader
from homeassistant.components import conversation
from homeassistant.components.homeassistant.exposed_entities import async_expose_entity
from homeassistant.core import Context, HomeAssistant
from homeassistant.helpers import (
    area_registry,
    category_registry,
    device_registry,
    entity,
    entity_registry,
    floor_registry,
    frame,
    issue_registry,
    label_registry,
    restore_state,
    template,
    translation,
)  # fmt: skip
from homeassistant.helpers.storage import get_internal_store_manager
from homeassistant.setup import async_setup_component

SWITCHES = {"lamp": True, "fan": False, "heater": False}  # initial state of each switch
REGISTRIES = (
    area_registry, category_registry, device_registry, entity_registry, floor_registry, issue_registry,
    label_registry, restore_state,
)  # fmt: skip
INTEGRATIONS = ("ollama", "openai_conversation")


def settings(domain: str, model: str, tools: bool) -> tuple[dict[str, object], dict[str, object]]:
    """Return data and options of an integration's config entry."""
    options = {"llm_hass_api": "assist"} if tools else {}
    if domain == "ollama":
        return {"url": URL, "model": model}, {**options, "num_ctx": 8192}
    return {"api_key": "none"}, {**options, "recommended": False, "chat_model": model, "max_tokens": 2000}


async def home() -> HomeAssistant:
    """Return a home with switches that the conversation agents may use."""
    hass = HomeAssistant(tempfile.mkdtemp())
    hass.config.skip_pip = True
    hass.config_entries = config_entries.ConfigEntries(hass, {})
    loader.async_setup(hass)
    for module in (entity, frame, template, translation):
        module.async_setup(hass)
    await get_internal_store_manager(hass).async_initialize()
    for module in REGISTRIES:
        await module.async_load(hass)
    await hass.config_entries.async_initialize()
    hass.auth = await auth.auth_manager_from_config(hass, [], [])
    switches = {name: {"name": name.title(), "initial": state} for name, state in SWITCHES.items()}
    for name in ("homeassistant", "conversation", "input_boolean"):
        assert await async_setup_component(hass, name, {"input_boolean": switches}), f"{name} was not set up"
    for name in switches:
        async_expose_entity(hass, "conversation", f"input_boolean.{name}", True)
    return hass


async def turns(domain: str, model: str, questions: list[str], tools: bool) -> tuple[list[str], list[str]]:
    """Return the agent's answers in one conversation, and the final state of each switch."""
    hass = await home()
    try:
        data, options = settings(domain, model, tools)
        entry = config_entries.ConfigEntry(
            domain=domain, title=domain, data=data, options=options, source="user", unique_id=None, version=1,
            minor_version=1, discovery_keys=MappingProxyType({}), subentries_data=None,
        )  # fmt: skip
        await hass.config_entries.async_add(entry)
        assert entry.state is config_entries.ConfigEntryState.LOADED, (entry.state, entry.reason)
        answers, conversation_id = [], None
        for question in questions:
            result = await conversation.async_converse(
                hass, question, conversation_id, Context(), language="en", agent_id=entry.entry_id
            )
            assert result.response.error_code is None, result.response.speech
            answers.append(result.response.speech["plain"]["speech"])
            conversation_id = result.conversation_id
        return answers, [hass.states.get(f"input_boolean.{name}").state for name in SWITCHES]
    finally:
        await hass.async_stop(force=True)


def hello() -> str:
    return ", ".join(said(asyncio.run(turns(domain, MODEL, [QUESTION], False))[0][0]) for domain in INTEGRATIONS)


def tools() -> str:
    """Two turns with calls that use the switches, and a third turn without calls, with each integration."""
    marks = [mark for mark in SCRIPT if mark.startswith("home-assistant ")]
    questions = [*(f"Use the switches. [{mark}]" for mark in marks), "Thank you."]
    for domain in INTEGRATIONS:
        answers, states = asyncio.run(turns(domain, "script", questions, True))
        assert all(END in answer for answer in answers), answers
        assert states == ["off", "on", "on"], f"{domain}: {states}"
    return f"{len(INTEGRATIONS)} conversations of {len(questions)} turns"


main({"hello": hello, "tools": tools})

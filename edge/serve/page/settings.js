// The settings of answers.

import * as chats from "./chats.js";
import {$} from "./dom.js";
import {chosen} from "./picker.js";

// Fields of numbers: the id of the element and the name in a request.
const NUMBERS = {
  temperature: "temperature", "top-p": "top_p", "top-k": "top_k", "min-p": "min_p", "repeat-penalty": "repeat_penalty",
  seed: "seed", "max-tokens": "max_tokens", thought: "reasoning_budget",
};
const settings = chats.settings();

/** Return the request fields of the current settings. Empty fields are left out: the server's defaults apply. */
export function requestFields() {
  const fields = Object.values(NUMBERS).filter(name => settings[name] !== null).map(name => [name, settings[name]]);
  const stop = settings.stop.split("\n").map(line => line.replaceAll("\\n", "\n")).filter(Boolean);
  return {...(chosen() ? {model: chosen()} : {}), ...Object.fromEntries(fields), ...(stop.length ? {stop} : {})};
}

/** Return the system prompt, or "". */
export function system() { return settings.system.trim(); }

/** Install the event handlers. */
export function start() {
  for (const [id, name] of Object.entries(NUMBERS)) {
    $(id).addEventListener("input", () => {
      if ($(id).checkValidity()) set(name, $(id).value === "" ? null : Number($(id).value));
      complain();
    });
  }
  $("system").addEventListener("input", () => set("system", $("system").value));
  $("stop-texts").addEventListener("input", () => set("stop", $("stop-texts").value));
  $("use-defaults").addEventListener("click", () => {
    for (const name of [...Object.values(NUMBERS), "stop"]) set(name, name === "stop" ? "" : null);
    fill();
  });
  fill();
}

function fill() {
  for (const [id, name] of Object.entries(NUMBERS)) $(id).value = settings[name] ?? "";
  $("system").value = settings.system;
  $("stop-texts").value = settings.stop;
  complain();
}

function set(name, value) {
  settings[name] = value;
  chats.keepSettings({[name]: value});
}

// An invalid value is not used; say so beside the fields.
function complain() {
  const wrong = Object.keys(NUMBERS).map($).find(field => !field.checkValidity());
  $("settings-notice").textContent = wrong
    ? `${wrong.labels[0].textContent}: ${wrong.validationMessage} The former value stays in use.` : "";
}

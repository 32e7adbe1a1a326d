// The settings panel: options of answers, and the stored chats.

import * as chats from "./chats.js";
import {$, button, make} from "./dom.js";

const settings = chats.settings();

/** Return the request fields of the current settings. */
export function asked() {
  const {model, temperature, max_tokens, thought} = settings;
  return {
    ...(model ? {model} : {}),
    ...(temperature === null ? {} : {temperature}),
    ...(max_tokens === null ? {} : {max_tokens}),
    ...(thought === null ? {} : {reasoning_budget: thought}),
  };
}

/** Return the system prompt, or "". */
export function system() { return settings.system.trim(); }

/** Install the event handlers. `chat`: module that opens chats. */
export function start(chat) {
  $("open-settings").addEventListener("click", () => { location.hash = "#chat"; toggle($("settings").hidden); });
  $("close-settings").addEventListener("click", close);
  $("system").value = settings.system;
  $("temperature").value = settings.temperature ?? "";
  $("max-tokens").value = settings.max_tokens ?? "";
  $("thought").value = settings.thought ?? "";
  $("system").addEventListener("input", () => set("system", $("system").value));
  $("model").addEventListener("change", () => set("model", $("model").value));
  listenToNumber("temperature", "temperature");
  listenToNumber("max-tokens", "max_tokens");
  listenToNumber("thought", "thought");
  $("clear").addEventListener("click", () => {
    if (!confirm("Delete all chats stored in this browser?")) return;
    chats.all().forEach(chats.forget);
    chat.open(chats.fresh());
    list(chat);
  });
  $("open-settings").addEventListener("click", () => list(chat));
}

/** Set the names of the models. The first is selected if the current model is not among them. */
export function setModels(names) {
  if (!names.includes(settings.model)) settings.model = names[0] || "";
  $("model").replaceChildren(...names.map(name => make("option", {value: name}, name)));
  $("model").value = settings.model;
  showModel();
}

/** Close the panel. Return false if it was not open. */
export function close() {
  if ($("settings").hidden) return false;
  toggle(false);
  $("open-settings").focus();
  return true;
}

function toggle(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  if (open) $("model").focus();
}

function listenToNumber(id, name) {
  $(id).addEventListener("input", () => {
    if ($(id).checkValidity()) set(name, $(id).value === "" ? null : Number($(id).value));
  });
}

function set(name, value) {
  settings[name] = value;
  chats.keepSettings(settings);
  showModel();
}

function showModel() {
  $("serving").textContent = settings.model;
  $("serving").title = settings.model;
}

function list(chat) {
  const found = chats.all();
  $("clear").hidden = !found.length;
  $("chats").replaceChildren(...found.map(one => {
    const opening = button(chats.title(one), "link title", () => { chat.open(one); list(chat); });
    if (chat.isOpen(one)) opening.setAttribute("aria-current", "true");
    const removing = button("Delete", "link", () => {
      chats.forget(one);
      if (chat.isOpen(one)) chat.open(chats.fresh());
      list(chat);
    });
    removing.setAttribute("aria-label", `Delete ${chats.title(one)}`);
    return make("li", {}, opening, removing);
  }), ...(found.length ? [] : [make("li", {class: "quiet"}, "None yet.")]));
}

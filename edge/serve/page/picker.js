// The model of the next question: which are here, which are loaded, and where they run.

import {get} from "./api.js";
import * as chats from "./chats.js";
import {$, make, plain} from "./dom.js";
import {Poll} from "./poll.js";

const EVERY_MS = 5000;

let models = [];  // of GET /v1/models
let loaded = [];  // status of the loaded models
let failure = "";   // why the state is unknown
const poll = new Poll(state => { loaded = state.models; show(); }, fail, EVERY_MS);
const settings = chats.settings();

/** Install the event handlers. */
export function start() {
  $("model").addEventListener("change", () => {
    chats.keepSettings({model: $("model").value});
    settings.model = $("model").value;
    show();
  });
}

/** Begin to refresh the models. */
export function look() {
  poll.look();
  refresh();
}

/** Stop refreshing the models. */
export function lookAway() { poll.lookAway(); }

/** Ask for the names of the models again. */
export async function refresh() {
  try {
    models = (await get("v1/models")).data;
    $("notice").textContent = "";
  } catch (error) {
    $("notice").textContent = error.message;
    return;
  }
  if (!models.some(model => model.id === settings.model)) settings.model = models[0]?.id || "";
  show();
}

/** Return the name of the chosen model, or "". */
export function chosen() { return settings.model; }

/** Return why the chosen model cannot use a kind of media, "image" or "audio", or "". */
export function refusal(kind) {
  const takes = name => models.find(model => model.id === name)?.input_modalities;
  if (!takes(settings.model) || takes(settings.model).includes(kind)) return "";
  const [what, verb] = kind === "image" ? ["pictures", "see"] : ["sounds", "hear"];
  const others = models.filter(model => model.input_modalities?.includes(kind)).map(model => model.id);
  return `${settings.model} cannot ${verb} ${what}. ` + (others.length ? `Choose ${others.join(" or ")}.`
    : `No model here can; a model needs a projector (an mmproj file) for that.`);
}

function fail(_, message = "") {
  if (failure && !message) refresh();  // the server is back, perhaps with other models
  failure = message;
  show();
}

// Return the status of a model, or undefined if it is not loaded. An adapter runs with the model that it changes.
function status(name) {
  const parent = models.find(model => model.id === name)?.parent ?? name;
  return loaded.find(one => one.model.name === parent);
}

function show() {
  const options = models.map(({id}) => [id, status(id) ? `${id} (loaded)` : id]);
  const shown = JSON.stringify(options);
  if ($("model").dataset.shown !== shown) {
    $("model").dataset.shown = shown;
    $("model").replaceChildren(...options.map(([value, text]) => Object.assign(make("option", {}, text), {value})));
  }
  $("model").value = settings.model;
  $("model").disabled = !models.length;
  const where = failure || place();
  if ($("where").textContent !== where) $("where").textContent = where;
  $("where").classList.toggle("wrong", Boolean(failure));
  $("no-model").hidden = models.length > 0 || Boolean(failure);
  const name = plain(settings.model);
  if ($("welcome-model").textContent !== name) $("welcome-model").textContent = name;
}

function place() {
  if (!settings.model) return "";
  const found = status(settings.model);
  if (!found) return "Not loaded; the first question loads it.";
  const names = (found.devices || []).filter(device => device.left_s === undefined).map(device => plain(device.name));
  return names.length ? `Runs on ${new Intl.ListFormat("en").format(new Set(names))}` : "Loaded";
}

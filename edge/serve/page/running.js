// The state of each loaded model below the devices: figures, events, slots and counters.

import {$, bytes, count, digits, make, plain} from "./dom.js";
import {LineChart} from "./line_chart.js";

const LATEST = 10;     // lines about what happened

const shown = new Map();  // ModelView by model name

/** Show the statuses of the models. */
export function showModels(models) {
  const names = new Set(models.map(status => status.model.name));
  for (const [name, view] of shown) {
    if (!names.has(name)) { view.element.remove(); shown.delete(name); }
  }
  for (const status of models) {
    const name = status.model.name;
    if (!shown.has(name)) {
      shown.set(name, new ModelView());
      $("running").append(shown.get(name).element);
    }
    shown.get(name).show(status);
  }
}

class ModelView {
  constructor() {
    this.title = make("h2");
    this.about = make("p", {class: "quiet"});
    this.wrong = make("p", {class: "wrong"});
    this.figures = make("dl", {class: "figures"});
    this.chart = new LineChart("tokens/s");
    this.slots = make("tbody");
    this.idle = make("p", {class: "quiet"}, "No answers are being generated.");
    this.counters = make("dl", {class: "counters"});
    this.why = make("p", {class: "why"});
    this.events = make("ol", {class: "events", "aria-label": "What happened"});
    this.happened = make("div", {}, make("h3", {}, "What happened"), this.events);
    this.plan = make("pre", {tabindex: 0});
    this.planned = make("details", {}, make("summary", {}, "The plan as JSON"), this.plan);
    const heads = ["Slot", "State", "Prompt", "Generated"].map((name, i) =>
      make("th", {class: i > 1 ? "number" : null}, name));
    this.element = make("section", {class: "model"}, this.title, this.about, this.wrong,
      make("div", {class: "now"}, this.figures, this.chart.element),
      this.why, this.happened, this.planned,
      this.pair = make("div", {class: "pair"},
        make("div", {}, make("h3", {}, "Slots"), this.idle,
          make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), this.slots))),
        make("div", {}, make("h3", {}, "Since the start"), this.counters)));
  }

  show(status) {
    const {model, slots = [], waiting, tokens_per_s, plan, why, counters = {}, restarts, latency} = status;
    const events = status.events || [];
    this.wrong.textContent = status.error || "";  // its engine process has ended
    const busy = slots.filter(slot => slot.is_processing).length;
    this.title.textContent = plain(model.name);
    this.about.textContent = [
      model.architecture,
      model.parameters ? `${parameters(model.parameters)} parameters` : null,
      model.size_bytes ? bytes(model.size_bytes) : null,
    ].filter(Boolean).join(" \u00b7 ");
    setList(this.figures, [
      ["tokens/s", digits(tokens_per_s)], ["slots in use", `${busy} of ${model.sequences ?? slots.length}`],
      ["waiting", count(waiting)],
      ...within(`gaps within ${latency?.target_itl_ms} ms`, latency?.gaps_within, latency?.gaps),
      ...within(`first tokens within ${latency?.target_ttft_ms} ms`, latency?.first_tokens_within, latency?.first_tokens),
    ]);
    this.chart.add(tokens_per_s);
    this.why.textContent = plan && why && why !== "as the plan says" ? `Placement: ${why}` : "";
    this.happened.hidden = !events.length;
    setRows(this.events, events.slice(-LATEST).reverse(), ({time, text}) =>
      make("li", {}, make("time", {class: "quiet"}, new Date(1e3 * time).toLocaleTimeString()), ` ${text}`));
    this.planned.hidden = !plan;
    const text = plan ? JSON.stringify(plan, null, 1) : "";
    if (this.plan.textContent !== text) this.plan.textContent = text;
    setRows(this.slots, slots.map(slot => [
      [slot.id < 0 ? "-" : slot.id], [slot.is_processing ? "at work" : "free", slot.is_processing ? "busy" : "quiet"],
      [count(slot.prompt_tokens), "number"], [count(slot.generated_tokens), "number"],
    ]), cells => make("tr", {}, ...cells.map(([text, style]) => make("td", {class: style}, text))));
    this.slots.parentElement.hidden = !slots.length;
    this.idle.hidden = slots.length > 0;
    this.pair.hidden = !slots.length && !counters.prompt_tokens;  // nobody has used the model yet
    const figures = Object.entries({...counters, ...(restarts === undefined ? {} : {restarts})})
      .filter(([name, value]) => value || !RARE.includes(name));
    setList(this.counters, figures.map(([name, value]) => [WORDS[name] || name, count(value)]));
  }
}

/** Return the figure for the share within a latency target, or [] without a target or without values. */
function within(words, part, all) {
  return part == null || !all ? [] : [[words, `${digits(100 * part / all)} %`]];
}

const WORDS = {
  prompt_tokens: "prompt tokens", cached_tokens: "prompt tokens from the cache", generated_tokens: "generated tokens",
  steps: "steps of the model", preemptions: "answers interrupted by others",
  background_preemptions: "background answers interrupted", restarts: "restarts of the model",
};
const RARE = ["preemptions", "background_preemptions", "restarts"];  // shown only if they are not zero

function parameters(value) {
  if (typeof value !== "number") return value;
  const [size, unit] = value >= 1e9 ? [1e9, "billion"] : value >= 1e6 ? [1e6, "million"] : [1, ""];
  return `${digits(value / size)} ${unit}`.trim();
}

// Show names and figures. If the names are unchanged, only the texts are replaced.
export function setList(list, pairs) {
  const names = [...list.querySelectorAll("dt")].map(one => one.textContent);
  if (names.join("\n") !== pairs.map(pair => pair[0]).join("\n")) {
    list.replaceChildren(...pairs.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  list.querySelectorAll("dd").forEach((element, i) => {
    if (element.textContent !== pairs[i][1]) element.textContent = pairs[i][1];
  });
  return list;
}

// Replace the rows of an element if they have changed, so that selected text stays selected.
function setRows(body, rows, row) {
  const shown = JSON.stringify(rows);
  if (body.dataset.rows === shown) return;
  body.dataset.rows = shown;
  body.replaceChildren(...rows.map(row));
}

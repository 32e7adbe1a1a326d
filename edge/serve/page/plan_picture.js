// A picture of a plan: the copies of the model beside each other, and in each copy its devices in order.

import {draw, plural} from "./dom.js";

const [LEAST_WIDTH, GAP, BOX, ARROW, TITLE] = [150, 14, 58, 18, 20];
const LETTER = 6.8;  // mean width of a letter
export const OWN = "local";  // the server's own device in a plan

/** Return the text of the part of the model that a device has. */
export function partText(layers, heads, sizes) {
  const [first, end] = layers;
  if (first === end) return "tokens only";
  const all = end - first === sizes.layers;
  const text = all ? "all layers" : end - first === 1 ? `layer ${first}` : `layers ${first}-${end - 1}`;
  return heads[1] - heads[0] < sizes.heads ? `${text}, heads ${heads[0]}-${heads[1] - 1}` : text;
}

/** Return the columns of a plan: {title, stages}, where a stage has {layers, shards}. */
function columnsOf(plan) {
  const copies = [plan, ...(plan.replicas || [])];
  return copies.flatMap((copy, i) => {
    const title = copies.length > 1 ? `Copy ${i + 1}` : "";
    if (!copy.prefill) return [{title, stages: copy.stages}];
    return [{title: `${title} Prompts`.trim(), stages: copy.prefill.stages},
      {title: `${title} Answers`.trim(), stages: copy.stages}];
  });
}

// Return true if a value has the parts of a plan that a picture shows. A file of plans may have anything.
function isPlan(plan) {
  const isRange = value => Array.isArray(value) && value.length === 2 && value.every(Number.isInteger);
  const isStage = stage => isRange(stage?.layers) && Array.isArray(stage.shards) && stage.shards.length > 0 &&
    stage.shards.every(shard => typeof shard?.device === "string" && isRange(shard.heads));
  return Number.isInteger(plan?.sizes?.layers) && Array.isArray(plan.stages) && plan.stages.length > 0 &&
    plan.stages.every(isStage) && (!plan.prefill || isPlan(plan.prefill)) &&
    (!plan.replicas || (Array.isArray(plan.replicas) && plan.replicas.every(isPlan)));
}

/** Return the addresses of the devices that compute in a plan, each once, or [] if the plan is not readable. */
export function devicesOf(plan) {
  if (!isPlan(plan)) return [];
  const shards = columnsOf(plan).flatMap(({stages}) => stages.filter(({layers}) => layers[1] > layers[0])
    .flatMap(stage => stage.shards));
  return [...new Set(shards.map(shard => shard.device))];
}

/** Return a text that is equal for two plans that give every device the same parts. */
export function partsOf(plan) {
  if (!isPlan(plan)) return JSON.stringify(plan);
  return JSON.stringify(columnsOf(plan).map(({stages}) =>
    stages.map(({layers, shards}) => [layers, shards.map(({device, heads, ff}) => [device, heads, ff])])));
}

/** Draw a plan, or return null if the plan is not readable.
 *
 * `name` returns the name of a device by its address. `width`: points that the picture may take. */
export function planPicture(plan, name, width) {
  if (!isPlan(plan)) return null;
  const columns = columnsOf(plan), sizes = plan.sizes;
  const perRow = Math.max(1, Math.min(columns.length, Math.floor((width + GAP) / (LEAST_WIDTH + GAP))));
  const columnWidth = Math.min(340, (width - GAP * (perRow - 1)) / perRow);
  const parts = [], words = [];
  const [only] = columns, n = only.stages.length;
  if (columns.length === 1 && n > 1 && only.stages.every(stage => stage.shards.length === 1) &&
    (width - ARROW * (n - 1)) / n >= LEAST_WIDTH) return row(only.stages, name, width, sizes);
  let top = 0, rowBottom = 0;
  columns.forEach(({title, stages}, i) => {
    if (i % perRow === 0) top = rowBottom + (i ? GAP : 0);
    const x = i % perRow * (columnWidth + GAP);
    let y = top;
    if (title) {
      parts.push(draw("text", {x, y: y + 12, class: "tick"}, title));
      y += TITLE;
    }
    const said = stages.map((stage, j) => {
      if (j) {
        parts.push(draw("path", {d: `M${x + columnWidth / 2},${y + 2}v${ARROW - 6}m-4,-4l4,4l4,-4`, class: "arrow"}));
        y += ARROW;
      }
      // Devices that share the layers of a stage are beside each other if there is room.
      const beside = Math.max(1, Math.min(stage.shards.length, Math.floor((columnWidth + 6) / (LEAST_WIDTH / 1.4 + 6))));
      const boxWidth = (columnWidth - 6 * (beside - 1)) / beside;
      const texts = stage.shards.map((shard, k) => {
        const text = partText(stage.layers, shard.heads, sizes), device = name(shard.device);
        const at = {x: x + k % beside * (boxWidth + 6), y: y + Math.floor(k / beside) * (BOX + 6)};
        parts.push(box(at, boxWidth, device, text, stage.layers, sizes));
        return `${device} has ${text}`;
      });
      y += Math.ceil(stage.shards.length / beside) * (BOX + 6) - 6;
      return texts.join(", and ");
    });
    words.push(`${title ? `${title}: ` : ""}${said.join(", then ")}`);
    rowBottom = Math.max(rowBottom, y);
  });
  const text = `The model in ${plural(columns.length, "part")}. ${words.join(". ")}.`;
  return svg(width, rowBottom, columns.length > 1 ? text : `${words.join(". ")}.`, parts);
}

// Draw the devices of one copy in a row, if there is room for that.
function row(stages, name, width, sizes) {
  const boxWidth = Math.min(240, (width - ARROW * (stages.length - 1)) / stages.length);
  const words = [], parts = stages.flatMap(({layers, shards: [shard]}, i) => {
    const x = i * (boxWidth + ARROW), text = partText(layers, shard.heads, sizes);
    words.push(`${name(shard.device)} has ${text}`);
    return [box({x, y: 0}, boxWidth, name(shard.device), text, layers, sizes),
      i ? draw("path", {d: `M${x - ARROW + 2},${BOX / 2}h${ARROW - 6}m-4,-4l4,4l-4,4`, class: "arrow"}) : null];
  });
  return svg(width, BOX, `${words.join(", then ")}.`, parts);
}

function svg(width, height, label, parts) {
  return draw("svg", {class: "plan-picture", role: "img", width, height: height + 2,
    viewBox: `-1 -1 ${width + 2} ${height + 2}`, "aria-label": label}, ...parts);
}

function box({x, y}, width, device, text, layers, sizes) {
  const all = Math.max(1, sizes.layers), inner = width - 20;
  return draw("g", {class: layers[1] > layers[0] ? "stage" : "stage thin"},
    draw("title", {}, `${device}: ${text}`),
    draw("rect", {x, y, width, height: BOX, rx: 6}),
    draw("text", {x: x + 10, y: y + 19, class: "name"}, cut(device, inner)),
    draw("text", {x: x + 10, y: y + 36, class: "tick"}, cut(text, inner)),
    draw("rect", {x: x + 10, y: y + 45, width: inner, height: 5, rx: 2, class: "whole"}),
    draw("rect", {x: x + 10 + inner * layers[0] / all, y: y + 45, width: inner * (layers[1] - layers[0]) / all, height: 5,
      rx: 2, class: "part"}));
}

function cut(text, width) {
  const most = Math.max(4, Math.floor(width / LETTER));
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}

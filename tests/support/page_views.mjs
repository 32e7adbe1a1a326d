// Tests of the views of the server's page: which requests they send, and what they show, in sequences of answers.
//
//     node page_views.mjs FOLDER    the folder has the scripts as the server serves them
import assert from "node:assert/strict";
import {join} from "node:path";
import test from "node:test";
import {pathToFileURL} from "node:url";

import {byId, server, settle, timers} from "./small_dom.mjs";

const page = name => import(pathToFileURL(join(process.argv[2], `${name}.js`)));
const {Poll} = await page("poll");
const devices = await page("devices");
const models = await page("models");
const front = await page("front");
const {DevicePicture} = await page("device_picture");

const EVERY_MS = 1000;
const CLUSTER = "v1/cluster";

const device = (name, changes = {}) => ({
  name, kind: name === "this device" ? name : "worker", state: "ready", text: "no model uses it", since: 1, member: true,
  memory: {}, models: [], busy: 0, tokens_per_s: 0, load: null, temperature_c: null, battery_percent: null, ...changes,
});
const part = (first, end, rank = 0) => ({model: "tiny", layers: [first, end], heads: [0, 4], n_layers: 8, n_heads: 4, rank});
const posts = () => server.requests.filter(([method]) => method !== "GET");
const cluster = (list, more = {}) => ({models: [], devices: list, links: [], removed: [], cluster: {problem: ""}, ...more});
const later = () => {
  let give;
  const promise = new Promise(resolve => { give = resolve; });
  return Object.assign(() => promise, {give});
};
const named = (element, label) => element.all().find(one => one.getAttribute("aria-label") === label);
const button = (element, text) => element.querySelectorAll("button").find(one => one.textContent === text);

test("a poll shows each answer while it is looked at, and nothing afterwards", async () => {
  const log = [];
  const poll = new Poll(state => log.push(state.n), (...texts) => { if (texts[0]) log.push(texts); });
  let n = 0;
  server.answers[CLUSTER] = () => ({n: n += 1});
  poll.look();
  poll.look();
  await settle();
  assert.deepEqual(log, [1]);
  assert.equal(timers.ofLength(EVERY_MS).length, 1);
  poll.ask();
  assert.equal(timers.ofLength(EVERY_MS).length, 0, "the timer must not ask a second time meanwhile");
  poll.ask();
  await settle();
  assert.deepEqual(log, [1, 2, 3]);
  assert.equal(timers.ofLength(EVERY_MS).length, 1);
  timers.fire(EVERY_MS);
  await settle();
  assert.deepEqual(log, [1, 2, 3, 4]);
  const slow = server.answers[CLUSTER] = later();
  timers.fire(EVERY_MS);
  poll.lookAway();
  slow.give({n: 9});
  await settle();
  assert.deepEqual(log, [1, 2, 3, 4]);
  assert.equal(timers.waiting.size, 0);
  const broken = server.answers[CLUSTER] = later();
  poll.look();
  poll.lookAway();
  broken.give(500);
  await settle();
  assert.equal(timers.waiting.size, 0);
});

test("a poll complains, tries again, and stops without a key", async () => {
  const complaints = [], shown = [];
  const poll = new Poll(state => shown.push(state), (...texts) => complaints.push(texts));
  server.answers[CLUSTER] = () => 500;
  poll.look();
  await settle();
  assert.deepEqual(complaints, [["refused The view below shows the last known state.", "refused"]]);
  server.answers[CLUSTER] = () => ({});
  timers.fire(EVERY_MS);
  await settle();
  assert.deepEqual(complaints.at(-1), [""]);
  assert.equal(shown.length, 1);
  server.answers[CLUSTER] = () => 401;
  timers.fire(EVERY_MS);
  await settle();
  byId("key-dialog").close("");
  await settle();
  assert.equal(timers.waiting.size, 0);
  server.answers[CLUSTER] = () => ({});
  poll.look();
  await settle();
  assert.equal(shown.length, 2);
  poll.lookAway();
  assert.equal(timers.waiting.size, 0);
});

async function seen(state) {
  server.answers[CLUSTER] = () => state;
  devices.look();
  timers.fire(EVERY_MS);
  await settle();
  return Object.fromEntries(byId("device-cards").children.map(card => [card.querySelector("h3").textContent, card]));
}

const facts = card => Object.fromEntries(card.querySelectorAll("dt").map(term =>
  [term.textContent, term.parentElement.querySelector("dd").textContent]));

test("cards have the figures of devices, and a link in either direction", async () => {
  devices.start();
  const GIB = 2 ** 30;
  const links = [{from: "this device", to: "pi", latency_s: 0.002, bytes_per_s: null},
    {from: "nas", to: "this device", latency_s: null, bytes_per_s: 1e6 * 1.048576}, {from: "pi", to: "nas", latency_s: 9}];
  const state = cluster([device("this device"),
    device("pi", {models: [part(4, 7)], busy: 0.25, load: 0.5, tokens_per_s: 3, temperature_c: 0, battery_percent: 0,
      memory: {memory: {total: 4 * GIB, free: GIB}, gpu: null}}),
    device("nas", {state: "lost", text: "lost: it went away"})], {links});
  const cards = await seen(state);
  assert.deepEqual(facts(cards.pi), {Memory: "1 GiB free of 4 GiB", Load: "50 %", Computing: "25 % of the time",
    Temperature: "0 \u00b0C", Battery: "0 %", "Tokens/s": "3", Link: "2 ms"});
  assert.deepEqual(facts(cards.nas), {Link: "1 MiB/s"});
  assert.deepEqual(facts(cards["this device"]), {});
  assert.equal(button(cards["this device"], "Pause").parentElement.hidden, true);
  assert.equal(button(cards.nas, "Pause").parentElement.hidden, false);
  assert.match(cards.pi.textContent, /Layers 4-6 of tiny/);
  const [layers, memory] = cards.pi.querySelectorAll("rect").map(({attributes}) => Object.fromEntries(attributes));
  assert.deepEqual([layers.x, layers.width, memory.x, memory.width], ["50", "37.5", "0", "75"]);
  assert.equal(byId("devices-summary").textContent,
    "3 devices \u00b7 1 lost \u00b7 no model is loaded; a question in the chat loads one");
  state.devices[1].models = [part(6, 7)];
  state.devices[1].memory.memory.free = 2 * GIB;
  await seen(state);
  assert.match(cards.pi.textContent, /Layer 6 of tiny/);
  assert.equal(facts(cards.pi).Memory, "2 GiB free of 4 GiB");
  assert.deepEqual(Object.keys(await seen(cluster([device("this device")]))), ["this device"]);
  assert.equal(devices.partText({...part(0, 8), heads: [0, 0]}), "All layers");
  assert.equal(devices.partText({...part(0, 8), heads: [0, 2]}), "All layers, heads 0-1");
});

test("news of devices is announced once", async () => {
  const announced = [];
  Object.defineProperty(byId("announce"), "textContent", {set: text => announced.push(text), get: () => ""});
  for (const state of ["ready", "computing", "lost", "lost", "ready", "slow", "computing", "paused", "joining", "ready"]) {
    await seen(cluster([device("pi", {state, text: "why"})]));
  }
  assert.deepEqual(announced.map(text => text.split(" is ")[1]),
    ["lost: why", "ready: why", "slow: why", "computing: why", "paused: why", "joining: why"]);
});

test("buttons pause, resume, remove and revoke", async () => {
  const name = "a b", path = "v1/cluster/devices/a%20b", dialog = byId("remove-dialog");
  let card = (await seen(cluster([device(name)])))[name];
  server.requests.length = 0;
  named(card, "Pause a b").click();
  await settle();
  card = (await seen(cluster([device(name, {state: "paused"})])))[name];
  named(card, "Resume a b").click();
  await settle();
  assert.deepEqual(posts(), [["POST", path, {paused: true}], ["POST", path, {paused: false}]]);
  for (const [revoke, result, query] of [[false, "", null], [true, "", null], [true, "remove", "?revoke=true"],
    [false, "remove", ""], [false, "", null]]) {
    server.requests.length = 0;
    button(card, "Remove").click();
    assert.equal(byId("revoke").checked, false);
    assert.equal(byId("revoke-row").hidden, false);
    byId("revoke").checked = revoke;
    dialog.close(result || undefined);
    await settle();
    assert.deepEqual(posts(), query === null ? [] : [["DELETE", `${path}${query}`, null]]);
    if (query !== null) assert.deepEqual(server.requests.at(-1), ["GET", CLUSTER, null]);
  }
  card = (await seen(cluster([device(name, {member: false})])))[name];
  button(card, "Remove").click();
  assert.equal(byId("revoke-row").hidden, true);
  card = (await seen(cluster([device(name, {state: "joining", invited: true})])))[name];
  button(card, "Withdraw invitation").click();
  assert.equal(byId("revoke-row").hidden, true);
  assert.equal(button(card, "Pause").hidden, true);
  server.answers[path] = () => 400;
  dialog.close("remove");
  const pending = server.answers[CLUSTER] = later();
  await settle();
  assert.equal(byId("devices-notice").textContent, "refused");
  pending.give(cluster([]));
  await settle();
  delete server.answers[path];
});

test("removed devices can be used again", async () => {
  devices.lookAway();
  await seen(cluster([], {removed: ["pi"]}));
  assert.equal(byId("removed-devices").hidden, false);
  const again = button(byId("removed-devices"), "Use again");
  await seen(cluster([], {removed: ["pi"]}));
  assert.equal(button(byId("removed-devices"), "Use again"), again, "it would lose the focus");
  server.requests.length = 0;
  button(byId("removed-devices"), "Use again").click();
  await settle();
  assert.deepEqual(posts(), [["POST", "v1/cluster/devices/pi", {paused: false}]]);
  await seen(cluster([]));
  assert.equal(byId("removed-devices").hidden, true);
});

test("a device is invited once, and the dialog waits until it has joined", async () => {
  const invite = () => byId("add-form").dispatch("submit");
  const path = "v1/cluster/invitations";
  await seen(cluster([], {cluster: {problem: "another machine owns it"}}));
  assert.equal(byId("add-invite").disabled, true);
  await seen(cluster([], {cluster: {problem: "This machine has no cluster yet."}}));
  assert.equal(byId("add-invite").disabled, false);
  byId("add-device").click();
  byId("add-name").value = " pi ";
  const answer = server.answers[path] = later();
  server.requests.length = 0;
  invite();
  await seen(cluster([]));
  assert.equal(byId("add-invite").disabled, true, "while the answer is on its way");
  const expires = Date.now() / 1e3 + 600;
  answer.give({name: "pi", command: "edge worker --join 1", expires});
  await settle();
  assert.deepEqual(posts(), [["POST", path, {name: "pi", browser: false, init: true}]]);
  assert.equal(byId("add-invite").disabled, false);
  assert.equal(byId("add-command").textContent, "edge worker --join 1");
  const until = new Date(1e3 * expires).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
  assert.ok(byId("add-note").textContent.includes(`until ${until}.`));
  assert.deepEqual([byId("add-form").hidden, byId("add-result").hidden, byId("address-row").hidden], [true, false, false]);
  await seen(cluster([device("pi", {state: "joining", invited: true})]));
  assert.match(byId("add-state").textContent, /Waiting for pi/);
  await seen(cluster([device("pi", {state: "joining", text: "it is checked"})]));
  assert.equal(byId("add-state").textContent, "pi: it is checked");
  byId("device-address").value = "10.0.0.1";
  server.requests.length = 0;
  byId("address-form").dispatch("submit");
  await settle();
  assert.deepEqual(posts(), [["POST", "v1/cluster/devices/pi", {address: "10.0.0.1"}]]);
  await seen(cluster([device("pi")]));
  assert.match(byId("add-state").textContent, /^It is ready/);
  assert.equal(byId("add-result-title").textContent, "pi has joined");
  assert.deepEqual([byId("address-row").hidden, byId("add-command-part").hidden], [true, true]);
  byId("add-dialog").close();
  byId("add-device").click();
  await seen(cluster([device("pi", {state: "lost"})]));
  assert.deepEqual([byId("add-form").hidden, byId("add-result").hidden, byId("add-state").textContent], [false, true, ""]);
  server.answers[path] = () => 400;
  server.requests.length = 0;
  invite();
  await settle();
  assert.equal(posts()[0][2].init, false);
  assert.equal(byId("add-error").textContent, "refused");
  assert.deepEqual([byId("add-invite").disabled, byId("add-form").hidden], [false, false]);
  server.answers[path] = () => ({name: "nas", command: "", expires: Date.now() / 1e3 - 1});
  invite();
  await settle();
  await seen(cluster([]));
  assert.match(byId("add-state").textContent, /has expired/);
  byId("add-dialog").close();
  devices.lookAway();
});

function drawn(list, {links = [], width = 1120, busy = false} = {}) {
  const picture = new DevicePicture(byId("picture"));
  byId("picture").parentElement.clientWidth = width;
  picture.show(list, links, [{slots: [{is_processing: busy}]}]);
  return picture;
}

const nodes = () => Object.fromEntries(byId("picture").querySelectorAll("g").filter(one =>
  one.getAttribute("class").startsWith("node")).map(one => [one.querySelector("title").textContent.split(":")[0],
  one.getAttribute("transform").match(/[\d.-]+/g).map(Number)]));

test("the picture has devices in the order of their stages, and others below them", () => {
  const [last, own, idle] = [device("last", {models: [part(4, 8, 1)]}),
    device("this device", {models: [part(0, 4, 0)]}), device("idle")];
  drawn([idle, last, own]);
  const places = nodes();
  assert.ok(places["this device"][0] < places.last[0]);
  assert.equal(places["this device"][1], places.last[1]);
  assert.ok(places.idle[1] > places.last[1]);
  for (const [n, width, hidden] of [[1, 1120, true], [2, 1120, false], [16, 1120, false], [17, 1120, true],
    [2, 560 + 32, false], [2, 559 + 32, true]]) {
    drawn(Array.from({length: n}, (_, i) => device(`pi${i}`)), {width});
    assert.equal(byId("picture").hasAttribute("hidden"), hidden, `${n} devices, ${width} points`);
  }
});

test("a device in the picture has its part of the model that most devices share", () => {
  const whole = {...part(0, 8), model: "other"};
  drawn([device("this device", {models: [whole, part(0, 0), part(0, 4)]}), device("pi", {models: [part(4, 8, 1)]})]);
  assert.match(byId("picture").textContent, /Layers 0-3/);
  assert.doesNotMatch(byId("picture").textContent, /All layers/);
});

test("the picture follows the texts of devices, and links flow only between devices that compute", () => {
  const at = (text, state = "computing") => [device("pi", {text, state, models: [part(0, 4)]}),
    device("nas", {state: "computing", models: [part(4, 8, 1)]}), device("idle", {state: "computing"})];
  const links = [["pi", "nas"], ["nas", "idle"], ["nas", "gone"]].map(([from, to]) => ({from, to}));
  const flows = () => byId("picture").querySelectorAll("g").map(one => one.getAttribute("class"))
    .filter(name => name.startsWith("wire"));
  const picture = drawn(at("before"), {links, busy: true});
  assert.deepEqual(flows(), ["wire flows", "wire"]);
  picture.show(at("after"), links, [{slots: [{is_processing: true}]}]);
  assert.equal(byId("picture").querySelector("title").textContent, "pi: after");
  picture.show(at("after"), [{...links[0], latency_s: 0.5}, ...links.slice(1)], [{slots: [{is_processing: true}]}]);
  assert.match(byId("picture").textContent, /500 ms/);
  picture.show(at("after"), links, [{slots: [{is_processing: false}]}]);
  assert.deepEqual(flows(), ["wire", "wire"]);
  picture.show(at("after", "ready"), links, [{slots: [{is_processing: true}]}]);
  assert.deepEqual(flows(), ["wire", "wire"]);
});

test("a model can be loaded again after any failure", async () => {
  const model = value => ({id: "tiny", status: {value}, meta: {size: 2048, n_params: 1.5e9, n_ctx: 512}});
  let value = "unloaded", statuses = [];
  server.answers["v1/models"] = () => ({data: [model(value), {...model(value), id: "adapter", parent: "tiny"}]});
  server.answers[CLUSTER] = () => ({models: statuses});
  models.start();
  models.look();
  await settle();
  const [card, ...others] = byId("here").children;
  assert.equal(others.length, 0);
  assert.match(card.textContent, /2 KiB . 1.5 billion parameters . context of 512 tokens/);
  const shown = () => [card.querySelector("span").textContent, named(card, "Load tiny").hidden,
    named(card, "Unload tiny").hidden, named(card, "Load tiny").disabled];
  assert.deepEqual(shown(), ["Not loaded", false, true, false]);
  const wrong = () => card.all().find(one => one.getAttribute("role") === "status").textContent;
  for (const failure of [() => 500, () => "<html>", () => { throw new TypeError("no network"); }]) {
    server.answers["v1/models/load"] = failure;
    named(card, "Load tiny").click();
    assert.deepEqual(shown(), ["Loading\u2026", false, true, true]);
    await settle();
    assert.deepEqual(shown(), ["Not loaded", false, true, false]);
    assert.notEqual(wrong(), "");
  }
  server.answers["v1/models/load"] = () => {
    value = "loaded";
    return {};
  };
  named(card, "Load tiny").focus();
  named(card, "Load tiny").click();
  await settle();
  assert.deepEqual(shown(), ["Loaded", true, false, false]);
  assert.equal(wrong(), "");
  assert.equal(document.activeElement, named(card, "Unload tiny"));
  statuses = [{model: {name: "tiny"}, devices: [{name: "pi", memory_bytes: 1024}, {name: "nas", left_s: 1}]}];
  timers.fire(EVERY_MS);
  await settle();
  assert.match(card.textContent, /Runs on pi\. It takes 1 KiB of memory\./);
  models.lookAway();
  assert.deepEqual([...timers.waiting.values()].map(timer => timer.ms), []);
});

test("a device of a running plan has its name even after it was lost", async () => {
  server.answers["v1/front"] = () => 404;
  front.setModels([], {models: [], devices: [{address: "10.0.0.9:1", name: "pixel"}]});
  const name = front.nameOf([], {stages: [{shards: [{device: "10.0.0.9:1"}]}]});
  assert.deepEqual(["10.0.0.9:1", "local", "10.0.0.8:1"].map(name), ["pixel", "this device", "10.0.0.8:1"]);
});

test("an old list of downloads does not replace the reason of a failure", async () => {
  const list = later();
  server.answers["v1/pulls"] = list;
  server.answers["v1/advice"] = () => ({state: "ready", rows: []});
  server.answers["v1/models"] = () => ({data: []});
  server.answers["api/pull"] = () => 500;
  models.look();
  await settle();
  byId("pull-name").value = "tiny";
  byId("pull-form").dispatch("submit");
  await settle();
  list.give({allowed: true, data: [{model: "tiny", completed: 0, total: 9}]});
  await settle();
  server.answers["v1/pulls"] = () => ({allowed: true, data: []});
  timers.fire(EVERY_MS);
  await settle();
  assert.match(byId("pulls").textContent, /refused/);
  models.lookAway();
});

test("plans of a model that is no longer shown do not replace those of another", async () => {
  const plans = name => ({points: [], devices: [{name}]});
  server.answers["v1/models"] = () => ({data: ["a", "b"].map(id =>
    ({id, status: {value: "unloaded"}, meta: {n_params: 2.5e6}}))});
  server.answers[CLUSTER] = () => ({models: []});
  const [first, second] = [later(), later()];
  server.answers["v1/front"] = first;
  models.look();
  await settle();
  assert.deepEqual(byId("here").children.map(card => card.querySelector("h3").textContent), ["a", "b"]);
  assert.match(byId("here").textContent, /2.5 million parameters/);
  byId("front-model").value = "b";
  server.answers["v1/front"] = second;
  byId("front-model").dispatch("change");
  await settle();
  second.give(plans("b"));
  await settle();
  byId("front-notice").textContent = "of b";
  first.give(500);
  await settle();
  assert.equal(byId("front-notice").textContent, "of b");
  const third = server.answers["v1/front"] = later();
  byId("front-model").value = "a";
  byId("front-model").dispatch("change");
  server.answers["v1/front"] = () => plans("b");
  byId("front-model").value = "b";
  byId("front-model").dispatch("change");
  await settle();
  byId("front-notice").textContent = "of b";
  third.give(plans("a"));
  await settle();
  assert.equal(byId("front-notice").textContent, "of b");
  models.lookAway();
});

test("a plan has one button, and this device alone is offered beside a single better plan", async () => {
  const plan = (...devices) => ({sizes: {layers: 2, heads: 1}, stages: devices.map((device, i) =>
    ({layers: [i, devices.length > 1 ? i + 1 : 2], shards: [{device, heads: [0, 1]}]}))});
  const [alone, both, other] = [["local"], ["local", "10.0.0.9:1"], ["10.0.0.9:1", "local"]].map(names => plan(...names));
  server.answers["v1/models"] = () => ({data: [{id: "c", status: {value: "unloaded"}, meta: {}}]});
  server.answers[CLUSTER] = () => ({models: []});
  server.answers["v1/plan"] = () => ({changes: []});
  models.look();
  await settle();
  const fronts = [
    [[[both, 1, 4, true, true], [alone, 2, 3, false, false]], ["The best plan", "This device alone"]],
    [[[alone, 1, 3, true, true], [both, 2, 4, false, true]], ["This device alone", "Most answers at once"]],
    [[[other, 1, 1, false, true], [both, 2, 4, true, true], [alone, 3, 5, false, true]],
      ["Best balance", "Fastest single answer", "This device alone"]],
    [[[alone, 1, 1, true, true]], []],
  ];
  for (const [points, texts] of fronts) {
    server.answers["v1/front"] = () => ({points: points.map(([plan, latency_s, throughput_per_s, knee, on_front]) =>
      ({plan, latency_s, throughput_per_s, knee, on_front}))});
    await front.load();
    await settle();
    const shown = byId("picks").hidden ? [] : byId("picks").children.map(child => child.textContent);
    assert.deepEqual(shown, texts);
    assert.equal(byId("plan").querySelectorAll(".changes").length, 0);  // nothing would change
  }
  models.lookAway();
});

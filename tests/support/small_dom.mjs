// As much of a browser as the views of the server's page need: elements, a clock, and a server.

class Node {
  parentElement = null;
  remove() {
    const others = this.parentElement?.children;
    if (others) others.splice(others.indexOf(this), 1);
    this.parentElement = null;
  }
}

class Text extends Node {
  constructor(text) { super(); this.textContent = text; }
}

class Element extends Node {
  children = [];
  dataset = {};
  style = {};
  attributes = new Map();
  listeners = new Map();
  hidden = false;
  checked = false;
  value = "";
  returnValue = "";
  clientWidth = 1000;

  constructor(tag) { super(); this.tag = tag; }
  get id() { return this.attributes.get("id"); }
  set id(value) { this.attributes.set("id", value); }
  get lastChild() { return this.children.at(-1); }
  get textContent() { return this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.replaceChildren(...(text === "" ? [] : [text])); }
  append(...children) {
    for (const child of children) {
      const node = child instanceof Node ? child : new Text(String(child));
      node.remove();
      node.parentElement = this;
      this.children.push(node);
    }
  }
  replaceChildren(...children) {
    for (const child of [...this.children]) child.remove();
    this.append(...children);
  }
  replaceWith() {}
  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  getAttribute(name) { return this.attributes.get(name) ?? null; }
  hasAttribute(name) { return this.attributes.has(name); }
  removeAttribute(name) { this.attributes.delete(name); }
  toggleAttribute(name, there) { if (there) this.attributes.set(name, ""); else this.attributes.delete(name); }
  all() { return this.children.flatMap(child => child instanceof Element ? [child, ...child.all()] : []); }
  querySelectorAll(tag) { return this.all().filter(element => element.tag === tag); }
  querySelector(tag) { return this.querySelectorAll(tag)[0] ?? null; }
  checkVisibility() { return !this.hidden; }
  addEventListener(type, act, {once = false} = {}) {
    const listeners = this.listeners.get(type) ?? [];
    this.listeners.set(type, [...listeners, {act, once}]);
  }
  dispatch(type) {
    const listeners = this.listeners.get(type) ?? [];
    this.listeners.set(type, listeners.filter(({once}) => !once));
    for (const {act} of listeners) act({type, preventDefault() {}});
    this[`on${type}`]?.();
  }
  click() { if (!this.disabled) this.dispatch("click"); }
  focus() { document.activeElement = this; }
  scrollIntoView() {}
  showModal() { this.open = true; }
  close(value) {
    this.open = false;
    if (value !== undefined) this.returnValue = value;
    this.dispatch("close");
  }
}

/** Timers that wait for a call of `fire`. */
export const timers = {
  waiting: new Map(),
  n: 0,
  ofLength(ms) { return [...this.waiting.values()].filter(timer => timer.ms === ms); },
  fire(ms) {
    for (const [id, timer] of [...this.waiting]) {
      if (timer.ms === ms) { this.waiting.delete(id); timer.act(); }
    }
  },
};

/** A server. `answers` has functions by path, which return a value, an HTTP status, or a promise of these, or throw. */
export const server = {
  answers: {},
  requests: [],  // [method, path, body]
  async answer(path, options) {
    const {method = "GET", body} = options;
    server.requests.push([method, path, body ? JSON.parse(body) : null]);
    const value = await (server.answers[path.split("?")[0]] ?? (() => ({})))();
    if (typeof value === "number") return new Response('{"error": {"message": "refused"}}', {status: value});
    return new Response(typeof value === "string" ? value : JSON.stringify(value));
  },
};

/** Let everything that waits for nothing else go on. */
export async function settle() {
  for (let i = 0; i < 20; i += 1) await new Promise(resolve => setImmediate(resolve));
}

const elements = new Map();

/** Return the element of the page with an identifier. */
export function byId(id) {
  if (!elements.has(id)) {
    const element = new Element("div");
    element.id = id;
    new Element("div").append(element);
    elements.set(id, element);
  }
  return elements.get(id);
}

const session = new Map();
Object.assign(globalThis, {
  Node,
  document: {
    activeElement: null, body: new Element("body"), getElementById: byId,
    createElement: tag => new Element(tag), createElementNS: (_, tag) => new Element(tag),
  },
  ResizeObserver: class { observe() {} },
  matchMedia: () => ({matches: false, addEventListener() {}}),
  sessionStorage: {getItem: key => session.get(key) ?? null, setItem: (key, value) => session.set(key, value)},
  fetch: server.answer,
  setTimeout(act, ms) { timers.waiting.set(++timers.n, {act, ms}); return timers.n; },
  clearTimeout(id) { timers.waiting.delete(id); },
});

// Markdown rendering: marked parses it, and DOMPurify removes tags, attributes and addresses that are not listed here.

import {Marked, Tokenizer} from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import {copyButton, make, plain} from "./dom.js";
import {Rest} from "./rest.js";

// The parsing time of marked is quadratic in these two, so they are limited.
const LONGEST = 5000;  // characters of a paragraph; a longer one is shown as plain text
const TOO_DEEP = /^[ \t]*(?:>[ \t]*|(?:[-*+]|\d{1,9}[.)])[ \t]+){50}/gm;  // nesting of quotes and lists
// The number of elements is limited, because a browser stands still while it arranges very many.
const MOST = 105000;  // characters that are rendered; more are shown as plain text on demand
const LINE = 25;  // characters that a line counts in addition, because it may become an element
const MOST_CELLS = 2000;  // of one table

const marked = new Marked({
  tokenizer: {
    // Disabling these two token types makes HTML in an answer appear as text.
    html() {},
    tag() {},
    paragraph(source) {
      const [text] = /^[^\n]*(?:\n[^\n]+)*/.exec(source);
      return text.length > LONGEST && {type: "paragraph", raw: text, text, tokens: [{type: "text", raw: text, text}]};
    },
    table(source) { return longTable(this, source); },
  },
  renderer: {
    // The first two heading levels are reserved for the page.
    heading({tokens, depth}) {
      const tag = `h${Math.min(6, depth + 2)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    // Links with other addresses than http(s) are shown as text.
    link(token) { return /^https?:\/\//i.test(token.href) ? false : this.text({text: token.raw}); },
    // A picture becomes a link, because the page loads nothing from other servers.
    image(token) { return this.link(token); },
    checkbox({raw}) { return raw; },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOWED_URI_REGEXP: /^https?:\/\//i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Render a text in an element. Frequent updates of a growing text are cheap: finished blocks are not parsed again, and
 * unchanged blocks keep their elements, so that selected text stays selected. */
export function show(element, text) {
  const source = plain(text).replace(/\r\n?/g, "\n");
  let state = element.shown;
  if (!state || !source.startsWith(state.finished)) {
    element.replaceChildren();
    state = element.shown = {finished: "", count: 0, blocks: []};
  }
  const end = renderedEnd(source);
  const tokens = lex(source.slice(state.finished.length, end)).map(token => ({token, blocks: blocksOf(token)}));
  const blocks = tokens.flatMap(one => one.blocks);
  const last = blocks.at(-1);
  if (end < source.length && last?.rest) last.rest += source.slice(end);
  else if (end < source.length) blocks.push({rest: source.slice(end)});
  blocks.forEach((block, i) => place(element, state, state.count + i, block));
  while (element.children.length > state.count + blocks.length) element.lastChild.remove();
  state.blocks.length = element.children.length;
  finish(state, tokens, source);
}

// Return the end of the part that is rendered.
function renderedEnd(source) {
  let end = 0;
  for (let cost = 0; end < source.length;) {
    const stop = source.indexOf("\n", end) + 1 || source.length;
    if (stop - end > 1) cost += stop - end + LINE;
    if (cost > MOST) return end || MOST;
    end = stop;
  }
  return end;
}

function lex(text) {
  // The zero-width space turns deeply nested lines into paragraphs.
  return marked.lexer(text.replace(TOO_DEEP, "\u200b$&"));
}

// All blocks but the last two cannot change any more when the text grows.
function finish(state, tokens, source) {
  const [solid] = tokens.filter(({token}) => token.type !== "space").slice(-2);
  const finished = tokens.slice(0, tokens.indexOf(solid));
  if (tokens.length < 3 || tokens.some(({token}) => token.type === "def")) return;
  const text = state.finished + finished.map(({token}) => token.raw).join("");
  if (!source.startsWith(text)) return;  // some characters were replaced before parsing
  state.finished = text;
  state.count += finished.flatMap(({blocks}) => blocks).length;
}

// Return the blocks of a token: HTML before sanitization, and text that is not rendered.
function blocksOf(token) {
  const html = marked.parser([token]);
  return [...(html ? [{html}] : []), ...(token.rest ? [{rest: token.rest}] : [])];
}

function place(element, state, i, block) {
  const former = state.blocks[i];
  state.blocks[i] = block;
  if (former && former.html === block.html && (block.html || former.view)) {
    block.view = former.view;
    block.view?.set(block.rest);
    return;
  }
  if (block.rest) block.view = new Rest(block.rest);
  const child = block.view?.element ?? safeElement(block.html);
  if (i < element.children.length) element.children[i].replaceWith(child);
  else element.append(child);
}

// Return a token of a table with its first rows if it has too many cells, or else false for the tokenizer's own way.
function longTable(tokenizer, source) {
  const [header, delimiter] = [source.indexOf("\n"), source.indexOf("\n", source.indexOf("\n") + 1)];
  if (header < 0 || delimiter < 0 || !/^[ \t|:-]*-[ \t|:-]*$/.test(source.slice(header + 1, delimiter))) return false;
  const columns = source.slice(header + 1, delimiter).split("|").length;
  let end = delimiter + 1;
  for (let cells = columns; cells <= MOST_CELLS; cells += columns) {
    const next = source.indexOf("\n", end);
    if (next <= end) return false;  // the table ends before it is too long
    end = next + 1;
  }
  const whole = /\n[ \t]*\n/.exec(source.slice(end - 1));
  const stop = whole ? end - 1 + whole.index + 1 : source.length;
  const cut = columns < MOST_CELLS ? Tokenizer.prototype.table.call(tokenizer, source.slice(0, end)) : null;
  if (columns < MOST_CELLS && !cut) return false;
  return {...(cut ?? {type: "space"}), raw: source.slice(0, stop), rest: source.slice(cut ? end : 0, stop)};
}

function safeElement(html) {
  const block = make("div", {}, globalThis.DOMPurify.sanitize(html, ALLOWED));
  for (const link of block.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of block.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre.firstElementChild));
  for (const table of block.querySelectorAll("table")) {
    const region = make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Table"});
    table.replaceWith(region);
    region.append(table);
  }
  return block.children.length === 1 ? block.firstElementChild : block;
}

function codeBlock(code) {
  const [language, text] = [code.className.replace("language-", ""), code.textContent.replace(/\n$/, "")];
  return make("div", {class: "code"},
    make("div", {class: "code-bar"}, make("span", {class: "quiet"}, language.slice(0, 40)),
      copyButton(() => text, "link")),
    make("pre", {tabindex: 0}, make("code", {}, text)));
}

// Markdown as elements. What a model writes becomes text and a few known elements, and never HTML.

import {copyButton, make} from "./dom.js";
import {inline} from "./markdown_inline.js";

const DEEPEST = 8;  // lists and quotes inside of each other; what is deeper stays text

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?![^ ])(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+(?=\S)|[ \t]*$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** Show a text in an element. Blocks that are as they were keep their elements, so a growing text can be shown often,
 * and what a person has selected stays selected. */
export function show(element, text) {
  const found = blocks(lines(text));
  const shown = element.shownBlocks || [];
  found.forEach((block, i) => {
    if (shown[i] === block.source) return;
    const made = block.make(0);
    if (i < element.children.length) element.children[i].replaceWith(made);
    else element.append(made);
  });
  while (element.children.length > found.length) element.lastChild.remove();
  element.shownBlocks = found.map(block => block.source);
}

function lines(text) { return text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"); }

// Each block: its source, and how its element is made at a depth.
function blocks(all) {
  const found = [];
  let at = 0;
  const take = (to, made) => {
    found.push({source: all.slice(at, to).join("\n"), make: made});
    at = to;
  };
  while (at < all.length) {
    const line = all[at];
    let match;
    if (!line.trim()) {
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      const [fence, language] = [match[1], match[2].trim()];
      const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
      let to = at + 1;
      while (to < all.length && !end.test(all[to])) to += 1;
      const code = all.slice(at + 1, to).join("\n");
      take(Math.min(to + 1, all.length), () => codeBlock(code, language));
    } else if ((match = HEADING.exec(line))) {
      // The page's own headings are of the first and second level.
      const [level, text] = [Math.min(6, match[1].length + 2), match[2].trim()];
      take(at + 1, () => make(`h${level}`, {}, inline(text)));
    } else if (RULE.test(line)) {
      take(at + 1, () => make("hr"));
    } else if (QUOTE.test(line)) {
      let to = at + 1;
      while (to < all.length && QUOTE.test(all[to])) to += 1;
      const inside = all.slice(at, to).map(one => one.replace(QUOTE, ""));
      take(to, depth => make("blockquote", {}, nested(inside, depth)));
    } else if (ITEM.test(line)) {
      const {to, build} = list(all, at);
      take(to, build);
    } else if (line.includes("|") && at + 1 < all.length && TABLE_RULE.test(all[at + 1]) &&
               cells(line).length === cells(all[at + 1]).length) {
      let to = at + 2;
      while (to < all.length && all[to].trim() && all[to].includes("|")) to += 1;
      const rows = all.slice(at, to);
      take(to, () => table(rows));
    } else {
      let to = at + 1;
      while (to < all.length && all[to].trim() && !interrupts(all, to)) to += 1;
      const text = all.slice(at, to).map(one => one.trimStart()).join("\n");
      take(to, () => make("p", {}, inline(text)));
    }
  }
  return found;
}

function interrupts(all, at) {
  const line = all[at], item = ITEM.exec(line);
  if (item) return line.trim() !== item[2] && (!/^\d/.test(item[2]) || /^1[.)]$/.test(item[2]));
  const head = line.includes("|") && at + 1 < all.length && TABLE_RULE.test(all[at + 1]);
  return head || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function nested(inside, depth) {
  if (depth + 1 >= DEEPEST) return [make("p", {}, inside.join("\n"))];
  return blocks(inside).map(block => block.make(depth + 1));
}

function list(all, from) {
  const kind = marker => /\d/.test(marker) ? marker.at(-1) : marker;
  const first = ITEM.exec(all[from]);
  const items = [];
  let at = from, loose = false;
  while (at < all.length) {
    const match = ITEM.exec(all[at]);
    if (!match || kind(match[2]) !== kind(first[2]) || RULE.test(all[at])) break;
    const width = all[at].length > match[0].length ? match[0].length : match[1].length + match[2].length + 1;
    const inside = [all[at].slice(match[0].length)];
    at += 1;
    while (at < all.length) {
      const line = all[at], indent = line.length - line.trimStart().length;
      if (!line.trim()) {
        // A blank line goes on with the item only where something of it, or another item, follows.
        let next = at;
        while (next < all.length && !all[next].trim()) next += 1;
        if (next === all.length) break;
        const deeper = all[next].length - all[next].trimStart().length >= Math.min(width, 4);
        if (!deeper && !ITEM.test(all[next])) break;
        if (!deeper) { loose = true; at = next; break; }
        loose ||= !ITEM.test(all[next].trimStart());
        while (at < next) inside.push(all[at++]);
      } else if (indent >= Math.min(width, 2) && indent > match[1].length) {
        inside.push(line.slice(Math.min(indent, width)));
        at += 1;
      } else if (!interrupts(all, at) && !ITEM.test(line) && inside.at(-1).trim()) {
        inside.push(line);  // a paragraph that goes on without being indented
        at += 1;
      } else {
        break;
      }
    }
    items.push(inside);
  }
  const ordered = /\d/.test(first[2]);
  const start = ordered ? parseInt(first[2], 10) : 1;
  const build = depth => make(ordered ? "ol" : "ul", {start: start === 1 ? null : start},
    items.map(inside => make("li", {}, itemParts(inside, depth, loose))));
  return {to: at, build};
}

// In a list without blank lines the text stands in the item itself, not in a paragraph of it.
function itemParts(inside, depth, loose) {
  const parts = nested(inside, depth);
  if (loose) return parts;
  return parts.flatMap(part => part.tagName === "P" ? [...part.childNodes] : [part]);
}

function codeBlock(code, language) {
  return make("div", {class: "code"},
    make("div", {class: "code-bar"}, make("span", {class: "quiet"}, language.slice(0, 40)),
      copyButton(() => code, "link")),
    make("pre", {tabindex: 0}, make("code", {}, code)));
}

function cells(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  const found = [""];
  let inCode = false;
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") { found[found.length - 1] += "|"; i += 1; continue; }
    if (text[i] === "`") inCode = !inCode;
    if (text[i] === "|" && !inCode) found.push("");
    else found[found.length - 1] += text[i];
  }
  if (found.length > 1 && !found.at(-1).trim()) found.pop();
  return found.map(cell => cell.trim());
}

function table(rows) {
  const sides = cells(rows[1]).map(rule =>
    rule.endsWith(":") ? (rule.startsWith(":") ? "middle" : "number") : null);
  const row = (line, tag) => {
    const found = cells(line);
    return make("tr", {}, sides.map((side, i) => make(tag, {class: side}, inline(found[i] || ""))));
  };
  return make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Table"}, make("table", {},
    make("thead", {}, row(rows[0], "th")), make("tbody", {}, rows.slice(2).map(line => row(line, "td")))));
}

// The text of one block of Markdown: code, emphasis, links. In time that grows with the text, whatever it is.

import {make} from "./dom.js";

const ESCAPED = /[!-/:-@[-`{-~]/;  // what a backslash takes the meaning from
const SPECIAL = /[\\`*_~[\]<h\n!]/g;
const BARE_LINK = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ADDRESS = /(?:[^\s()<>\\]|\\[!-/:-@[-`{-~]|\([^\s()<>]{0,500}\)){0,2000}/.source;
const TITLE = /(?:[ \n]+(?:"[^"]{0,500}"|'[^']{0,500}'))?/.source;
const TARGET = new RegExp(`\\([ ]*<?(${ADDRESS})>?${TITLE}[ ]*\\)`, "y");
const SPACE = /^[\s\u00a0]?$/, PUNCTUATION = /^[\p{P}\p{S}]$/u;

/** The nodes of a text. */
export function inline(text) {
  const nodes = [];       // strings, elements, and runs of * _ ~ that may begin or end an emphasis
  const brackets = [];    // of [ that may begin a link: {at: place in nodes, image}
  const ticks = codeEnds(text);
  let plain = "";
  const flush = () => { if (plain) nodes.push(plain); plain = ""; };
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const char = text[at];
    if (char === "\\") {
      if (text[at + 1] === "\n") { flush(); nodes.push(make("br")); at += 2; continue; }
      const escaped = at + 1 < text.length && ESCAPED.test(text[at + 1]);
      plain += escaped ? text[at + 1] : "\\";
      at += escaped ? 2 : 1;
    } else if (char === "\n") {
      if (plain.endsWith("  ")) { plain = plain.trimEnd(); flush(); nodes.push(make("br")); }
      else plain += "\n";
      at += 1;
    } else if (char === "`") {
      const length = runLength(text, at), end = ticks(length, at + length);
      if (end < 0) {
        plain += text.slice(at, at + length);
        at += length;
      } else {
        let code = text.slice(at + length, end).replaceAll("\n", " ");
        if (code.trim() && code.startsWith(" ") && code.endsWith(" ")) code = code.slice(1, -1);
        flush();
        nodes.push(make("code", {}, code));
        at = end + length;
      }
    } else if (char === "*" || char === "_" || char === "~") {
      flush();
      const length = runLength(text, at);
      nodes.push(run(text, at, length));
      at += length;
    } else if (char === "[" || (char === "!" && text[at + 1] === "[")) {
      flush();
      const image = char === "!";
      brackets.push({at: nodes.length, image});
      nodes.push(image ? "![" : "[");
      at += image ? 2 : 1;
    } else if (char === "]") {
      TARGET.lastIndex = at + 1;
      const target = TARGET.exec(text), open = brackets.pop();
      const address = target && safe(target[1].replace(/\\(.)/g, "$1"));
      if (open && address) {
        flush();
        const inside = nodes.splice(open.at).slice(1);
        nodes.push(link(address, emphasized(inside)));  // a picture too: nothing is loaded from elsewhere
        brackets.length = 0;  // no links in links
        at = TARGET.lastIndex;
      } else {
        plain += "]";
        at += 1;
      }
    } else {
      // A bare address, in <> or not; else only a letter.
      const wrapped = char === "<";
      BARE_LINK.lastIndex = at + (wrapped ? 1 : 0);
      const found = !/[\p{L}\p{N}]/u.test(wrapped ? "" : text[at - 1] || "") && BARE_LINK.exec(text);
      let said = found ? found[0] : "";
      if (!wrapped) said = withoutEnd(said);
      const address = said && (!wrapped || text[at + 1 + said.length] === ">") && safe(said);
      if (address) {
        flush();
        nodes.push(link(address, [said]));
        at += said.length + (wrapped ? 2 : 0);
      } else {
        plain += char;
        at += 1;
      }
    }
  }
  flush();
  return emphasized(nodes);
}

/** An address that a link may have: of the web, whole. null for all else (javascript:, data:, file: ...). */
function safe(address) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null;
  return address;
}

function link(address, children) {
  return make("a", {href: address, target: "_blank", rel: "noopener noreferrer nofollow"}, children);
}

// A bare address without the punctuation of the sentence around it.
function withoutEnd(address) {
  let end = address.length;
  const closed = () => address.slice(0, end).split("(").length >= address.slice(0, end).split(")").length;
  while (end && (/[.,:;!?*_~'\]]/.test(address[end - 1]) || (address[end - 1] === ")" && !closed()))) end -= 1;
  return address.slice(0, end);
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// Where a run of exactly so many backticks is, at or after a place; -1: nowhere.
function codeEnds(text) {
  const places = new Map();
  for (const match of text.matchAll(/`+/g)) {
    if (!places.has(match[0].length)) places.set(match[0].length, []);
    places.get(match[0].length).push(match.index);
  }
  return (length, from) => {
    const row = places.get(length) || [];
    row.passed ??= 0;
    while (row[row.passed] < from) row.passed += 1;
    return row[row.passed] ?? -1;
  };
}

// A run of * _ ~ and whether it can open and close, as CommonMark says.
function run(text, at, length) {
  const [before, after] = [text[at - 1] || "", text[at + length] || ""];
  const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
  const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
  const word = text[at] === "_";
  return {
    char: text[at], length, whole: length,
    opens: left && (!word || !right || PUNCTUATION.test(before)),
    closes: right && (!word || !left || PUNCTUATION.test(after)),
  };
}

// Runs become emphasis where they match (CommonMark's "process emphasis"), and text where they do not.
function emphasized(nodes) {
  const out = [];      // nodes and runs so far
  const open = [];     // places in `out` of runs that may still open
  const nothing = {};  // by kind of closer: how many of `open` were looked at in vain
  for (const node of nodes) {
    if (typeof node === "string" || node instanceof Node) { out.push(node); continue; }
    while (node.closes && node.length) {
      const kind = `${node.char}${node.opens}${node.whole % 3}`;
      const least = Math.min(nothing[kind] || 0, open.length);
      let i = open.length - 1;
      while (i >= least && !matches(out[open[i]], node)) i -= 1;
      if (i < least) { nothing[kind] = open.length; break; }
      const place = open[i], opener = out[place];
      const used = node.char === "~" ? node.length : Math.min(2, opener.length, node.length);
      const inside = out.splice(place + 1).map(asText);
      const tag = node.char === "~" ? "del" : used === 2 ? "strong" : "em";
      out.push(make(tag, {}, inside));
      opener.length -= used;
      node.length -= used;
      open.length = opener.length ? i + 1 : i;
      for (const name in nothing) nothing[name] = Math.min(nothing[name], open.length);
    }
    if (node.length) {
      if (node.opens) open.push(out.length);
      out.push(node);
    }
  }
  return out.map(asText);
}

function matches(opener, closer) {
  if (opener.char !== closer.char || !opener.length) return false;
  if (closer.char === "~") return opener.length === closer.length && closer.length <= 2;
  const either = opener.closes || closer.opens;
  return !(either && (opener.whole + closer.whole) % 3 === 0 && (opener.whole % 3 || closer.whole % 3));
}

function asText(node) {
  return typeof node === "string" || node instanceof Node ? node : node.char.repeat(node.length);
}

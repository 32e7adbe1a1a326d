// Markdown rendering: marked parses it, and DOMPurify removes tags, attributes and addresses that are not listed here.

import {Marked} from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import {copyButton, make} from "./dom.js";

// The parsing time of marked is quadratic in these two, so they are limited.
const LONGEST = 5000;  // characters of a paragraph; a longer one is shown as plain text
const TOO_DEEP = /^[ \t]*(?:>[ \t]*|(?:[-*+]|\d{1,9}[.)])[ \t]+){50}/gm;  // nesting of quotes and lists

const marked = new Marked({
  tokenizer: {
    // Disabling these two token types makes HTML in an answer appear as text.
    html() {},
    tag() {},
    paragraph(source) {
      const [text] = /^[^\n]*(?:\n[^\n]+)*/.exec(source);
      return text.length > LONGEST && {type: "paragraph", raw: text, text, tokens: [{type: "text", raw: text, text}]};
    },
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

/** Render a text in an element. Unchanged blocks keep their elements, so that frequent updates of a growing text are
 * cheap, and selected text stays selected. */
export function show(element, text) {
  const blocks = htmlBlocks(text);
  const shown = element.shownBlocks || [];
  blocks.forEach((html, i) => {
    if (shown[i] === html) return;
    const block = safeElement(html);
    if (i < element.children.length) element.children[i].replaceWith(block);
    else element.append(block);
  });
  while (element.children.length > blocks.length) element.lastChild.remove();
  element.shownBlocks = blocks;
}

// Return the HTML of each block of a text, before sanitization.
function htmlBlocks(text) {
  const shallow = text.replace(TOO_DEEP, "\u200b$&");  // the zero-width space turns deeply nested lines into paragraphs
  return marked.lexer(shallow).map(token => marked.parser([token])).filter(html => html);
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

// Text that is too long to be rendered: it is shown in pieces on demand, copied, or saved as a file.

import {button, copyButton, count, make} from "./dom.js";

const PIECE = 20000;  // characters

export class Rest {
  constructor(text) {
    this.shown = 0;  // characters
    this.about = make("span", {class: "quiet"});
    this.more = button("Show as text", "link", () => this.showMore());
    this.element = make("div", {class: "rest"},
      make("div", {class: "foot"}, this.about, this.more, copyButton(() => this.text, "link"),
        button("Save as a file", "link", () => this.save())));
    this.set(text);
  }

  /** Set the text, which may have grown. */
  set(text) {
    this.text = text;
    const left = text.length - this.shown;
    this.about.textContent = left ? `${count(left)} more characters` : "This was all.";
    this.more.hidden = !left;
  }

  showMore() {
    const end = this.text.indexOf("\n", this.shown + PIECE) + 1;
    const piece = this.text.slice(this.shown, end && end < this.shown + 2 * PIECE ? end : this.shown + PIECE);
    this.shown += piece.length;
    this.element.lastChild.before(make("pre", {tabindex: 0}, piece));
    this.more.textContent = "Show more";
    this.set(this.text);
  }

  save() {
    const url = URL.createObjectURL(new Blob([this.text], {type: "text/plain"}));
    make("a", {href: url, download: "answer.txt"}).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }
}

// Text files that go with a question: chosen or dropped, shown as a list, put before the question.

import {$, button, bytes, make, toQuestion} from "./dom.js";

const MOST_BYTES = 2 * 1024 * 1024;  // of one file; a context of a million tokens has about twice that

let files = [];  // {name, text} of the question that is being written

export function chosen() { return files; }

export function setFiles(value) {
  files = [...value];
  $("files").replaceChildren(...files.map((file, i) => make("li", {},
    make("span", {class: "name"}, file.name), make("span", {class: "quiet"}, bytes(new Blob([file.text]).size)),
    removeButton(file, i))));
}

function removeButton(file, i) {
  const element = button("Remove", "link", () => {
    setFiles(files.filter((_, other) => other !== i));
    toQuestion();
  });
  element.setAttribute("aria-label", `Remove ${file.name}`);
  return element;
}

/** Let people choose files and drop them anywhere on the conversation; `complain` is called with what cannot be taken. */
export function listen(complain) {
  $("choose-files").addEventListener("click", () => $("file-input").click());
  $("file-input").addEventListener("change", () => {
    add([...$("file-input").files], complain);
    $("file-input").value = "";
  });
  const holdsFiles = event => [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", event => {
    if (!holdsFiles(event)) return;
    event.preventDefault();  // else the browser opens the file in place of the page
    $("drop").hidden = $("chat").hidden;
  });
  addEventListener("dragleave", event => { if (!event.relatedTarget) $("drop").hidden = true; });
  addEventListener("drop", event => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    $("drop").hidden = true;
    if (!$("chat").hidden) add([...event.dataTransfer.files], complain);
  });
}

async function add(found, complain) {
  const refused = [], read = [];
  for (const file of found) {
    try {
      read.push({name: file.name, text: await textOf(file)});
    } catch (error) {
      refused.push(error.message);
    }
  }
  setFiles([...files, ...read]);
  complain(refused.join(" "));
  toQuestion();
}

async function textOf(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}; the most is ${bytes(MOST_BYTES)}.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch (error) {
    if (error.name === "TypeError") throw new Error(`${file.name} is no text in UTF-8.`);
    throw new Error(`${file.name} cannot be read.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text.`);
  return text;
}

/** A question as the model gets it: each file between fences that its text does not have, then the question. */
export function withFiles(message) {
  const parts = (message.files || []).map(({name, text}) => {
    let fence = "```";
    while (text.includes(fence)) fence += "`";
    return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}

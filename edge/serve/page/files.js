// Files that go with a question, texts, pictures and sounds: chosen, dropped or pasted, shown as a list.

import {$, button, bytes, make, toQuestion} from "./dom.js";

const MOST_BYTES = 2 * 1024 * 1024;  // of a text; a context of a million tokens has about twice that
const MOST_MEDIA_BYTES = 16 * 1024 * 1024;  // of a picture or sound; requests have up to 32 MiB

let files = [];  // {name, text} or {name, size, part} of the question that is being written

export function chosen() { return files; }

export function setFiles(value) {
  files = [...value];
  $("files").replaceChildren(...files.map((file, i) => make("li", {},
    make("span", {class: "name"}, file.name), make("span", {class: "quiet"}, bytes(sizeOf(file))),
    removeButton(file, i))));
}

/** Bytes of a file. */
export function sizeOf(file) { return file.size ?? new Blob([file.text]).size; }

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
  $("question").addEventListener("paste", event => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add([...event.clipboardData.files], complain);
  });
}

async function add(found, complain) {
  const refused = [], read = [];
  for (const file of found) {
    try {
      const isMedia = /^(image|audio)\//.test(file.type);
      read.push(isMedia ? await mediaOf(file) : {name: file.name, text: await textOf(file)});
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

// A picture or sound as a part of a message.
async function mediaOf(file) {
  if (file.size > MOST_MEDIA_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}; the most is ${bytes(MOST_MEDIA_BYTES)}.`);
  }
  const url = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  const part = file.type.startsWith("audio/")
    ? {type: "input_audio", input_audio: {data: url.slice(url.indexOf(",") + 1), format: file.type.slice(6)}}
    : {type: "image_url", image_url: {url}};
  return {name: file.name, size: file.size, part};
}

/** A question as the model gets it: pictures and sounds as parts, each text between fences that it does not have, then
 * the question. */
export function withFiles(message) {
  const media = (message.files || []).filter(file => file.part).map(file => file.part);
  const text = textWithFiles(message);
  return media.length ? [...media, {type: "text", text}] : text;
}

function textWithFiles(message) {
  const parts = (message.files || []).filter(file => !file.part).map(({name, text}) => {
    if (text === undefined) return `(${name} is no longer here)`;
    let fence = "```";
    while (text.includes(fence)) fence += "`";
    return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}

// Files of a question: texts, pictures and sounds that are chosen, dropped or pasted.

import {$, button, bytes, make, plain, toQuestion} from "./dom.js";
import {refusal} from "./picker.js";

const MOST_BYTES = 2 * 1024 * 1024;  // limit of a text file; a context of a million tokens has about twice that
const MOST_MEDIA_BYTES = 16 * 1024 * 1024;  // limit of a picture or sound; requests have up to 32 MiB
const THUMBNAIL_PX = 48;

let files = [];  // {name, text} or {name, size, part}, for the question in the composer

export function chosen() { return files; }

export function setFiles(value) {
  files = [...value];
  $("files").replaceChildren(...files.map((file, i) => make("li", {},
    thumbnail(file), make("span", {class: "name"}, file.name), make("span", {class: "quiet"}, bytes(sizeOf(file))),
    removeButton(file, i))));
}

/** Return a small picture of a file, or null if it is none. */
export function thumbnail(file) {
  const [, type, data] = /^data:(image\/[\w.+-]+);base64,(.*)$/s.exec(file.part?.image_url?.url ?? "") || [];
  if (!type) return null;
  const canvas = make("canvas", {class: "thumbnail", role: "img", "aria-label": file.name, width: 0, height: 0});
  const blob = new Blob([Uint8Array.from(atob(data), letter => letter.charCodeAt(0))], {type});
  createImageBitmap(blob, {resizeHeight: 2 * THUMBNAIL_PX}).then(picture => {
    canvas.width = Math.min(picture.width, 6 * THUMBNAIL_PX);
    canvas.height = picture.height;
    canvas.getContext("2d").drawImage(picture, 0, 0);
    picture.close();
  }, () => canvas.remove());  // the browser does not know this format
  return canvas;
}

/** Return the size of a file in bytes. */
export function sizeOf(file) { return file.size ?? new Blob([file.text]).size; }

function removeButton(file, i) {
  const element = button("Remove", "link", () => {
    setFiles(files.filter((_, other) => other !== i));
    toQuestion();
  });
  element.setAttribute("aria-label", plain(`Remove ${file.name}`));
  return element;
}

/** Accept chosen and dropped files. `complain` is called with an error message for unusable files. */
export function listen(complain) {
  $("choose-files").addEventListener("click", () => $("file-input").click());
  $("file-input").addEventListener("change", () => {
    add([...$("file-input").files], complain);
    $("file-input").value = "";
  });
  const holdsFiles = event => [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", event => {
    if (!holdsFiles(event)) return;
    event.preventDefault();  // otherwise the browser would open the file instead of the page
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
  const kinds = new Set(read.filter(file => file.part).map(file => file.part.image_url ? "image" : "audio"));
  refused.push(...[...kinds].map(refusal).filter(Boolean));
  setFiles([...files, ...read]);
  complain(refused.join(" "));
  toQuestion();
}

async function textOf(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}; at most ${bytes(MOST_BYTES)} are allowed.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch (error) {
    if (error.name === "TypeError") throw new Error(`${file.name} is not UTF-8 text.`);
    throw new Error(`${file.name} cannot be read.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  return text;
}

// Convert a picture or sound to a message part.
async function mediaOf(file) {
  if (file.size > MOST_MEDIA_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}; at most ${bytes(MOST_MEDIA_BYTES)} are allowed.`);
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

/** Return a question for the model: pictures and sounds as parts, texts between fences that do not occur in them,
 * and then the question. */
export function withFiles(message) {
  const media = (message.files || []).filter(file => file.part).map(file => file.part);
  const text = textWithFiles(message);
  return media.length ? [...media, {type: "text", text}] : text;
}

function textWithFiles(message) {
  const parts = (message.files || []).filter(file => !file.part).map(({name, text}) => {
    if (text === undefined) return `(${name} is no longer available)`;
    let fence = "```";
    while (text.includes(fence)) fence += "`";
    return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}

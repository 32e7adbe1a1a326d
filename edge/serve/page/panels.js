// The panels beside the conversation: columns on a wide screen, drawers on a narrow one.

import {$} from "./dom.js";

const narrow = matchMedia("(max-width: 60rem)");
const PANELS = ["history", "settings"];

/** Install the event handlers. */
export function start() {
  for (const id of PANELS) {
    $(`open-${id}`).addEventListener("click", () => {
      set(id, $(id).hidden);
      if (!$(id).hidden) $(id).querySelector("button, input").focus();
    });
    $(`close-${id}`).addEventListener("click", close);
  }
  $("shade").addEventListener("click", close);
  narrow.addEventListener("change", arrange);
  arrange();
}

/** Close the open drawer, or the settings. Return false if there was nothing to close. */
export function close() {
  const open = PANELS.find(id => !$(id).hidden && (narrow.matches || id === "settings"));
  if (!open) return false;
  set(open, false);
  $(`open-${open}`).focus();
  return true;
}

/** Close the conversations if they cover the chosen one. */
export function closeHistory() { if (narrow.matches) set("history", false); }

// The conversations are always in sight on a wide screen.
function arrange() {
  set("settings", false);
  set("history", !narrow.matches);
}

function set(panel, open) {
  if (open && narrow.matches) PANELS.forEach(id => { $(id).hidden = true; });
  $(panel).hidden = !open;
  for (const id of PANELS) $(`open-${id}`).setAttribute("aria-expanded", String(!$(id).hidden));
  const covers = narrow.matches && PANELS.some(id => !$(id).hidden);
  $("shade").hidden = !covers;
  $("talk").inert = $("top").inert = covers;  // neither clicks nor the focus go to something that is covered
}

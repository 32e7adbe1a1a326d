// The dialog that adds a device: a command for a computer, or a link with a QR code for a phone.

import {post} from "./api.js";
import {$, announce, copyButton, draw, plain} from "./dom.js";

let name = "";         // of the device that was invited in the open dialog
let needsCluster = false;
let problem = "";      // reason why no device can be added; "" if devices can be added
let inviting = false;
let expires = 0;       // Unix seconds, of the invitation

/** Install the event handlers. `poll`: polls the state of the devices. */
export function start(poll) {
  const dialog = $("add-dialog");
  $("add-device").addEventListener("click", () => open(dialog));
  $("add-cancel").addEventListener("click", () => dialog.close());
  $("add-done").addEventListener("click", () => dialog.close());
  $("copy-command").replaceWith(copyButton(() => $("add-command").textContent, "framed"));
  $("copy-link").replaceWith(copyButton(() => $("add-link").href, "framed"));
  $("add-form").addEventListener("submit", event => { event.preventDefault(); invite(poll); });
  $("address-form").addEventListener("submit", event => { event.preventDefault(); tellAddress(poll); });
}

/** Show the state of GET /v1/cluster: why no device can be added, and whether the invited device has joined. */
export function show({cluster = {}, devices = []}) {
  problem = cluster.problem || "";
  needsCluster = problem.includes("no cluster yet");
  $("add-problem").textContent = needsCluster ?
    "This machine becomes the owner of a new cluster, whose devices trust each other." : problem;
  allow();
  if (!$("add-dialog").open || !name) return;
  const device = devices.find(one => one.name === name);
  const joined = device && !["joining", "lost"].includes(device.state);
  const over = !joined && Date.now() > 1e3 * expires;
  const text = joined ? `It is ${device.state}. Find plans with it in the view Models.` :
    over ? "The invitation has expired. Close this and invite the device again." :
    device && !device.invited ? `${name}: ${device.text}` : `Waiting for ${name} to join\u2026`;
  if ($("add-state").textContent === plain(text)) return;
  $("add-state").textContent = plain(text);
  if (!joined && !over) return;
  announce(joined ? `${name} has joined. ${text}` : text);
  $("add-command-part").hidden = $("add-phone-part").hidden = $("add-note").hidden = $("address-row").hidden = true;
  if (joined) $("add-result-title").textContent = plain(`${name} has joined`);
}

function allow() {
  $("add-invite").disabled = inviting || (Boolean(problem) && !needsCluster);
  $("add-invite").textContent = inviting ? "Inviting\u2026" : "Invite";
}

function open(dialog) {
  name = "";
  $("add-form").hidden = false;
  $("add-result").hidden = true;
  $("add-note").hidden = false;
  $("add-error").textContent = $("add-state").textContent = "";
  $("add-name").value = $("add-command").textContent = "";
  $("device-address").value = $("address-error").textContent = "";
  $("address-row").open = false;
  dialog.showModal();
  $("add-name").focus();
}

async function invite(poll) {
  const browser = $("add-phone").checked;
  $("add-error").textContent = "";
  inviting = true;
  allow();
  try {
    const answer = await post("v1/cluster/invitations",
      {name: $("add-name").value.trim(), browser, init: needsCluster}, 90000);
    ({name, expires} = answer);
    $("add-form").hidden = true;
    $("add-result").hidden = false;
    $("add-command-part").hidden = browser;
    $("add-phone-part").hidden = !browser;
    $("address-row").hidden = browser;
    const until = new Date(1e3 * answer.expires).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
    if (browser) {
      $("add-link").href = $("add-link").textContent = answer.link;
      const isHere = ["127.0.0.1", "localhost", "[::1]"].includes(new URL(answer.link).hostname);
      $("add-scan").hidden = $("add-code").hidden = isHere;  // a camera could not open it
      const [size, lines] = [/ width="(\d+)"/, / d="([^"]*)"/].map(part => part.exec(answer.qr)?.[1] || "");
      $("add-code").replaceChildren(draw("svg", {viewBox: `0 0 ${size} ${size}`, role: "img",
        "aria-label": "QR code of the link"}, draw("path", {d: lines, stroke: "#000000"})));
      $("add-note").textContent = `The link works once, until ${until}. ${answer.note || ""}`;
    } else {
      $("add-command").textContent = answer.command;
      $("add-note").textContent = `The token works once, until ${until}. Send it where nobody else can read it.`;
    }
    $("add-result-title").textContent = plain(browser ? `Open this link on ${name}` : `Run this on ${name}`);
    $("add-result-title").focus();
    poll.ask();
  } catch (error) {
    $("add-error").textContent = error.message;
  }
  inviting = false;
  allow();
}

async function tellAddress(poll) {
  try {
    await post(`v1/cluster/devices/${encodeURIComponent(name)}`, {address: $("device-address").value.trim()});
    $("address-error").textContent = "";
    poll.ask();
  } catch (error) {
    $("address-error").textContent = error.message;
  }
}

"use strict";
const $ = (selector) => document.querySelector(selector);
const MOST_RESULTS = 100, MOST_TRIES = 5, MOST_NAMES = 5;
// A link can hold the token. It does not stay in the address, where others could read it.
let token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
if (token) history.replaceState(null, "", location.pathname);
let done = 0, failed = 0, chosen = 0, about = null;
const waiting = [];
let running = false;

function node(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function headers() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

// A proxy in front of the server has pages of its own for errors.
async function read(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text);
  } catch {
    const limit = answer.status === 413 ? "; its limit for uploads may be too small (nginx: client_max_body_size)" : "";
    throw new Error(`the answer, with status ${answer.status}, comes from a proxy and not from this server${limit}`);
  }
}

// What is served, and the token

async function describe() {
  const answer = await fetch("about", { headers: headers() });
  const content = await read(answer), isDenied = answer.status === 401;
  $("#access").hidden = !isDenied;
  $("#drop").hidden = !answer.ok;
  if (isDenied) {
    $("#denied").textContent = token ? "This token is wrong." : "";
    $("#token").focus();
    return;
  }
  if (!answer.ok) throw new Error(content.error);
  about = content;
  $("#about").textContent = `${about.model} · ${about.runtime} · ${about.precision} · ${about.size} px · ${about.classes} classes`;
  $("#explains").hidden = !about.explains;
  $("#top").max = about.classes;
  $("#top").value = Math.min($("#top").value, about.classes);
}

function report(error) {
  $("#status").textContent = `Cannot load the model's description: ${error.message}`;
}

$("#access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("#token").value.trim();
  $("#token").value = "";
  describe().catch(report);
});

// Images

function isImage(file) {
  return file.type.startsWith("image/") || !file.type;
}

function take(files) {
  const images = [...files].filter(isImage);
  const others = [...files].filter((file) => !isImage(file)).map((file) => file.name);
  const more = others.length > MOST_NAMES ? ` and ${others.length - MOST_NAMES} more` : "";
  $("#left").textContent = `Left out, not images: ${others.slice(0, MOST_NAMES).join(", ")}${more}`;
  $("#left").hidden = !others.length;
  if (!images.length || $("#drop").hidden) return;
  waiting.push(...images);
  chosen += images.length;
  if (!running) run();
}

async function run() {
  running = true;
  while (waiting.length) {
    $("#status").textContent = `Image ${done + 1} of ${chosen}`;
    const isClassified = await classify(waiting.shift());
    done += 1;
    if (!isClassified) failed += 1;
  }
  running = false;
  const failures = failed ? ` ${failed} failed: their cards say why.` : "";
  $("#status").textContent = `${done - failed} of ${chosen} classified.${failures}`;
}

async function classify(file) {
  let isClassified = false;
  const card = node("li", { className: "card result" }), pictures = node("div", { className: "pictures" });
  const details = node("div", {}, node("h2", { textContent: file.name || "image" }));
  card.append(pictures, details);
  const image = node("img", { alt: file.name || "image", src: URL.createObjectURL(file) });
  const isShown = new Promise((resolve) => {
    image.addEventListener("load", () => resolve(true));
    image.addEventListener("error", () => { image.remove(); resolve(false); });
  }).finally(() => URL.revokeObjectURL(image.src));
  pictures.append(image);
  try {
    const began = performance.now();
    const result = await send(file, await isShown ? 0 : 1);
    if (result.thumbnail) pictures.append(node("img", { alt: `${image.alt}, as the network sees it`, src: result.thumbnail }));
    show(result, details, pictures, performance.now() - began);
    isClassified = true;
  } catch (error) {
    details.append(node("p", { className: "bad", textContent: error.message }));
  }
  $("#results").prepend(card);
  $("#clear").hidden = false;
  while ($("#results").children.length > MOST_RESULTS) $("#results").lastChild.remove();
  return isClassified;
}

async function send(file, thumbnail) {
  const top = Math.max(1, Math.min(Number.parseInt($("#top").value, 10) || 5, about.classes));
  const explain = about.explains && $("#explain").checked ? 1 : 0;
  for (let number = 1; ; number += 1) {
    const answer = await fetch(`predict?top=${top}&explain=${explain}&thumbnail=${thumbnail}`, { method: "POST", body: file, headers: headers() });
    const result = await read(answer);
    if (answer.ok) return result;
    if (answer.status === 401) await describe();
    if (answer.status !== 429 || number === MOST_TRIES) throw new Error(result.error);
    await new Promise((resolve) => setTimeout(resolve, 1000 * Number(answer.headers.get("Retry-After") || 1)));
  }
}

function show(result, details, pictures, milliseconds) {
  if (result.explanation) {
    pictures.append(node("img", { alt: `Evidence for ${result.names[0]}`, src: result.explanation }));
  }
  if (result.unknown) {
    const least = (100 * about.unknown_below).toFixed(2);
    details.append(node("p", { className: "unknown", textContent: `Unknown: no class has ${least} % or more.` }));
  }
  const bars = node("ul", { className: "bars" });
  result.names.forEach((name, i) => {
    const percent = 100 * result.probabilities[i], fill = node("div", { className: "fill" });
    fill.style.width = `${percent}%`;
    const track = node("div", { className: "track" }, fill);
    track.setAttribute("aria-hidden", "true");
    bars.append(node("li", {},
      node("span", { className: "name", textContent: name }), track,
      node("span", { className: "value", textContent: `${percent.toFixed(2)} %` })));
  });
  const times = ["decode", "wait", "compute"].map((name) => `${name} ${result.ms[name].toFixed(1)}`).join(", ");
  details.append(bars, node("p", { className: "times faint", textContent: `${milliseconds.toFixed(0)} ms (server ${result.ms.total.toFixed(1)} ms: ${times})` }));
}

$("#files").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
$("#clear").addEventListener("click", () => {
  $("#results").replaceChildren();
  $("#clear").hidden = true;
  $("#status").textContent = "";
  $("#left").hidden = true;
  $("#files").focus();
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  take(event.dataTransfer.files);
});

// Colours

const themes = ["auto", "dark", "light"];
$("#theme").addEventListener("click", () => {
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
  document.documentElement.dataset.theme = theme;
  $("#theme").setAttribute("aria-label", `Colours: ${{ auto: "as in the system", dark: "dark", light: "light" }[theme]}`);
  $("#theme span").textContent = { auto: "◐", dark: "☾", light: "☀" }[theme];
});

describe().catch(report);

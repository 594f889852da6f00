"use strict";
// The script of the report page: draws the charts from the JSON in the page, and makes tables sortable. Nothing is loaded.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function draw(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function canvas(plot, height) {
  const width = Math.max(plot.clientWidth, 200);
  plot.replaceChildren();
  const svg = draw(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  return { svg, width };
}

// Numbers

function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function powers(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  if (last - first < 1) return [low, Math.sqrt(low * high), high];
  const every = Math.ceil((last - first + 1) / 6);
  return Array.from({ length: last - first + 1 }, (_, i) => 10 ** (first + i)).filter((_, i) => i % every === 0);
}

// A weighted mean of neighbours on both sides, so that the curve does not lag. Gaps stay gaps.
function smoothed(values, weight) {
  const pass = (list) => {
    let sum = 0, total = 0;
    return list.map((value) => {
      const before = [sum, total];
      sum = sum * weight + (value ?? 0);
      total = total * weight + (value === null ? 0 : 1);
      return before;
    });
  };
  const left = pass(values), right = pass([...values].reverse()).reverse();
  return values.map((value, i) => value === null ? null
    : (value + weight * (left[i][0] + right[i][0])) / (1 + weight * (left[i][1] + right[i][1])));
}

// The box next to the pointer

const tip = $("#tip");

function showTip(title, rows, x, y) {
  tip.replaceChildren(node("b", {}, title));
  for (const { run, text, value } of rows) {
    const name = node("span", run === undefined ? {} : { class: `run run-${run % 8}` });
    if (run !== undefined) name.append(node("i"));
    name.append(text);
    tip.append(node("div", {}, name, node("span", { class: "value" }, value)));
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(x + 16 + box.width > innerWidth - 8 ? x - box.width - 16 : x + 16, 8, Math.max(innerWidth - box.width - 8, 8))}px`;
  tip.style.top = `${clamp(y - box.height / 2, 8, Math.max(innerHeight - box.height - 8, 8))}px`;
}

const hideTip = () => { tip.hidden = true; };
const isMouse = (event) => event.pointerType === "mouse";  // when a finger is lifted, the box stays on the screen
document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) hideTip(); });
document.addEventListener("scroll", hideTip, { passive: true });


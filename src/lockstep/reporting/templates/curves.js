// Curves over steps: all charts share the range and the cursor

const shown = new Set(DATA.runs.map((_, i) => i));
const curves = DATA.charts.flatMap((chart) => chart.curves);
const whole = [Math.min(...curves.map((c) => c.steps[0]), Infinity), Math.max(...curves.map((c) => c.steps.at(-1)), 1)];
if (whole[0] < whole[1] / 20 || whole[0] === whole[1]) whole[0] = 0;
let range = [...whole];
let cursor = null;
const charts = [];
const MARGIN = { left: 46, right: 12, top: 8, bottom: 24 };
const KINDS = { validation: ["validation", 1], "moving average": ["average", 2] };
// The colour of a curve is that of its run; of a single run, that of its kind.
const colour = (curve) => `run-${(DATA.runs.length > 1 ? curve.run : KINDS[curve.kind]?.[1] ?? 0) % 8}`;
const LETTER = 7;  // at least the width of a digit in a tick's label
const SHAPES = [
  (x, y, r) => ["circle", { cx: x, cy: y, r }],
  (x, y, r) => ["rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8 }],
  (x, y, r) => ["path", { d: `M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}Z` }],
  (x, y, r) => ["path", { d: `M${x} ${y - r * 1.2}L${x + r * 1.2} ${y + r}L${x - r * 1.2} ${y + r}Z` }],
];

function setRange(low, high) {
  range = high - low < 1 ? range : [Math.max(low, whole[0]), Math.min(high, whole[1])];
  const zoomed = range[0] > whole[0] || range[1] < whole[1];
  $("#reset").hidden = !zoomed;
  charts.forEach((chart) => chart.redraw());
}

function setCursor(step, source) {
  cursor = step;
  charts.forEach((chart) => chart.point(chart === source));
  if (step === null) hideTip();
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

class Chart {
  constructor(figure) {
    this.spec = DATA.charts[Number(figure.dataset.chart)];
    this.plot = $(".plot", figure);
    this.log = this.spec.logarithmic;
    const button = $(".log", figure);
    button.addEventListener("click", () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", this.log);
      this.redraw();
    });
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  // The curves to draw. Each has values that are drawn strongly, and may have faint ones behind them.
  lines() {
    const weight = Number($("#smoothing").value);
    return this.spec.curves.filter((curve) => shown.has(curve.run)).map((curve) => {
      const noisy = curve.kind === "training" && ["loss", "accuracy", "throughput", "wait", "difference"].includes(this.spec.name.split("-")[0]);
      return { ...curve, strong: noisy && weight > 0 ? this.smoothed(curve.values, weight) : curve.values, noisy: noisy && weight > 0 };
    });
  }

  // On a logarithmic scale, average the logarithms: large values would hide small ones otherwise.
  smoothed(values, weight) {
    if (!this.log) return smoothed(values, weight);
    return smoothed(values.map((v) => (v > 0 ? Math.log(v) : null)), weight).map((v) => (v === null ? null : Math.exp(v)));
  }

  redraw() {
    const height = this.plot.closest(".wide") ? 270 : 210;
    const { svg, width } = canvas(this.plot, height);
    const inner = { x0: MARGIN.left, x1: width - MARGIN.right, y0: height - MARGIN.bottom, y1: MARGIN.top };
    Object.assign(this, { svg, inner, drawn: this.lines() });
    const usable = (value) => value !== null && (!this.log || value > 0);
    const values = this.drawn.flatMap((c) => (c.noisy ? [c.strong, c.values] : [c.strong])
      .flatMap((list, faint) => list.filter((v, i) => usable(v) && c.steps[i] >= range[0] && c.steps[i] <= range[1])
        .sort((a, b) => a - b).filter((_, i, all) => !faint || (i >= all.length * 0.01 && i <= all.length * 0.99))));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!values.length) [low, high] = this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      [low, high] = [low / 1.15, high * 1.15];
    } else {
      const margin = (high - low || Math.abs(high) || 1) * 0.06;
      const most = this.spec.unit === " %" && high <= 100 ? 100 : Infinity;
      [low, high] = [low >= 0 ? Math.max(low - margin, 0) : low - margin, Math.min(high + margin, most)];
    }
    const labels = (this.log ? powers(low, high) : ticks(low, high, 5)).map((value) => short(value).length);
    inner.x0 = Math.max(MARGIN.left, 12 + LETTER * Math.max(...labels));
    this.x = (step) => inner.x0 + ((step - range[0]) / (range[1] - range[0])) * (inner.x1 - inner.x0);
    const place = this.log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
    this.y = (value) => (usable(value) ? inner.y0 - place(value) * (inner.y0 - inner.y1) : null);
    this.axes(low, high);
    if (!values.length) draw(svg, "text", { x: (inner.x0 + inner.x1) / 2, y: height / 2, "text-anchor": "middle" },
      this.drawn.length ? this.spec.note : "No run is shown.");
    const clip = `clip-${this.spec.name}`;
    draw(draw(svg, "clipPath", { id: clip }), "rect", { x: inner.x0 - 5, y: 0, width: inner.x1 - inner.x0 + 10, height: inner.y0 + 4 });
    this.layer = draw(svg, "g", { "clip-path": `url(#${clip})` });
    this.drawn.filter((c) => c.noisy).forEach((c) => this.path(c, c.values, "raw"));
    this.drawn.forEach((c) => this.path(c, c.strong, KINDS[c.kind]?.[0] ?? "training"));
    this.drawn.filter((c) => c.kind !== "training").forEach((c) => this.marks(c));
    this.over = draw(svg, "g", {});
    this.point(false);
  }

  axes(low, high) {
    const { svg, inner } = this;
    for (const value of this.log ? powers(low, high) : ticks(low, high, 5)) {
      const y = this.y(value);
      draw(svg, "line", { class: "grid", x1: inner.x0, x2: inner.x1, y1: y, y2: y });
      draw(svg, "text", { x: inner.x0 - 7, y: y + 4, "text-anchor": "end" }, short(value));
    }
    for (const step of ticks(range[0], range[1], Math.max(Math.floor((inner.x1 - inner.x0) / 80), 2))) {
      if (step !== Math.round(step)) continue;
      const x = this.x(step);
      draw(svg, "line", { class: "axis", x1: x, x2: x, y1: inner.y0, y2: inner.y0 + 4 });
      const text = step.toLocaleString("en"), half = (LETTER * text.length) / 2;
      draw(svg, "text", { x: clamp(x, half, inner.x1 + MARGIN.right - half), y: inner.y0 + 17, "text-anchor": "middle" }, text);
    }
    draw(svg, "line", { class: "axis", x1: inner.x0, x2: inner.x1, y1: inner.y0, y2: inner.y0 });
  }

  path(curve, values, kind) {
    let d = "", pen = false;
    const first = Math.max(nearest(curve.steps, range[0]) - 1, 0), last = Math.min(nearest(curve.steps, range[1]) + 1, values.length - 1);
    for (let i = first; i <= last; i++) {
      const y = this.y(values[i]);
      if (y === null) { pen = false; continue; }
      d += `${pen ? "L" : "M"}${this.x(curve.steps[i]).toFixed(1)} ${y.toFixed(1)}`;
      // A line needs two points: a point without neighbours gets a mark.
      const alone = !pen && (i + 1 >= values.length || this.y(values[i + 1]) === null);
      if (alone && curve.kind === "training") draw(this.layer, ...this.mark(curve, this.x(curve.steps[i]), y, 3.2, "mark"));
      pen = true;
    }
    if (d) draw(this.layer, "path", { class: `curve ${kind} ${colour(curve)}`, d });
  }

  marks(curve) {
    if (curve.steps.length > 60) return;
    curve.steps.forEach((step, i) => {
      const y = this.y(curve.values[i]);
      if (y !== null) draw(this.layer, ...this.mark(curve, this.x(step), y, 3.2, "mark"));
    });
  }

  mark(curve, x, y, size, kind) {
    const [name, attributes] = SHAPES[curve.run % SHAPES.length](x, y, size);
    return [name, { ...attributes, class: `${kind} ${colour(curve)}` }];
  }

  // Draw the cursor's line and the points on it. The chart under the pointer shows the values.
  point(speaks) {
    this.over.replaceChildren();
    if (cursor === null || cursor < range[0] || cursor > range[1]) return;
    const x = this.x(cursor);
    draw(this.over, "line", { class: "cross", x1: x, x2: x, y1: this.inner.y1, y2: this.inner.y0 });
    const rows = [];
    for (const curve of this.drawn) {
      const at = nearest(curve.steps, cursor), y = this.y(curve.strong[at]);
      const far = Math.abs(curve.steps[at] - cursor);
      const spacing = curve.steps.length > 1 ? (curve.steps.at(-1) - curve.steps[0]) / (curve.steps.length - 1) : Infinity;
      if (y === null || far > Math.max(spacing, 1) || curve.steps[at] < range[0] || curve.steps[at] > range[1]) continue;
      draw(this.over, ...this.mark(curve, this.x(curve.steps[at]), y, 4, "dot"));
      const name = `${DATA.runs[curve.run].name}${curve.kind === "training" ? "" : ` ${curve.kind}, step ${curve.steps[at]}`}`;
      rows.push({ run: curve.run, text: name, value: `${short(curve.values[at])}${this.spec.unit}` });
    }
    if (!speaks) return;
    // Runs with different numbers of steps per epoch are in different epochs at one step. Then no epoch is shown.
    const drawn = DATA.runs.filter((run, i) => run.steps && shown.has(i));
    const epochs = new Set(drawn.map((run) => ((cursor * run.epochs) / run.steps).toFixed(2)));
    const epoch = epochs.size === 1 ? ` · epoch ${[...epochs][0]}` : "";
    const box = this.svg.getBoundingClientRect();
    showTip(`step ${cursor.toLocaleString("en")}${epoch}`, rows, box.left + x, box.top + box.height / 2);
  }

  stepAt(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const share = clamp((x - this.inner.x0) / (this.inner.x1 - this.inner.x0), 0, 1);
    return Math.round(range[0] + share * (range[1] - range[0]));
  }

  listen() {
    const { plot } = this;
    let from = null;
    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        from = this.stepAt(event);
        plot.setPointerCapture(event.pointerId);
      } else {
        setCursor(this.stepAt(event), this);
      }
    });
    plot.addEventListener("pointercancel", () => { from = null; });
    plot.addEventListener("pointermove", (event) => {
      const step = this.stepAt(event);
      setCursor(step, this);
      if (from === null) return;
      const [a, b] = [this.x(Math.min(from, step)), this.x(Math.max(from, step))];
      draw(this.over, "rect", { class: "select", x: a, width: b - a, y: this.inner.y1, height: this.inner.y0 - this.inner.y1 });
    });
    plot.addEventListener("pointerup", (event) => {
      const to = this.stepAt(event);
      if (from !== null && Math.abs(this.x(to) - this.x(from)) > 6) setRange(Math.min(from, to), Math.max(from, to));
      from = null;
    });
    plot.addEventListener("pointerleave", (event) => { if (isMouse(event)) setCursor(null); });
    plot.addEventListener("blur", () => setCursor(null));
    plot.addEventListener("dblclick", () => setRange(...whole));
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const width = range[1] - range[0], middle = cursor ?? Math.round((range[0] + range[1]) / 2);
    const stride = Math.max(Math.round((width / 50) * (event.shiftKey ? 5 : 1)), 1);
    const zoom = (factor) => setRange(middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor);
    const actions = {
      ArrowLeft: () => setCursor(clamp(middle - stride, ...range), this),
      ArrowRight: () => setCursor(clamp(middle + stride, ...range), this),
      Home: () => setCursor(Math.ceil(range[0]), this),
      End: () => setCursor(Math.floor(range[1]), this),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      Escape: () => setRange(...whole),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}


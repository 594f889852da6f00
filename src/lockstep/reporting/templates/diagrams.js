// Diagrams of cells: the pointer or the arrow keys choose a cell, and its text is shown

class Cells {
  constructor(plot, paint, columns) {
    Object.assign(this, { plot, paint, columns, at: null, boxes: [] });
    plot.addEventListener("pointermove", (event) => this.hover(event));
    plot.addEventListener("pointerdown", (event) => this.hover(event));
    plot.addEventListener("pointerleave", (event) => { if (isMouse(event)) this.choose(null); });
    plot.addEventListener("blur", () => this.choose(null));
    plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.redraw()).observe(plot);
  }

  redraw() {
    this.boxes = this.paint(this.plot);  // for every cell: x, y, width, height, title, rows
    this.svg = $("svg", this.plot);
    this.at = null;
  }

  hover(event) {
    if (!this.svg) return;  // this view has no results of single images
    const { left, top } = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const found = this.boxes.findIndex((b) => x >= b.x && x < b.x + b.width && y >= b.y && y < b.y + b.height);
    this.choose(found < 0 ? null : found);
  }

  key(event) {
    const columns = this.columns();
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!by || !this.boxes.length) return;
    event.preventDefault();
    this.choose(this.at === null ? 0 : clamp(this.at + by, 0, this.boxes.length - 1));
  }

  choose(at) {
    this.at = at;
    if (!this.svg) return;
    $(".cursor", this.svg)?.remove();
    if (at === null) { hideTip(); return; }
    const { x, y, width, height, title, rows } = this.boxes[at];
    draw(this.svg, "rect", { class: "cursor", x, y, width, height });
    const { left, top } = this.svg.getBoundingClientRect();
    showTip(title, rows, left + x + width, top + y + height / 2);
  }
}

let view = DATA.views[0];
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function paintMatrix(plot) {
  const { matrix } = view;
  if (!matrix) { noResults(plot); return []; }
  const count = matrix.names.length, single = matrix.group_classes === 1 && count <= 25;
  const letters = single ? Math.min(Math.max(...matrix.names.map((name) => name.length)), 14) : 0;
  const label = single ? letters * 7 + 12 : 22;
  const room = Math.min(Math.max(plot.clientWidth, 200), 620) - label;
  const slanted = (room - 4) / count <= letters * 6.4, size = room - (slanted ? 40 : 4), cell = size / count;
  const above = single ? Math.min(label, 70) : 22;
  const { svg } = canvas(plot, size + above + 4);
  const largest = Math.max(...matrix.cells.flatMap((row, i) => row.map((n, j) => (i === j ? matrix.wrong_inside[i] : n))), 1);
  const boxes = [];
  draw(svg, "rect", { x: label, y: above, width: size, height: size, fill: "var(--grid)", opacity: 0.5 });
  matrix.cells.forEach((row, i) => row.forEach((images, j) => {
    const own = i === j, wrong = own ? matrix.wrong_inside[i] : images;
    const right = own ? images - wrong : 0, of = matrix.images[i] || 1;
    const box = { x: label + j * cell, y: above + i * cell, width: cell, height: cell };
    const gap = single ? 1 : 0;
    const colour = single ? (own ? right / of : wrong && 0.1 + 0.9 * Math.sqrt(wrong / of))
      : wrong && 0.12 + 0.88 * (Math.log1p(wrong) / Math.log1p(largest));
    if (colour) draw(svg, "rect", { x: box.x + gap, y: box.y + gap, width: cell - 2 * gap, height: cell - 2 * gap, rx: single ? 3 : 0, class: single && own ? "cell right" : "cell", "fill-opacity": (single && own ? 0.12 + 0.78 * colour : 0.9 * colour).toFixed(3) });
    if (single && images) draw(svg, "text", { x: box.x + cell / 2, y: box.y + cell / 2 + 4, class: colour > 0.6 ? "count inverse" : "count" }, images);
    const text = [{ text: "images", value: `${images} of ${matrix.images[i]}` }, { text: "share", value: matrix.images[i] ? percent(images / of) : "–" }];
    if (own && !single) text.push({ text: "right", value: right }, { text: "wrong in the group", value: wrong });
    boxes.push({ ...box, title: own ? matrix.names[i] : `${matrix.names[i]} → ${matrix.names[j]}`, rows: text });
  }));
  if (single) {
    matrix.names.forEach((name, i) => {
      draw(svg, "text", { x: label - 6, y: above + (i + 0.5) * cell + 4, "text-anchor": "end" }, cut(name, 14));
      const x = label + (i + 0.5) * cell + 4, y = above - 6;
      draw(svg, "text", !slanted ? { x: x - 4, y, "text-anchor": "middle" } : { x, y, transform: `rotate(-50 ${x} ${y})` }, cut(name, 12));
    });
  } else {
    draw(svg, "text", { x: label + size / 2, y: 14, "text-anchor": "middle" }, "predicted class →");
    draw(svg, "text", { x: 12, y: above + size / 2, transform: `rotate(-90 12 ${above + size / 2})`, "text-anchor": "middle" }, "← class");
    draw(svg, "line", { class: "ideal", x1: label, y1: above, x2: label + size, y2: above + size });
  }
  $("#matrix-note").textContent = single ? "rows: class, columns: predicted class" : matrix.group_classes > 1
    ? `only mistakes; each cell is ${matrix.group_classes} × ${matrix.group_classes} classes` : "only mistakes";
  return boxes;
}

function noResults(plot) {
  plot.textContent = "The run kept no results of single images.";
}

const QUARTERS = [0, 0.25, 0.5, 0.75, 1];

function confidenceAxes(svg, box, values, most, label) {
  for (const value of values) {
    const y = box.y0 - (value / most) * (box.y0 - box.y1);
    draw(svg, "line", { class: "grid", x1: box.x0, x2: box.x1, y1: y, y2: y });
    draw(svg, "text", { x: box.x0 - 7, y: y + 4, "text-anchor": "end" }, label(value));
  }
  for (const share of QUARTERS) {
    const x = box.x0 + share * (box.x1 - box.x0);
    draw(svg, "text", { x: clamp(x, box.x0, box.x1 - 10), y: box.y0 + 17, "text-anchor": "middle" }, `${100 * share}%`);
  }
  draw(svg, "text", { x: (box.x0 + box.x1) / 2, y: box.y0 + 32, "text-anchor": "middle" }, "confidence");
}

function binBoxes(bins, box) {
  const width = (box.x1 - box.x0) / bins.length;
  return bins.map((bin, i) => ({
    x: box.x0 + i * width, y: box.y1, width, height: box.y0 - box.y1,
    title: `confidence ${percent(bin.low, 0)} to ${percent(bin.high, 0)}`,
    rows: [
      { text: "images", value: bin.images },
      ...(bin.images ? [
        { text: "right", value: `${bin.right} (${percent(bin.right / bin.images)})` },
        { text: "mean confidence", value: percent(bin.confidence) },
      ] : []),
    ],
  }));
}

function paintReliability(plot) {
  if (!view.bins.length) { noResults(plot); return []; }
  const { svg, width } = canvas(plot, 320), box = { x0: 44, x1: width - 10, y0: 280, y1: 8 };
  const up = (share) => box.y0 - share * (box.y0 - box.y1);
  confidenceAxes(svg, box, QUARTERS, 1, (share) => `${100 * share}%`);
  const boxes = binBoxes(view.bins, box);
  view.bins.forEach((bin, i) => {
    if (!bin.images) return;
    const { x, width: w } = boxes[i], accuracy = bin.right / bin.images;
    draw(svg, "rect", { class: "hit", x: x + 1, width: w - 2, y: up(accuracy), height: Math.max(box.y0 - up(accuracy), 1), rx: 2, opacity: 0.8 });
    draw(svg, "rect", { class: "gap", x: x + 1, width: w - 2, y: up(Math.max(accuracy, bin.confidence)), height: Math.abs(up(accuracy) - up(bin.confidence)) });
  });
  draw(svg, "line", { class: "ideal", x1: box.x0, y1: up(0), x2: box.x1, y2: up(1) });
  return boxes;
}

function paintConfidences(plot) {
  if (!view.bins.length) { noResults(plot); return []; }
  const { svg, width } = canvas(plot, 320), box = { x0: 44, x1: width - 10, y0: 280, y1: 8 };
  const most = Math.max(...view.bins.map((bin) => bin.images), 1);
  confidenceAxes(svg, box, ticks(0, most, 4).filter(Number.isInteger), most, short);
  const boxes = binBoxes(view.bins, box), up = (images) => (images / most) * (box.y0 - box.y1);
  view.bins.forEach((bin, i) => {
    const { x, width: w } = boxes[i], wrong = bin.images - bin.right;
    draw(svg, "rect", { class: "ok", x: x + 1, width: w - 2, y: box.y0 - up(bin.right), height: up(bin.right), rx: 2, opacity: 0.8 });
    draw(svg, "rect", { class: "miss", x: x + 1, width: w - 2, y: box.y0 - up(bin.images), height: up(wrong), rx: 2, opacity: 0.85 });
  });
  return boxes;
}

function noteCalibration() {
  const total = view.bins.reduce((sum, bin) => sum + bin.images, 0);
  if (!total) { $("#calibration-note").textContent = ""; return; }
  const mean = (of) => view.bins.reduce((sum, bin) => sum + of(bin), 0) / total;
  const error = mean((bin) => Math.abs(bin.right - bin.confidence * bin.images));
  const over = mean((bin) => bin.confidence * bin.images - bin.right);
  $("#calibration-note").textContent = `Expected calibration error ${percent(error, 2)} in ${view.bins.length} bins of equal width. On average, confidence is ${percent(Math.abs(over), 2)} ${over > 0 ? "above" : "below"} accuracy. Bars: accuracy; shaded: the distance from accuracy to mean confidence.`;
}


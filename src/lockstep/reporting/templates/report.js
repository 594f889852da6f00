// Tables

function fillClasses() {
  const fifth = (text) => Object.assign(node("td", { class: "n" }, text), { hidden: !view.top5 });
  $("#per-class-top5").hidden = !view.top5;
  const rows = view.classes.map(([name, images, top1, top5, predicted, low, high, other]) => {
    const share = (hits, total = images) => (total ? ((100 * hits) / total).toFixed(2) : "–");
    const few = images > 0 && images < view.few;
    const row = node("tr");
    row.append(
      node("th", { scope: "row" }, name), node("td", few ? { class: "n few", title: "few images: rough figures" } : { class: "n" }, images), node("td", { class: "n strong" }, share(top1)),
      node("td", { class: "n" }, share(top1, predicted)),
      fifth(share(top5)), node("td", { class: "interval" }, images ? `${(100 * low).toFixed(1)} – ${(100 * high).toFixed(1)}` : "–"), node("td", { class: "faint" }, other));
    return row;
  });
  $("#per-class tbody").replaceChildren(...rows);
  const sorted = $("#per-class th[aria-sort]");
  if (sorted) sort(sorted, sorted.ariaSort);
  filterClasses();
}

function filterClasses() {
  const wanted = $("#filter").value.toLowerCase(), rows = $$("#per-class tbody tr");
  rows.forEach((row) => { row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted); });
  $("#filtered").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} classes`;
}

function sort(header, direction) {
  const table = header.closest("table"), at = header.cellIndex, numbers = header.classList.contains("n");
  const value = (row) => {
    const { dataset, textContent } = row.cells[at];
    if (!numbers) return textContent.trim().toLowerCase();
    const number = Number.parseFloat(dataset.value ?? textContent.replace(/[\s\u202f]/g, ""));
    return Number.isNaN(number) ? -Infinity : number;
  };
  const sign = direction === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
  rows.sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0));
  $$("th[aria-sort]", table).forEach((each) => each.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", direction);
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const header of $$("table.sortable thead th:not([data-fixed])")) {
  const button = node("button", { type: "button" }, ...header.childNodes);
  header.replaceChildren(button);
  button.addEventListener("click", () => {
    const first = header.classList.contains("n") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    sort(header, header.getAttribute("aria-sort") === first ? other : first);
  });
}

// Controls

function press(buttons, chosen) {
  buttons.forEach((button) => button.setAttribute("aria-pressed", button === chosen));
}

const themes = ["auto", "dark", "light"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const words = { auto: "as in the system", dark: "dark", light: "light" };
  $("#theme").setAttribute("aria-label", `Colours: ${words[theme]}`);
  $("#theme span").textContent = { auto: "◐", dark: "☾", light: "☀" }[theme];
}
setTheme("auto");
$("#theme").addEventListener("click", () => setTheme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % 3]));

if (DATA.charts.length) {
  $$("figure.chart").forEach((figure) => charts.push(new Chart(figure)));
  $("#smoothing").addEventListener("input", () => charts.forEach((chart) => chart.redraw()));
  $("#reset").addEventListener("click", () => setRange(...whole));
  for (const button of $$("#legend button")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!shown.delete(run)) shown.add(run);
      button.setAttribute("aria-pressed", shown.has(run));
      charts.forEach((chart) => chart.redraw());
    });
  }
}

if (view) {
  const diagrams = [
    new Cells($("#matrix"), paintMatrix, () => view.matrix?.names.length ?? 1),
    new Cells($("#reliability"), paintReliability, () => 1),
    new Cells($("#confidences"), paintConfidences, () => 1),
  ];
  const show = () => {
    fillClasses();
    noteCalibration();
    diagrams.forEach((diagram) => diagram.redraw());
  };
  const buttons = $$(".picker button");
  buttons.forEach((button) => button.addEventListener("click", () => {
    view = DATA.views[Number(button.dataset.view)];
    press(buttons, button);
    $$("[data-of-view]").forEach((block) => { block.hidden = block.dataset.ofView !== button.dataset.view; });
    show();
  }));
  $("#filter").addEventListener("input", filterClasses);
  for (const image of $$("img[data-image]")) {
    const address = DATA.images[image.dataset.image];
    if (address) { image.src = address; image.hidden = false; }
  }
  show();
}

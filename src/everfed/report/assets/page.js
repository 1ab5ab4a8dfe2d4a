// Draws the report from the data in the page. Every name comes as data and is set as text: nothing
// here makes markup out of strings.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
// Okabe and Ito's colours, as in the figures; black is for light paper only
const COLOURS = ["#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C"];
const VIRIDIS = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"];
const DASHES = ["solid", "dashed", "dotted"];
const hidden = new Set(); // methods that are switched off
const charts = []; // {box, build, chart}
const $ = (what, root = document) => root.querySelector(what);
const narrow = () => window.innerWidth < 640;

// small things --------------------------------------------------------------------------------
function make(tag, { text, kids = [], ...more } = {}) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(more)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  node.append(...kids);
  return node;
}

const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = () => document.documentElement.classList.contains("dark");
const dash = (method) => DASHES[Math.floor(method / COLOURS.length) % DASHES.length];

function colour(method) {
  const own = COLOURS[method % COLOURS.length];
  return own === "#000000" && dark() ? "#ffffff" : own;
}

function number(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(2).replace(".00e", "e") : String(+value.toPrecision(4));
  return unit ? `${text} ${unit}` : text;
}

function plusMinus(mean, std, unit) {
  const text = (value) => (unit === "%" ? value.toFixed(1) : number(value));
  if (mean === null) return "–";
  return text(mean) + (std === null ? "" : ` ± ${text(std)}`) + (unit ? ` ${unit}` : "");
}

/** A tooltip: a head and rows of [colour, name, value]. */
function tip(head, rows) {
  const lines = rows.map(([hue, name, value]) => {
    const mark = make("i");
    mark.style.background = hue;
    return make("div", { kids: [mark, make("span", { text: name }), make("b", { text: value })] });
  });
  return make("div", { class: "tip", kids: [make("strong", { text: head }), ...lines] });
}

function taskName(j) {
  return page.tasks[j] ? `Task ${j + 1}: ${page.tasks[j]}` : `Task ${j + 1}`;
}

// charts --------------------------------------------------------------------------------------
/** A figure with a caption; `build(width)` gives what ECharts draws. Methods are series m0, m1... */
function figure(parent, title, what, height, build, method) {
  const plot = make("div", { class: "plot", role: "img", "aria-label": what ? `${title}: ${what}` : title });
  plot.style.height = `${height}px`;
  const caption = make("figcaption", { kids: [make("span", { text: title, title }), ...(what ? [make("small", { text: what })] : [])] });
  const box = make("figure", { kids: [caption, plot] });
  if (method !== undefined) box.dataset.method = method;
  parent.append(box);
  charts.push({ box, plot, build, chart: null });
  return plot;
}

function draw(entry) {
  entry.chart?.dispose();
  entry.chart = echarts.init(entry.plot, null, { renderer: "svg" });
  entry.chart.setOption(entry.build(entry.plot.clientWidth));
  entry.chart.on("restore", () => hidden.forEach((k) => select(entry.chart, k))); // it shows them again
}

function drawAll() {
  for (const entry of charts) draw(entry);
}

/** Shows or hides a method in a chart. */
function select(chart, k) {
  chart.dispatchAction({ type: hidden.has(k) ? "legendUnSelect" : "legendSelect", name: `m${k}` });
}

/** A tooltip's place: right of the pointer, or left of it where the window ends. */
function beside([x, y], _, tip) {
  const room = window.innerWidth - tip.parentElement.getBoundingClientRect().left;
  return [x + 16 + tip.offsetWidth < room ? x + 16 : x - 16 - tip.offsetWidth, y - 20];
}

function common() {
  const soft = paint("--soft");
  const selected = Object.fromEntries(page.methods.map((_, k) => [`m${k}`, !hidden.has(k)]));
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { fontFamily: "system-ui, sans-serif", color: paint("--ink") },
    legend: { show: false, data: page.methods.map((_, k) => `m${k}`), selected },
    grid: { left: 4, right: 12, top: narrow() ? 12 : 26, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    tooltip: {
      ...(narrow() ? { confine: true } : { position: beside }),
      backgroundColor: paint("--paper"),
      borderColor: paint("--line"),
      textStyle: { color: paint("--ink") },
      axisPointer: { lineStyle: { color: soft } },
    },
    toolbox: {
      show: !narrow() && !document.documentElement.classList.contains("print"),
      right: 8,
      top: -2,
      itemSize: 12,
      iconStyle: { borderColor: soft },
      feature: {
        dataZoom: { yAxisIndex: "none", title: { zoom: "zoom", back: "back" } },
        restore: { title: "whole" },
        saveAsImage: { title: "save", name: "everfed" },
      },
    },
  };
}

function axis(more) {
  return {
    axisLine: { lineStyle: { color: paint("--soft") } },
    axisLabel: { color: paint("--soft"), hideOverlap: true },
    splitLine: { lineStyle: { color: paint("--line") } },
    nameTextStyle: { color: paint("--soft") },
    ...more,
  };
}

/** A band of one standard deviation around a curve. */
function band(curve, k, log) {
  const known = curve.x.map((x, i) => [x, curve.y[i], curve.s[i]]).filter(([, y, s]) => y !== null && s !== null);
  // what is never negative has no band below 0, and none without end on a logarithmic axis
  const least = Math.min(...known.map((point) => point[1])) >= 0 ? 0 : -Infinity;
  const floor = (y, s) => Math.max(y - s, log ? y / 10 : least);
  return {
    type: "custom",
    name: `m${k}`,
    silent: true,
    clip: true,
    data: known.map(([x, y, s]) => [x, floor(y, s), y + s]),
    encode: { x: 0, y: [1, 2] },
    renderItem: (params, api) => {
      if (params.dataIndex !== 0) return undefined;
      const above = known.map(([x, y, s]) => api.coord([x, y + s]));
      const below = known.map(([x, y, s]) => api.coord([x, floor(y, s)])).reverse();
      return { type: "polygon", shape: { points: [...above, ...below] }, style: { fill: colour(k), opacity: 0.13 } };
    },
  };
}

/** Lines over rounds: `lines` of curves by method, each with a label. */
function overRounds(lines, labels, { unit = "", log = false, own = null, max = null } = {}) {
  const series = [];
  lines.forEach((curves, part) => {
    curves.forEach((curve, k) => {
      if (!curve) return;
      series.push(band(curve, k, log));
      series.push({
        type: "line",
        name: `m${k}`,
        data: curve.x.map((x, i) => [x, curve.y[i], curve.s[i], part]),
        showSymbol: curve.x.length < 3,
        symbol: "circle",
        symbolSize: 5,
        lineStyle: { width: 1.8, type: part ? "dashed" : dash(k) },
        itemStyle: { color: colour(k) },
        emphasis: { disabled: true },
      });
    });
  });
  const edges = page.edges.map((x) => ({ xAxis: x + 0.5 }));
  const starts = [0.5, ...page.edges.map((x) => x + 0.5)];
  const ends = [...page.edges.map((x) => x + 0.5), Infinity];
  const last = Math.max(1, ...lines.flat().filter(Boolean).map((curve) => curve.x[curve.x.length - 1]));
  series.push({
    type: "line",
    name: "tasks",
    data: [],
    markLine: { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: paint("--soft"), type: "dotted", width: 1 }, data: edges },
    ...(own !== null && starts[own] < last && page.tasks.length > 1
      ? { markArea: { silent: true, itemStyle: { color: paint("--soft"), opacity: 0.1, borderWidth: 0 }, data: [[{ xAxis: starts[own] }, { xAxis: Math.min(ends[own], last) }]] } }
      : {}),
  });
  return {
    ...common(),
    xAxis: axis({ type: "value", min: 1, max: last, minInterval: 1, splitLine: { show: false }, axisLabel: { color: paint("--soft"), hideOverlap: true, formatter: (x) => (Number.isInteger(x) ? `${x}` : "") } }),
    yAxis: axis({ type: log ? "log" : "value", max, axisLabel: { color: paint("--soft"), formatter: (y) => number(y) + (unit === "%" ? " %" : "") } }),
    dataZoom: [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false }],
    series,
    tooltip: {
      ...common().tooltip,
      trigger: "axis",
      formatter: (found) => {
        const rows = found
          .filter((f) => f.seriesType === "line" && f.seriesName !== "tasks" && f.data[1] !== null)
          .sort((a, b) => b.data[1] - a.data[1])
          .map((f) => {
            const k = Number(f.seriesName.slice(1));
            const label = labels[f.data[3]];
            const name = page.methods[k] + (label ? ` (${label})` : "");
            return [colour(k), name, plusMinus(f.data[1], f.data[2], unit)];
          });
        return rows.length ? tip(`Round ${found[0].axisValue}`, rows) : "";
      },
    },
  };
}

function heat(k) {
  const a = page.matrices[k];
  const size = a.length;
  const cells = [];
  for (let i = 0; i < size; i++) for (let j = 0; j <= i; j++) if (a[i][j] !== null) cells.push([j, i, a[i][j]]);
  const values = cells.map((cell) => cell[2]);
  const most = page.measure === "accuracy" ? 100 : Math.max(...values, 0);
  const names = a.map((_, j) => `${j + 1}`);
  return {
    ...common(),
    toolbox: { show: false },
    grid: { left: 4, right: 4, top: 4, bottom: 18, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({ type: "category", data: names, axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: false }, name: "on task", nameLocation: "middle", nameGap: 20 }),
    yAxis: axis({ type: "category", data: names, inverse: true, axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: false } }),
    visualMap: { show: false, min: 0, max: most, inRange: { color: VIRIDIS } },
    series: [{
      type: "heatmap",
      data: cells.map((cell) => ({ value: cell, label: { color: cell[2] < 0.62 * most ? "#ffffff" : "#000000" } })),
      label: { show: size <= 8, fontSize: 11, formatter: (p) => (page.measure === "accuracy" ? p.value[2].toFixed(0) : number(p.value[2])) },
      emphasis: { itemStyle: { borderColor: paint("--ink"), borderWidth: 1 } },
    }],
    tooltip: { ...common().tooltip, formatter: (p) => tip(page.methods[k], [["transparent", `on ${taskName(p.value[0])}, after task ${p.value[1] + 1}`, number(p.value[2], page.unit)]]) },
  };
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function trade() {
  const series = [];
  page.trade.forEach((runs, k) => {
    const known = runs.filter(([acc, bwt]) => acc !== null && bwt !== null);
    if (!known.length) return;
    const centre = [mean(known.map((r) => r[0])), mean(known.map((r) => r[1]))];
    const look = { color: colour(k) };
    if (known.length > 1) series.push({ type: "scatter", name: `m${k}`, data: known, symbolSize: 7, itemStyle: { ...look, opacity: 0.45 } });
    series.push({
      type: "scatter", name: `m${k}`, data: [centre], symbolSize: 15, itemStyle: look, symbol: ["circle", "rect", "triangle", "diamond"][(k + Math.floor(k / COLOURS.length)) % 4],
      label: { show: true, position: "right", formatter: () => page.methods[k], color: paint("--ink"), width: 130, overflow: "truncate" },
      labelLayout: { hideOverlap: true },
    });
  });
  return {
    ...common(),
    grid: { ...common().grid, right: 30, bottom: 18 },
    xAxis: axis({ type: "value", scale: true, name: "ACC, %", nameLocation: "middle", nameGap: 22, boundaryGap: ["8%", "20%"], axisLine: { onZero: false, lineStyle: { color: paint("--soft") } } }),
    yAxis: axis({ type: "value", scale: true, boundaryGap: ["10%", "10%"] }),
    series,
    tooltip: {
      ...common().tooltip,
      formatter: (p) => {
        const k = Number(p.seriesName.slice(1));
        return tip(page.methods[k], [[colour(k), "ACC", number(p.value[0], "%")], [colour(k), "BWT", number(p.value[1])]]);
      },
    },
  };
}

function forgetting() {
  const tasks = page.tasks.slice(0, -1);
  return {
    ...common(),
    xAxis: axis({ type: "category", data: tasks.map((name, j) => `${j + 1}${name ? ` ${name}` : ""}`), splitLine: { show: false }, axisLabel: { color: paint("--soft"), hideOverlap: true, width: 90, overflow: "truncate" } }),
    yAxis: axis({ type: "value" }),
    series: page.forgetting.map((rows, k) => ({
      type: "bar", name: `m${k}`, data: rows.map(([value]) => value), itemStyle: { color: colour(k), opacity: k < COLOURS.length ? 1 : 0.6 }, barGap: "5%", barMaxWidth: 48,
    })),
    tooltip: {
      ...common().tooltip,
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: (found) => tip(taskName(found[0].dataIndex), found.map((f) => {
        const k = Number(f.seriesName.slice(1));
        return [colour(k), page.methods[k], plusMinus(...page.forgetting[k][f.dataIndex], "%")];
      })),
    },
  };
}

/** Bubbles of the stream: `rows` of names, (moment, row, count) triples. */
function bubbles(rows, triples, width) {
  const { rounds } = page.stream;
  const most = Math.max(1, ...triples.map((t) => t[2]));
  const gap = Math.max(1, Math.round((rounds[rounds.length - 1] - rounds[0]) / 50));
  const room = Math.min(22, Math.max(6, (width - 80) / Math.min(rounds.length, 60)));
  const size = (count) => Math.max(2, room * 1.15 * Math.sqrt(count / most));
  return {
    ...common(),
    xAxis: axis({ type: "value", min: rounds[0] - gap, max: rounds[rounds.length - 1] + gap, minInterval: 1, splitLine: { show: false }, name: "round", nameLocation: "middle", nameGap: 22, axisLabel: { color: paint("--soft"), hideOverlap: true, formatter: (x) => (x < rounds[0] || x > rounds[rounds.length - 1] ? "" : `${x}`) } }),
    yAxis: axis({ type: "category", data: rows, inverse: true, axisTick: { show: false } }),
    grid: { ...common().grid, bottom: 18 },
    dataZoom: [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false }],
    series: [
      {
        type: "scatter",
        data: triples.map(([moment, row, count]) => [rounds[moment], row, count]),
        symbolSize: (value) => size(value[2]),
        itemStyle: { color: paint("--accent"), opacity: 0.75 },
        emphasis: { itemStyle: { opacity: 1 } },
        markLine: { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: paint("--soft"), type: "dotted" }, data: page.edges.map((x) => ({ xAxis: x + 0.5 })) },
      },
    ],
    tooltip: { ...common().tooltip, formatter: (p) => tip(`Round ${p.value[0]}`, [[paint("--accent"), rows[p.value[1]], `${p.value[2]} samples`]]) },
  };
}

// sections ------------------------------------------------------------------------------------
function header() {
  $("h1").textContent = $("h1").title = page.title;
  $("#subtitle").textContent = page.subtitle;
  $("footer").textContent = `Made by everfed ${page.version} from the runs' records alone.`;
  $("#notes").append(...page.notes.map((text) => make("li", { text })));
  $("#thinned").textContent = page.every > 1 ? `To keep this page small, curves show one round in ${page.every}. ` : "";
}

function swatch(k) {
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("width", 18);
  line.setAttribute("height", 10);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", "M0 5H18");
  path.setAttribute("stroke", colour(k));
  path.setAttribute("stroke-width", 4);
  path.setAttribute("stroke-dasharray", { solid: "none", dashed: "5 3", dotted: "2 2" }[dash(k)]);
  line.append(path);
  return line;
}

function toggles() {
  const box = $("#methods");
  box.replaceChildren(...page.methods.map((name, k) => {
    const button = make("button", { type: "button", title: name, "aria-pressed": String(!hidden.has(k)), kids: [swatch(k), make("span", { text: name })] });
    button.addEventListener("click", () => toggle(k));
    return button;
  }));
}

function toggle(k) {
  if (hidden.has(k)) hidden.delete(k);
  else hidden.add(k);
  toggles();
  for (const { box, chart } of charts) if (!box.dataset.method) select(chart, k);
  for (const { box } of charts) if (box.dataset.method === String(k)) box.hidden = hidden.has(k);
  for (const row of document.querySelectorAll(`tr[data-method="${k}"]`)) row.hidden = hidden.has(k);
}

function rows(table, head, body, whats = []) {
  const top = make("tr", { kids: head.map((text, i) => make("th", { text, scope: "col", ...(whats[i] ? { title: whats[i] } : {}) })) });
  table.append(make("thead", { kids: [top] }), make("tbody", { kids: body }));
}

function nameCell(k) {
  return make("td", { kids: [make("span", { class: "name", text: page.methods[k], title: page.methods[k] })] });
}

function summary() {
  const body = page.table.map((row, k) => {
    const cells = row.map((cell) => make("td", { text: cell.text, ...(cell.best ? { class: "best" } : {}) }));
    return make("tr", { "data-method": k, kids: [nameCell(k), ...cells] });
  });
  rows($("#summary table"), ["method", ...page.columns.map((c) => c.name)], body, ["", ...page.columns.map((c) => c.what)]);
  const what = page.columns.map((c) => `${c.name}: ${c.what}`).join(". ");
  $("#summary p").textContent = `${page.caption} ${what}.`;
}

function time() {
  const all = page.measure === "accuracy" ? { unit: page.unit, max: 100 } : {};
  const [grid, more] = document.querySelectorAll("#time .grid");
  if (page.tasks.length > 1) figure(grid, "All tasks seen so far", `mean ${page.measure}`, 240, () => overRounds([page.average], [""], all));
  const FIRST = 11;
  page.tests.forEach((curves, j) => {
    if (!curves.some(Boolean)) return;
    const title = page.tasks.length > 1 ? taskName(j) : "Test";
    figure(j < FIRST ? grid : more, title, page.measure, 240, () => overRounds([curves], [""], { ...all, own: j }));
  });
  if (more.children.length) {
    $("#time details").hidden = false;
    $("#time summary").textContent = `The other ${more.children.length} tasks`;
  }
  $("#time").hidden = !grid.children.length;
}

function matrices() {
  const accuracy = page.measure === "accuracy";
  $("#matrices p").textContent = `${accuracy ? "Accuracy in %" : "Loss"} on each task (columns) after each task (rows), mean over seeds.`;
  const size = page.tasks.length;
  page.methods.forEach((name, k) => {
    if (page.matrices[k].flat().some((v) => v !== null)) figure($("#matrices .grid"), name, "", size <= 4 ? 170 : 230, () => heat(k), k);
  });
  $("#matrices").hidden = size < 2 || !$("#matrices figure");
}

function forgot() {
  const grid = $("#trade .grid");
  if (page.trade.flat().some(([acc, bwt]) => acc !== null && bwt !== null)) {
    figure(grid, "ACC and BWT", "each run, and each method's mean; up and to the right is better", 320, trade);
  }
  if (page.forgetting.flat().some(([value]) => value !== null)) {
    figure(grid, "Forgetting per task", "accuracy lost by the end since the task was learnt, in points; ± in the tooltip", 320, forgetting);
  }
  $("#trade").hidden = !grid.children.length;
}

function panels() {
  for (const panel of page.panels) {
    const what = panel.labels.length > 1 ? `${panel.what} (solid: ${panel.labels[0]}, dashed: ${panel.labels[1]})` : panel.what;
    figure($("#panels .grid"), panel.title, what, 220, () => overRounds(panel.lines, panel.labels, { log: panel.log }));
  }
  $("#panels").hidden = !page.panels.length;
}

function stream() {
  const section = $("#stream");
  section.hidden = !page.stream;
  if (!page.stream) return;
  const { of, every, classes, whole, clients } = page.stream;
  const names = Object.keys(clients);
  const thinned = every > 1 ? ` One round in ${every} is shown.` : "";
  const some = names.length ? " Single clients are recorded only with low numbers." : "";
  section.querySelector("p").textContent = `What the clients of each round's cohort held (${of}); a bubble's area is a number of samples.${thinned}${some}`;
  const views = [["classes, all clients of the round", () => [classes.map((c) => (classes.length > 1 ? `class ${c}` : c)), whole]]];
  if (names.length) {
    views.push(["samples of each client", () => [names.map((c) => `client ${c}`), names.flatMap((c, row) => sums(clients[c]).map(([m, n]) => [m, row, n]))]]);
    for (const c of names) views.push([`classes of client ${c}`, () => [views[0][1]()[0], clients[c]]]);
  }
  const choice = section.querySelector("select");
  choice.append(...views.map(([name], k) => make("option", { text: name, value: k })));
  const height = (count) => Math.max(200, 70 + 20 * count);
  const view = () => views[choice.selectedIndex][1]();
  figure(section.querySelector(".grid"), "Bubbles", "", height(view()[0].length), (width) => bubbles(...view(), width));
  const entry = charts[charts.length - 1];
  entry.box.querySelector("figcaption").remove();
  choice.addEventListener("change", () => {
    entry.plot.style.height = `${height(view()[0].length)}px`;
    draw(entry);
  });
}

function sums(triples) {
  const out = new Map();
  for (const [moment, , count] of triples) out.set(moment, (out.get(moment) || 0) + count);
  return [...out];
}

function about() {
  const body = page.methods.map((_, k) => make("tr", { "data-method": k, kids: [nameCell(k), make("td", { text: page.own[k] })] }));
  if (page.own.some(Boolean)) rows($("#own"), ["method", "settings that differ"], body);
  $("#about details").open = page.methods.length === 1;
  rows($("#common"), ["setting", "value"], Object.entries(page.common).map(([key, value]) => make("tr", { kids: [make("td", { text: key }), make("td", { text: value })] })));
  rows($("#runs"), ["method", "seed", "rounds", "folder"], page.runs.map((run) => make("tr", { kids: [run.method, run.seed, run.rounds, run.folder].map((text) => make("td", { text })) })));
  $("#configs").append(...page.methods.flatMap((name, k) => [make("h3", { text: name }), make("pre", { text: JSON.stringify(page.configs[k], null, 1) })]));
}

// theme, size, paper --------------------------------------------------------------------------
function setTheme(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  $("#theme").textContent = isDark ? "Light" : "Dark";
  toggles();
  drawAll();
}

function fit() {
  for (const entry of charts) {
    const width = entry.plot.clientWidth;
    if (width && width !== entry.chart.getWidth()) draw(entry);
  }
}

header();
summary();
time();
matrices();
forgot();
panels();
stream();
about();
const system = matchMedia("(prefers-color-scheme: dark)");
setTheme(system.matches);
system.addEventListener("change", (event) => setTheme(event.matches));
$("#theme").addEventListener("click", () => setTheme(!dark()));
$("#time details").addEventListener("toggle", fit);
let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(fit, 100);
});
let before = false;
window.addEventListener("beforeprint", () => {
  before = dark();
  document.documentElement.classList.add("print");
  setTheme(false);
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("print");
  setTheme(before);
});

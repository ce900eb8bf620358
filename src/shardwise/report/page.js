"use strict";
// Draws the charts at the width that they have, again when it changes. Colours are the style's.
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 66, RIGHT = 10, TOP = 10, BOTTOM = 24;
const KIND_ORDER = ["optimizer", "parameters", "gradients", "gradient buckets", "gathered"];

function element(name, attributes = {}, parent = null, text = null) {
  const svg = ["svg", "path", "line", "text", "rect", "circle", "g", "title", "clipPath"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-2) return value.toExponential(2).replace(/\.?0+e/, "e");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
}
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < 4) { value /= 1024; at++; }
  return `${+value.toPrecision(4)} ${units[at]}`;
}
const milliseconds = (seconds) => `${number(+(seconds * 1e3).toPrecision(5))} ms`;

// Round values between low and high; of bytes multiples of powers of two.
function ticks(low, high, count, base = 10) {
  const step = (high - low) / count || 1, power = base ** Math.floor(Math.log(step) / Math.log(base));
  const unit = (base === 2 ? [1, 2] : [1, 2, 5, 10]).map((k) => k * power).find((each) => each >= step);
  const found = [];
  for (let k = Math.ceil(low / unit); k * unit <= high + unit * 1e-9; k++) found.push(k * unit);
  return found;
}

// An empty drawing with axes: returns it with its two scales.
function axes(parent, height, xs, ys, xFormat, yFormat) {
  const width = Math.max(240, parent.clientWidth);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" }, parent);
  const x = (value) => LEFT + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - ys[0]) / (ys[1] - ys[0] || 1)) * (height - TOP - BOTTOM);
  for (const tick of yFormat ? ticks(ys[0], ys[1], 4, yFormat === bytes ? 2 : 10) : []) {
    element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }, svg);
    element("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, svg, yFormat(tick));
  }
  for (const tick of ticks(xs[0], xs[1], width / 110)) {
    const anchor = x(tick) > width - 40 ? "end" : "middle";
    element("text", { x: Math.min(x(tick), width - RIGHT), y: height - 6, "text-anchor": anchor }, svg, xFormat(tick));
  }
  return { svg, x, y, width, height, xs };
}
const path = (points, x, y) => "M" + points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("L");
const nearest = (points, at) => points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));

// Where the pointer is, on the scale of the drawing.
function pointed(drawing, event) {
  const box = drawing.svg.getBoundingClientRect();
  const share = ((event.clientX - box.left) / box.width * drawing.width - LEFT) / (drawing.width - LEFT - RIGHT);
  return drawing.xs[0] + Math.min(1, Math.max(0, share)) * (drawing.xs[1] - drawing.xs[0]);
}

// ---- over the steps

function chart(spec, figure) {
  figure.replaceChildren();
  element("figcaption", {}, figure, spec.title);
  const curves = spec.curves.filter((curve) => curve.points.length);
  if (!curves.length) { element("p", { class: "missing" }, figure, "The run's log has no such numbers."); return; }
  const all = curves.flatMap((curve) => curve.points), values = all.map((point) => point[1]);
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const ys = spec.key === "loss" || spec.key === "memory" ? [low - (high - low) * 0.05, high] : [0, high];
  const xs = [0, all.reduce((most, point) => Math.max(most, point[0]), 1)];
  const format = spec.key === "memory" ? bytes : number;
  const drawing = axes(figure, spec.key === "loss" ? 300 : 190, xs, ys, number, format), { svg, x, y } = drawing;
  for (const mark of spec.marks) {
    const line = { class: "mark", "data-kind": mark.kind, x1: x(mark.x), x2: x(mark.x), y1: TOP, y2: drawing.height - BOTTOM,
      stroke: `var(--${mark.kind})`, "stroke-dasharray": mark.kind === "save" ? "2 4" : "none", "stroke-width": mark.kind === "save" ? 1 : 2 };
    element("title", {}, element("line", line, svg), `${mark.kind} at step ${mark.x}`);
  }
  for (const { style, run, points, name } of curves) {
    const look = { fill: "none", stroke: `var(--run${run})`, "stroke-width": style === "faint" ? 1 : 2, opacity: style === "faint" ? 0.35 : 1 };
    element("path", { ...look, d: path(points, x, y), "data-curve": name, "stroke-dasharray": style === "dots" ? "5 4" : "none" }, svg);
    if (style === "dots") for (const [a, b] of points) element("circle", { cx: x(a), cy: y(b), r: 3.5, fill: `var(--run${run})` }, svg);
  }
  const cursor = element("line", { class: "cursor", y1: TOP, y2: drawing.height - BOTTOM, visibility: "hidden" }, svg);
  const readout = element("div", { class: "readout" }, figure);
  const read = (at) => {
    const step = nearest(all, at)[0];
    const values = curves.map(({ name, points }) => {
      const [of, value] = nearest(points, step);
      return `${name} ${format(value)}${of === step ? "" : ` at ${of}`}`;
    });
    readout.textContent = `step ${number(step)} · ${values.join(" · ")}`;
    return step;
  };
  read(xs[1]);
  svg.addEventListener("pointermove", (event) => {
    const at = x(read(pointed(drawing, event)));
    for (const [key, value] of Object.entries({ x1: at, x2: at, visibility: "visible" })) cursor.setAttribute(key, value);
  });
}

// ---- one step

function oneStep(step, box) {
  const whole = [0, step.memory[step.memory.length - 1][0]];
  let view = [...whole];
  const controls = element("div", { class: "controls" }, box), place = element("div", { class: "zoomable" }, box);
  const readout = element("div", { class: "readout" }, box);
  const zoom = (factor, at = (view[0] + view[1]) / 2) => show([at - (at - view[0]) * factor, at + (view[1] - at) * factor]);
  const move = (share) => show(view.map((edge) => edge + share * (view[1] - view[0])));
  const buttons = { "+": () => zoom(0.5), "−": () => zoom(2), "←": () => move(-0.4), "→": () => move(0.4), "whole step": () => show(whole) };
  for (const [label, act] of Object.entries(buttons)) element("button", { type: "button" }, controls, label).addEventListener("click", act);

  function show([start, stop]) {
    const length = Math.min(whole[1], Math.max(stop - start, whole[1] / 2000));
    const first = Math.min(Math.max(0, start), whole[1] - length);
    view = [first, first + length];
    box.dataset.view = view.join(" ");
    place.replaceChildren();
    listen(lanes(step, place, view, readout));
    listen(memory(step, place, view, readout));
  }
  function listen(drawing) {
    let held = null;
    drawing.svg.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, pointed(drawing, event)); }, { passive: false });
    drawing.svg.addEventListener("pointerdown", (event) => { held = pointed(drawing, event); });
    drawing.svg.addEventListener("pointerup", (event) => {
      const by = held === null ? 0 : held - pointed(drawing, event);
      held = null;
      if (Math.abs(by) > (view[1] - view[0]) / 200) show(view.map((edge) => edge + by));
    });
  }
  readout.textContent = "Drag, scroll or use the buttons to zoom; point at something to read it.";
  box.redraw = () => show(view);
  show(view);
}

function lanes(step, place, view, readout) {
  const rows = { computation: 1, link: 1 };
  for (const [lane, row] of step.slices) rows[lane] = Math.max(rows[lane], row + 1);
  const TALL = 22, height = TOP + BOTTOM + 12 + TALL * (rows.computation + rows.link);
  const drawing = axes(place, height, view, [0, 1], milliseconds, null), { svg, x, width } = drawing;
  const top = { computation: TOP, link: TOP + 12 + TALL * rows.computation };
  const edge = (at) => Math.min(width - RIGHT, Math.max(LEFT, x(at)));
  for (const lane of ["computation", "link"]) element("text", { x: 4, y: top[lane] + 15 }, svg, lane === "link" ? "link" : "compute");
  for (const [lane, row, start, stop, label, reason] of step.slices) {
    if (stop < view[0] || start > view[1]) continue;
    const wide = Math.max(1, edge(stop) - edge(start)), y = top[lane] + row * TALL;
    const colour = lane === "link" ? 2 : reason === "forward" ? 0 : reason === "backward" ? 3 : 1;
    const group = element("g", { class: "slice", "data-lane": lane, "data-label": label }, svg);
    element("rect", { x: edge(start), y, width: wide, height: TALL - 3, rx: 2, fill: `color-mix(in srgb, var(--kind${colour}) ${(lane === "link" ? 72 : 92) - (row % 2) * 15}%, black)` }, group);
    const parts = label.split("."), shorter = [label, parts.slice(-2).join("."), parts.at(-1)];
    const fits = shorter.find((text) => text.length * 7.6 + 8 < wide);
    if (fits) element("text", { x: edge(start) + 4, y: y + 14 }, group, fits);
    group.addEventListener("pointerenter", () => { readout.textContent = `${label}: ${milliseconds(stop - start)}, from ${milliseconds(start)} · ${reason}`; });
  }
  return drawing;
}

function memory(step, place, view, readout) {
  const rank = (kind) => (KIND_ORDER.indexOf(kind) + 1 || KIND_ORDER.length + 1);
  const kinds = step.kinds.map((kind, index) => ({ kind, index: index + 1 })).sort((a, b) => rank(a.kind) - rank(b.kind));
  const totals = step.memory.map((row) => row.slice(1).reduce((a, b) => a + b, 0));
  const most = [...totals, ...step.planned.map((point) => point[1])].reduce((a, b) => Math.max(a, b), 1);
  const drawing = axes(place, 220, view, [0, most], milliseconds, bytes), { svg, x, y, width } = drawing;
  const clip = element("clipPath", { id: `clip${place.parentNode.dataset.run}` }, svg);
  element("rect", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height: 220 }, clip);
  const areas = element("g", { "clip-path": `url(#${clip.id})` }, svg);
  let below = step.memory.map(() => 0);
  kinds.forEach(({ kind, index }, place) => {
    const above = step.memory.map((row, at) => below[at] + row[index]);
    // What a kind has after an event stays until the next event.
    const stairs = (heights) => step.memory.flatMap((row, at) => (at ? [[row[0], heights[at - 1]], [row[0], heights[at]]] : [[row[0], heights[0]]]));
    element("path", { d: path([...stairs(above), ...stairs(below).reverse()], x, y) + "Z", fill: `var(--kind${place})`, opacity: 0.9, "data-kind": kind }, areas);
    below = above;
  });
  const planned = step.planned.flatMap((point, at) => (at ? [[point[0], step.planned[at - 1][1]], point] : [point]));
  if (planned.length) element("path", { d: path(planned, x, y), class: "planned", fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "6 4" }, areas);
  const legend = element("div", { class: "legend" }, place);
  kinds.forEach(({ kind }, at) => {
    const item = element("span", {}, legend);
    element("i", { style: `background: var(--kind${at})` }, item);
    item.append(kind);
  });
  if (planned.length) element("span", {}, legend, "- - planned, of all");
  svg.addEventListener("pointermove", (event) => {
    const at = pointed(drawing, event), row = step.memory.filter((each) => each[0] <= at).pop() || step.memory[0];
    readout.textContent = `${milliseconds(row[0])} · ` + kinds.map(({ kind, index }) => `${kind} ${bytes(row[index])}`).join(" · ");
  });
  return drawing;
}

// ---- the page

const figures = data.charts.map((spec) => [spec, element("figure", { "data-chart": spec.key }, document.getElementById("charts"))]);
const steps = [...document.querySelectorAll(".step")];
const draw = () => figures.forEach(([spec, figure]) => chart(spec, figure));
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = (is) => { document.documentElement.dataset.theme = is ? "dark" : "light"; };
theme(dark.matches);
dark.addEventListener("change", () => theme(dark.matches));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
draw();
steps.forEach((box) => oneStep(data.steps[box.dataset.run], box));
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (width === window.innerWidth) return;
  width = window.innerWidth;
  draw();
  steps.forEach((box) => box.redraw());
});

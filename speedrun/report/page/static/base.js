"use strict";
// Small parts: elements, numbers as people write them, scales with round ticks.

const SVG = "http://www.w3.org/2000/svg";

function put(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
function el(name, attributes, ...children) {
  return put(document.createElement(name), attributes, children);
}
function svg(name, attributes, ...children) {
  return put(document.createElementNS(SVG, name), attributes, children);
}
const byId = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;
// The first recipe is the yardstick and grey; a lone one need not stand back.
let firstHue = 0;
const hue = (index) => (known(index) ? `var(--c${(index + firstHue) % 10})` : "var(--faint)");
const dashOf = (index) => (known(index) && index >= 10 ? "7 3" : null);

function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}
function short(value) {
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return trimmed((value / limit).toPrecision(3)) + unit;
  }
  return trimmed(value.toPrecision(3));
}
function trimmed(text) {
  if (/e/.test(text)) return String(Number(text));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
function duration(seconds) {
  const size = Math.abs(seconds);
  if (size >= 7200) return trimmed((seconds / 3600).toPrecision(3)) + " h";
  if (size >= 180) return trimmed((seconds / 60).toPrecision(3)) + " min";
  if (size > 0 && size < 0.9995) return trimmed((seconds * 1000).toPrecision(3)) + " ms";
  return trimmed(seconds.toPrecision(3)) + " s";
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return (count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)) + " " + units[unit];
}
const flops = (rate) => `${trimmed((rate / 1e9).toPrecision(3))} GFLOP/s`;
const loss = (value) => (known(value) ? value.toFixed(4) : "–");
const percent = (share) => trimmed((100 * share).toPrecision(share < 0.1 ? 2 : 3)) + "%";
function pValue(p) {
  if (!known(p)) return "no test";
  if (p === 0) return "p = 0";
  if (p >= 0.001) return "p = " + trimmed(p.toPrecision(2));
  const [digits, power] = p.toExponential(1).split("e");
  const raised = String(Number(power)).replace(/[-0-9]/g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  return `p = ${digits}×10${raised}`;
}
function signed(value, digits) {
  return (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);
}
function interval(low, high, form) {
  return known(low) && known(high) ? `${form(low)} to ${form(high)}` : "no interval";
}
const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

// What the horizontal axis can measure: `of` is the column of a curve, `to` the race's metric.
const steps = (value) => (value >= 1e5 ? short(value) : grouped(value));
const AXES = {
  tokens: { label: "Tokens", of: "tokens", to: "tokens_to_target", noun: "tokens", form: short },
  steps: { label: "Steps", of: "step", to: "steps_to_target", noun: "steps", form: steps },
  seconds: { label: "Training time", of: "seconds", to: "seconds_to_target", noun: "training time", form: duration },
  wall: { label: "Wall time", of: "wall_seconds", to: "wall_seconds_to_target", noun: "wall time", form: duration },
};

// Round numbers that cover [low, high] in about `count` steps.
function ticks(low, high, count, timeLike) {
  const span = high - low;
  if (!(span > 0)) return [low];
  let step;
  const wanted = span / Math.max(1, count);
  if (timeLike && wanted > 30) {
    const nice = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    step = nice.find((s) => s >= wanted) || 86400 * Math.ceil(wanted / 86400);
  } else {
    const power = 10 ** Math.floor(Math.log10(wanted));
    step = [1, 2, 2.5, 5, 10].find((m) => m * power >= wanted * 0.999) * power;
  }
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}
const scale = (low, high, from, to) => {
  const factor = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * factor;
};
function extent(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}
const average = (values) => values.reduce((a, b) => a + b, 0) / values.length;
function averageKnown(values) {
  const found = values.filter(known);
  return found.length ? average(found) : null;
}

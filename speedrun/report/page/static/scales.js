// From values to places: what the horizontal axis measures, ranges, round ticks, scales; and means.

import { duration, grouped, known, short } from "./numbers.js";

/** @type {Record<AxisName, Axis>} */
export const AXES = {
  tokens: { label: "Tokens", noun: "tokens", column: "tokens", metric: "tokens_to_target", format: short },
  steps: {
    label: "Steps", noun: "steps", column: "step", metric: "steps_to_target",
    format: (value) => (value >= 1e5 ? short(value) : grouped(value)),
  },
  seconds: {
    label: "Training time", noun: "training time", column: "seconds", metric: "seconds_to_target",
    format: duration, isTime: true,
  },
  wall: {
    label: "Wall time", noun: "wall time", column: "wall_seconds", metric: "wall_seconds_to_target",
    format: duration, isTime: true,
  },
};
// Steps of a time axis, in seconds: half minutes and below are as round as other numbers.
const TIMES = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Round numbers that cover [low, high] in about `count` steps.
 * @type {(low: number, high: number, count: number, isTime?: boolean) => number[]} */
export function ticks(low, high, count, isTime = false) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const wanted = span / count;
  const step = isTime && wanted > 30 ? timeStep(wanted) : roundStep(wanted);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}
/** Round numbers in [low, high] for a logarithmic axis: 1, 2 and 5 of each decade, or fewer where those would crowd.
 * @type {(low: number, high: number, count: number) => number[]} */
export function logTicks(low, high, count) {
  const [first, last] = [low, high].map((end) => Math.floor(Math.log10(end)));
  const powers = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const within = (/** @type {number[]} */ digits) => powers
    .flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)))
    .filter((tick) => tick >= low && tick <= high);
  const found = [[1, 2, 5], [1, 3], [1]].map(within).find((some) => some.length <= count) ?? within([1]);
  return found.length > 1 ? found : ticks(low, high, count);
}
function timeStep(/** @type {number} */ wanted) {
  return TIMES.find((step) => step >= wanted) || 86400 * Math.ceil(wanted / 86400);
}
function roundStep(/** @type {number} */ wanted) {
  const power = 10 ** Math.floor(Math.log10(wanted));
  return ([1, 2, 2.5, 5].find((digit) => digit * power >= wanted * 0.999) ?? 10) * power;
}

/** @type {(low: number, high: number, from: number, to: number) => Scale} */
export function scale(low, high, from, to) {
  const factor = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * factor;
}
export function extent(/** @type {number[]} */ values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}
export const average = (/** @type {number[]} */ values) => values.reduce((a, b) => a + b, 0) / values.length;
export function averageKnown(/** @type {Maybe<number>[]} */ values) {
  const found = values.filter(known);
  return found.length ? average(found) : null;
}

// Numbers as people write them.

/** @type {<T>(value: T) => value is NonNullable<T>} */
export const known = (value) => value !== null && value !== undefined;

export const grouped = (/** @type {number} */ value) => Math.round(value).toLocaleString("en-US");
/** Three digits, with a unit where that saves zeros. */
export function short(/** @type {number} */ value) {
  const units = { B: 1e9, M: 1e6, k: 1e3 };
  for (const [unit, size] of Object.entries(units)) {
    if (Math.abs(value) >= size) return trimmed((value / size).toPrecision(3)) + unit;
  }
  return trimmed(value.toPrecision(3));
}
export function trimmed(/** @type {string} */ text) {
  if (/e/.test(text)) return String(Number(text));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
export function duration(/** @type {number} */ seconds) {
  const size = Math.abs(seconds);
  if (size >= 7200) return trimmed((seconds / 3600).toPrecision(3)) + " h";
  if (size >= 180) return trimmed((seconds / 60).toPrecision(3)) + " min";
  if (size > 0 && size < 0.9995) return trimmed((seconds * 1000).toPrecision(3)) + " ms";
  return trimmed(seconds.toPrecision(3)) + " s";
}
export function bytes(/** @type {number} */ count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return (count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)) + " " + units[unit];
}
export const flops = (/** @type {number} */ rate) => `${trimmed((rate / 1e9).toPrecision(3))} GFLOP/s`;
export const percent = (/** @type {number} */ share) => trimmed((100 * share).toPrecision(share < 0.1 ? 2 : 3)) + "%";
/** @type {(digits: number) => Format} */
export const fixed = (digits) => (value) => value.toFixed(digits);
/** @type {(value: Maybe<number>, format: Format) => string} */
export const orDash = (value, format) => (known(value) ? format(value) : "–");
export const loss = (/** @type {Maybe<number>} */ value) => orDash(value, fixed(4));
export function pValue(/** @type {Maybe<number>} */ p) {
  if (!known(p)) return "no test";
  if (p === 0) return "p = 0";
  if (p >= 0.001) return "p = " + trimmed(p.toPrecision(2));
  const [digits, power] = p.toExponential(1).split("e");
  const raised = String(Number(power)).replace(/[-0-9]/g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]));
  return `p = ${digits}×10${raised}`;
}
/** @type {(value: number, digits: number) => string} */
export const signed = (value, digits) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);
/** @type {(low: Maybe<number>, high: Maybe<number>, format: Format) => string} */
export function interval(low, high, format) {
  if (!known(low)) return "–";
  return known(high) ? `${format(low)} to ${format(high)}` : "no interval";
}
/** @type {(count: number, word: string) => string} */
export const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

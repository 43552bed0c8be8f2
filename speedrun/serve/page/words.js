// What the page says: of runs, of tokens, and of how a text ended.

import { grouped, known, percent, short } from "./numbers.js";

export const END_OF_TEXT = "<|endoftext|>";

/** What is worth knowing of a run, in a line. */
export function facts(/** @type {ServedRun} */ run) {
  const loss = known(run.validation_loss) ? `validation loss ${run.validation_loss.toFixed(4)}` : "not validated";
  const window = known(run.window) ? `a window of ${windowSize(run)}` : "no window";
  return [
    `recipe ${run.recipe}`, `track ${run.track}`, `step ${grouped(run.step)}`, `${short(run.parameters)} parameters`, loss,
    `context of ${count(run.context, "token")}, ${window}`,
  ].join(" · ");
}

export function windowSize(/** @type {ServedRun} */ run) {
  const blocks = run.window_unit.endsWith("blocks") ? ` (blocks of ${run.block})` : "";
  return `${count(run.window ?? 0, "token")}${blocks}`;
}

/** @type {(number: number, noun: string) => string} */
export const count = (number, noun) => `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;

/** A probability that stays readable when it is next to nothing. */
export function odds(/** @type {number} */ logOdds) {
  const share = Math.exp(logOdds);
  return share < 0.00005 ? "<0.01%" : percent(share);
}

/** How a token is named where its blanks count. The end of a text has a name of its own. */
export function visible(/** @type {string} */ name) {
  if (name === END_OF_TEXT) return "end of text";
  if (/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return name.slice("bytes:".length);
  return pictured(name).replace(/ {5,}/g, (blanks) => `␣×${blanks.length}`).replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\u00a0/g, "⍽");
}

/** Text as it is, but for control characters, which have no look of their own. */
export const pictured = (/** @type {string} */ text) =>
  // eslint-disable-next-line no-control-regex
  text.replace(/[\x00-\x08\x0b-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/\x7f/g, "␡");

/** @type {(reason: Choice["finish_reason"], last: Token | undefined, asked: number) => string} */
export function ending(reason, last, asked) {
  if (reason === "length") return `it reached the ${count(asked, "token")} asked for`;
  return last && !last.bytes.length ? "it ended its text" : "it came to a stop string";
}

/** Tokens and their rate, by `timed` of them. @type {(tokens: number, timed: number, milliseconds: number) => string} */
export function pace(tokens, timed, milliseconds) {
  const rate = Number(((1000 * timed) / milliseconds).toPrecision(3));
  return count(tokens, "token") + (timed && milliseconds ? `, ${grouped(rate)} a second` : "");
}

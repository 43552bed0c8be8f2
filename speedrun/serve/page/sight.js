// What the last token saw: the whole text, and which of it attention let through.

import { el } from "./dom.js";
import { grouped } from "./numbers.js";
import { newDocument } from "./tokens.js";
import { count, pictured, windowSize } from "./words.js";

/** @type {Record<Visibility, string>} */
const NAMES = {
  seen: "seen", window: "outside of the window", document: "of another document", forgotten: "forgotten",
};

/** Where documents begin, but for the first: only the token that opens one has no bytes. */
const opens = (/** @type {TextContext} */ { bytes }, /** @type {number} */ token) => token > 0 && !bytes[token].length;

/** Tokens before the last one, in stretches. A token is named by the first thing that hides it.
 * @type {(context: TextContext, run: ServedRun) => Stretch[]} */
export function stretches(context, run) {
  const end = context.bytes.length - 1;
  const begins = run.inside_documents ? Math.max(0, ...context.documents) : 0;
  /** @type {(token: number) => Visibility} */
  const kindOf = (token) => {
    if (token >= context.first_seen) return "seen";
    if (token < context.first_remembered) return "forgotten";
    return token < begins ? "document" : "window";
  };
  /** @type {Stretch[]} */
  const found = [];
  for (let token = 0; token < end; token += 1) {
    const [kind, last] = [kindOf(token), found.at(-1)];
    if (last && last.kind === kind && !opens(context, token)) last.to = token + 1;
    else found.push({ kind, from: token, to: token + 1, opens: opens(context, token) });
  }
  return found;
}

/** @type {(parts: Stretch[], kind: Visibility) => number} */
const total = (parts, kind) => parts.filter((part) => part.kind === kind).reduce((sum, { from, to }) => sum + to - from, 0);

/** @type {(parts: Stretch[], run: ServedRun) => string} */
export function inWords(parts, run) {
  const [all, seen] = [parts.at(-1)?.to ?? 0, total(parts, "seen")];
  const open = !run.inside_documents && parts.some((part) => part.opens) ? " This run sees across documents." : "";
  if (seen === all) return `The last token saw ${all === 1 ? "the one token" : `all ${grouped(all)} tokens`} before it.${open}`;
  const hidden = {
    forgotten: (/** @type {string} */ n) => `${n} had been forgotten, since the context holds ${grouped(run.context)}`,
    document: (/** @type {string} */ n) => `${n} are of other documents`,
    window: (/** @type {string} */ n) => `the window of ${windowSize(run)} hides ${n}`,
  };
  const reasons = /** @type {(keyof typeof hidden)[]} */ (["forgotten", "document", "window"])
    .filter((kind) => total(parts, kind))
    .map((kind) => hidden[kind](parts[0].kind === kind ? `the first ${grouped(total(parts, kind))}` : grouped(total(parts, kind))));
  return `The last token saw ${grouped(seen)} of the ${count(all, "token")} before it: ${reasons.join("; ")}.${open}`;
}

/** @type {(context: TextContext, run: ServedRun) => HTMLElement} */
export function sightOf(context, run) {
  const parts = stretches(context, run);
  const kinds = /** @type {Visibility[]} */ (Object.keys(NAMES)).filter((kind) => total(parts, kind));
  const text = el("div", { class: "through", tabindex: 0, role: "group", "aria-label": "The text by what was seen" },
    shaded(context, parts));
  return el("div", { class: "sight" },
    el("h3", {}, "What the last token saw"),
    el("p", { class: "say" }, inWords(parts, run)),
    strip(parts, context, run),
    el("p", { class: "legend small" }, kinds.map((kind) => el("span", {}, el("i", { class: kind }), NAMES[kind])),
      el("span", {}, el("i", { class: "last" }), "the last token"),
      parts.some((part) => part.opens) && el("span", {}, el("i", { class: "opens" }), "a document begins"),
      inBlocks(run) && context.bytes.length > run.block && el("span", {}, el("i", { class: "tick" }), `blocks of ${run.block}`)),
    // Where all was seen the text looks as it does above.
    el("details", { open: kinds.length > 1 }, el("summary", {}, "The text, by what was seen"), text));
}

const inBlocks = (/** @type {ServedRun} */ run) => run.window !== null && run.window_unit.endsWith("blocks");

/** All tokens in a row, each as wide as any other; blocks of the window are marked below.
 * @type {(parts: Stretch[], context: TextContext, run: ServedRun) => HTMLElement} */
function strip(parts, context, run) {
  const all = context.bytes.length;
  const bar = el("div", { class: "strip", "aria-hidden": "true" });
  for (const { kind, from, to, opens: border } of parts) {
    const piece = el("i", { class: border ? `${kind} opens` : kind });
    piece.style.flexGrow = String(to - from);
    bar.append(piece);
  }
  const last = el("i", { class: "last" });
  last.style.flexGrow = "1";
  bar.append(last);
  const axis = el("div", { class: "axis small", "aria-hidden": "true" });
  const at = (/** @type {number} */ token, /** @type {HTMLElement} */ mark) => {
    mark.style.left = `${(100 * token) / all}%`;
    axis.append(mark);
  };
  if (inBlocks(run)) {
    for (let edge = context.first_remembered + run.block; edge < all; edge += run.block) at(edge, el("i", {}));
  }
  const share = context.first_seen / all;
  if (share > 0.06 && share < 0.88) at(context.first_seen, el("span", {}, grouped(context.first_seen)));
  axis.append(el("span", {}, "0"), el("span", { class: "end" }, grouped(all - 1)));
  return el("div", {}, bar, axis);
}

/** The text in its stretches: a character that is split between two stands in the later one.
 * @type {(context: TextContext, parts: Stretch[]) => Node[]} */
function shaded(context, parts) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const text = (/** @type {number} */ from, /** @type {number} */ to) =>
    pictured(decoder.decode(new Uint8Array(context.bytes.slice(from, to).flat()), { stream: true }));
  const nodes = parts.flatMap(({ kind, from, to, opens: border }) => [
    ...(border ? [newDocument()] : []), el("span", { class: kind }, text(from, to))]);
  const end = context.bytes.length - 1;
  const last = el("span", { class: "last" }, context.bytes[end].length ? text(end, end + 1) : "end of text");
  return [...nodes, last];
}

/** Scrolled to where sight begins, which is what there is to see. The view is in the page by now. */
export function scrollToSight(/** @type {HTMLElement} */ view) {
  const [box, first] = [view.querySelector(".through"), view.querySelector(".through .seen")];
  if (!box || !first) return;
  const top = first.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (top > 0.7 * box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
}

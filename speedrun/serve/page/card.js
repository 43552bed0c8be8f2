// The card of a token: how likely it was, and what else could have stood there.

import { byId, el } from "./dom.js";
import { count, odds, visible } from "./words.js";

const GAP = 8; // pixels between a card and its token, and the edge of the window
const FEWER = 3; // alternatives of each token, where a character has several

/** @typedef {{ span: HTMLElement, tokens: Token[] }} Shown */
/** @type {Shown | null} */
let pinned = null;
/** @type {Shown | null} */
let hovered = null;

/** What the mouse is on; it comes before what has the focus.
 * @type {(span: HTMLElement | null, tokens: Token[]) => void} */
export function hover(span, tokens) {
  hovered = span && tokens.length ? { span, tokens } : null;
  show();
}
/** @type {(span: HTMLElement, tokens: Token[]) => void} */
export function pin(span, tokens) {
  pinned = { span, tokens };
  show();
}
export function closeCard() {
  pinned = hovered = null;
  show();
}

function show() {
  const [card, shown] = [byId("card"), hovered ?? pinned];
  for (const other of document.querySelectorAll(".token.open")) other.classList.remove("open");
  card.hidden = !shown;
  if (!shown) return;
  shown.span.classList.add("open");
  const { tokens } = shown;
  card.replaceChildren(
    ...(tokens.length > 1 ? [el("p", { class: "small" }, `${count(tokens.length, "token")} share a character`)] : []),
    ...tokens.flatMap((token) => described(token, tokens.length > 1 ? FEWER : token.alternatives.length)));
  place(card, shown.span);
}

/** @type {(token: Token, most: number) => HTMLElement[]} */
function described(token, most) {
  const rank = token.alternatives.findIndex((one) => one.name === token.name);
  const rows = token.alternatives.slice(0, most).map((one) => row(one, one.name === token.name));
  if (rank < 0 || rank >= most) rows.push(el("div", { class: "gap", "aria-hidden": "true" }, "⋮"), row(token, true));
  const standing = rank === 0 ? "the likeliest" : rank > 0 ? `the ${ordinal(rank + 1)} likeliest`
    : token.alternatives.length ? `not among the ${token.alternatives.length} likeliest` : "";
  return [
    el("p", { class: "drawn" }, el("b", {}, visible(token.name)), el("span", {}, odds(token.logOdds)),
      el("span", { class: "small" }, standing)),
    el("div", { class: "rows" }, rows)];
}

/** @type {(one: Alternative, drawn: boolean) => HTMLElement} */
function row(one, drawn) {
  const bar = el("i", {});
  bar.style.width = `${100 * Math.exp(one.logOdds)}%`;
  return el("div", { class: drawn ? "row mine" : "row" },
    el("span", { class: "name" }, visible(one.name)), el("span", { class: "bar" }, bar),
    el("span", { class: "share" }, odds(one.logOdds)),
    el("span", { class: "mark" }, drawn ? el("span", { class: "unseen" }, "drawn") : "", drawn ? "◂" : ""));
}

const ordinal = (/** @type {number} */ n) => `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;

/** Above its token, or below where there is no room; on a phone at the other end of the screen. */
function place(/** @type {HTMLElement} */ card, /** @type {HTMLElement} */ span) {
  const token = span.getClientRects()[0] ?? span.getBoundingClientRect();
  card.classList.toggle("high", token.top > innerHeight / 2); // read by the styles of a phone
  const { width, height } = card.getBoundingClientRect();
  const above = token.top - height - GAP;
  card.style.left = `${Math.max(GAP, Math.min(token.left, document.documentElement.clientWidth - width - GAP))}px`;
  card.style.top = `${above > GAP ? above : Math.min(token.bottom + GAP, Math.max(GAP, innerHeight - height - GAP))}px`;
}

/** What scrolls away takes its card along, out of the box of its text too. */
function follow() {
  hovered = null;
  if (!pinned) return show();
  const token = pinned.span.getBoundingClientRect();
  const box = pinned.span.parentElement?.getBoundingClientRect() ?? token;
  if (token.bottom < box.top || token.top > box.bottom) byId("card").hidden = true;
  else show();
}

/** A card stays with its token, and goes when one touches what is no token. */
export function keepCards() {
  addEventListener("scroll", follow, { capture: true, passive: true });
  addEventListener("resize", show);
  addEventListener("pointerdown", (event) => {
    if (!(event.target instanceof Element && event.target.closest(".token, .card"))) closeCard();
  });
}

// Who attends to whom: the blocks of the attention mask at steps along the run.

import { el, svg } from "./dom.js";
import { grouped, known, percent } from "./numbers.js";
import { definitions } from "./parts.js";

const SIZE = 480; // of the picture

/** Of a long row the first 48 blocks: all 512 would be a hair along the diagonal. */
function shownBlocks(/** @type {Mask} */ mask) {
  const blocks = mask.frames[0].partial.length;
  return blocks > 64 ? 48 : blocks;
}

/** One frame of the mask: query blocks downward, key blocks to the right. The lists of a query block
 * are runs that end at the diagonal: partial ones, then full ones, then its own, cut by causality.
 * @type {(mask: Mask, frame: MaskFrame) => Element} */
function maskPicture(mask, frame) {
  const shown = shownBlocks(mask);
  const tokens = Math.min(mask.length, shown * mask.block);
  const unit = SIZE / tokens;
  const at = (/** @type {number} */ token) => (Math.min(token, tokens) * unit).toFixed(2);
  const gap = Math.min(1.2, mask.block * unit * 0.06);
  /** @type {(query: number, from: number, to: number) => string} */
  const boxes = (query, from, to) => {
    let path = "";
    for (let key = from; key < to; key += 1) {
      const [left, top] = [key, query].map((block) => block * mask.block);
      const [width, height] = [left, top].map((start) =>
        ((Math.min(start + mask.block, tokens) - start) * unit - gap).toFixed(2));
      path += `M${at(left)} ${at(top)}h${width}v${height}h-${width}z`;
    }
    return path;
  };
  let [partial, full] = ["", ""];
  for (let query = 0; query < shown; query += 1) {
    const firstFull = query - frame.full[query];
    const firstPartial = firstFull - (frame.partial[query] - 1);
    partial += boxes(query, firstPartial, firstFull) + boxes(query, query, query + 1);
    full += boxes(query, firstFull, query);
  }
  const pairs = frame.edge.length ? visiblePairs(frame.edge, tokens, at) : "";
  return svg("svg", {
    viewBox: `-1 -1 ${SIZE + 2} ${SIZE + 2}`, role: "img",
    "aria-label": `Blocks of queries (down) against keys (across) at step ${frame.step}`,
  },
  svg("rect", { x: 0, y: 0, width: SIZE, height: SIZE, style: "fill:none;stroke:var(--line)" }),
  svg("path", { d: `M0 0V${SIZE}H${SIZE}Z`, style: "fill:var(--grid)", "fill-opacity": 0.7 }),
  svg("path", { class: "partial", d: partial, style: "fill:var(--partial)" }),
  svg("path", { class: "full", d: full, style: "fill:var(--full)" }),
  svg("path", { class: "edge", d: pairs, style: "fill:var(--seen)", "fill-opacity": 0.3 }));
}

/** The exact set of visible pairs: from the diagonal back to each query's first key.
 * @type {(edge: MaskFrame["edge"], tokens: number, at: (token: number) => string) => string} */
function visiblePairs(edge, tokens, at) {
  const sides = edge.map(([query, first, slope], index) => {
    const next = index + 1 < edge.length ? edge[index + 1][0] : tokens;
    return `L${at(first)} ${at(query)}L${at(first + slope * (next - query))} ${at(next)}`;
  });
  return `M0 0${sides.join("")}L${at(tokens)} ${at(tokens)}Z`;
}

/** @type {(mask: Mask, frame: MaskFrame) => Element} */
function maskFacts(mask, frame) {
  const sum = (/** @type {number[]} */ list) => list.reduce((a, b) => a + b, 0);
  const full = sum(frame.full);
  const computed = full + sum(frame.partial);
  const causal = (frame.partial.length * (frame.partial.length + 1)) / 2;
  const unit = mask.rule === "blocks" ? mask.block : 1;
  return definitions({
    step: grouped(frame.step),
    window: known(frame.window) ? `${grouped(frame.window * unit)} tokens` : "none: all that precedes",
    "blocks computed": `${grouped(computed)} of ${grouped(causal)} causal (${percent(computed / causal)})`,
    "of them full": `${grouped(full)} (${percent(full / computed)})`,
    "pairs visible": `${percent(frame.visible)} of the causal ones`,
  });
}

/** Picture, slider and facts of one mask; the slider changes them in place, so that it can be dragged.
 * @type {(mask: Mask, state: State) => Record<"picture" | "slider" | "facts", Element>} */
function maskByStep(mask, state) {
  const last = mask.frames.length - 1;
  const chosen = Math.min(state.frame ?? last, last);
  const picture = el("div", { class: "figure", id: "mask-figure" });
  const facts = el("div", { "aria-live": "polite" });
  const slider = el("input", {
    type: "range", id: "mask-step", min: 0, max: last, value: chosen, oninput: () => show(Number(slider.value)),
  });
  function show(/** @type {number} */ index) {
    state.frame = index;
    const frame = mask.frames[index];
    slider.setAttribute("aria-valuetext", `step ${frame.step}`);
    picture.replaceChildren(maskPicture(mask, frame));
    facts.replaceChildren(maskFacts(mask, frame));
  }
  show(chosen);
  return { picture, slider, facts };
}

/** @type {Draw} */
export function maskSection(data, state, box, redraw) {
  if (!data.masks.length) return;
  const growing = data.masks.findIndex((one) => one.frames.length > 1);
  const chosen = Math.min(state.mask ?? Math.max(0, growing), data.masks.length - 1);
  state.mask = chosen;
  const mask = data.masks[chosen];
  const { picture, slider, facts } = maskByStep(mask, state);
  const users = (/** @type {Mask} */ one) => one.groups.map((index) => data.groups[index].label).join(", ");
  const options = data.masks.map((one, i) => el("option", { value: i, selected: i === chosen }, users(one)));
  const choices = el("select", { id: "mask-choice", onchange: () => {
    state.mask = choices.selectedIndex;
    state.frame = null;
    redraw();
  } }, options);
  const made = mask.real ? "Documents are those of the first validation row."
    : "Documents are made up here: the run’s dataset is not at hand.";
  const blocks = mask.frames[0].partial.length;
  const left = data.groups.filter((_, index) => !data.masks.some((one) => one.groups.includes(index)));
  const unseen = left.length ? `No picture, to keep the page small: ${left.map((one) => one.label).join(", ")}.` : "";
  const moves = mask.frames.length > 1;
  const colors = { full: "full block: no mask needed", partial: "partial block: mask inside", grid: "skipped" };
  const tinted = mask.frames[0].edge.length ? { seen: "tinted: pairs a query really sees" } : {};
  const swatches = Object.entries({ ...colors, ...tinted }).map(([color, text]) => el("span", { class: "line" },
    el("span", { class: "swatch", style: `background:var(--${color})` }), text));
  box.append(
    el("p", { class: "say" },
      `A row of ${grouped(mask.length)} tokens in blocks of ${mask.block}: queries downward, keys to the right. `,
      mask.documents ? made : "Attention crosses documents in this recipe.",
      blocks > shownBlocks(mask) ? ` Shown are the first ${shownBlocks(mask)} blocks of ${blocks}.` : ""),
    el("div", { class: "maskbox" }, picture, el("div", {},
      data.masks.length > 1
        ? el("label", { class: "small" }, "Recipe ", choices) : el("p", { class: "small" }, users(mask)),
      moves ? [el("label", { class: "small line", for: "mask-step" }, "Step of the run"), slider] : null, facts,
      el("p", { class: "small" }, swatches),
      el("p", { class: "small", id: "mask-unseen" }, unseen))));
}

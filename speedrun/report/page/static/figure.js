// Figures draw themselves for the width they have, again whenever that changes.

import { svg } from "./dom.js";

/** @type {WeakMap<Element, () => void>} */
const redraws = new WeakMap();

/** @type {(box: HTMLElement, draw: (width: number) => Element[]) => HTMLElement} */
export function figure(box, draw) {
  let drawn = 0;
  const redraw = () => {
    drawn = Math.round(box.clientWidth);
    box.replaceChildren(...draw(Math.max(260, drawn || 900)));
  };
  redraws.set(box, redraw);
  new ResizeObserver(([{ contentRect }]) => {
    const width = Math.round(contentRect.width);
    if (width && width !== drawn) requestAnimationFrame(redraw);
  }).observe(box);
  return box;
}
/** Draws the figures inside an element at once, that is before it is painted. */
export function drawFigures(/** @type {Element} */ inside) {
  inside.querySelectorAll(".chart, .figure").forEach((box) => redraws.get(box)?.());
}

/** Grid lines of a horizontal axis with their numbers.
 * @type {(picture: Element, x: Scale, marks: number[], top: number, bottom: number, format: Format) => void} */
export function verticals(picture, x, marks, top, bottom, format) {
  for (const mark of marks) {
    const anchor = mark === marks[0] && mark === 0 ? "start" : "middle";
    picture.append(
      svg("line", { class: "grid", x1: x(mark), x2: x(mark), y1: top, y2: bottom }),
      svg("text", { x: x(mark), y: bottom + 16, "text-anchor": anchor }, format(mark)));
  }
}

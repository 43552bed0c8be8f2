// Elements by name, attributes and children. Text goes in as text, never as markup.

/** @type {<N extends Element>(node: N, attributes: Attributes, ...children: Child[]) => N} */
export function put(node, attributes, ...children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of /** @type {unknown[]} */ (children).flat(Infinity)) {
    if (child instanceof Node) node.append(child);
    else if (child !== null && child !== undefined && child !== false) node.append(String(child));
  }
  return node;
}
/** @type {<K extends keyof HTMLElementTagNameMap>(
 *   name: K, attributes: Attributes, ...children: Child[]) => HTMLElementTagNameMap[K]} */
export function el(name, attributes, ...children) {
  return put(document.createElement(name), attributes, ...children);
}
/** @type {<K extends keyof SVGElementTagNameMap>(
 *   name: K, attributes: Attributes, ...children: Child[]) => SVGElementTagNameMap[K]} */
export function svg(name, attributes, ...children) {
  return put(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, ...children);
}
/** @type {(width: number, height: number, label: string, attributes?: Attributes) => SVGSVGElement} */
export function drawing(width, height, label, attributes = {}) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", ...attributes, "aria-label": label });
}

/** An element that page.html has. */
export const byId = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));

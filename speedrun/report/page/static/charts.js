// Line charts: series over a shared axis, a cursor for mouse, touch and arrow keys.
//
// options: series [{label, color, points [[x, y]], width, opacity, dash, dots, quiet, steps}],
//          bands [{color, points [[x, low, high]]}], lines [{y, text}], label, height,
//          xForm, yForm, tipForm (how numbers read), xTime (ticks in minutes), yDomain
function lineChart(box, options) {
  return figure(box, (width) => drawLines(options, width));
}

// `box` draws itself once it is on the page and has a width, and again whenever that changes.
function figure(box, draw) {
  box.redraw = () => {
    box.drawnWidth = Math.round(box.clientWidth);
    box.replaceChildren(...[draw(Math.max(260, box.drawnWidth || 900))].flat());
  };
  widths.observe(box);
  return box;
}
const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const width = Math.round(contentRect.width);
    if (width && width !== target.drawnWidth) requestAnimationFrame(target.redraw);
  }
});

function drawLines(options, width) {
  const series = options.series.filter((one) => one.points.length);
  const bands = options.bands || [];
  const narrow = width < 560;
  const height = options.height || (narrow ? 270 : 360);
  const pad = { left: 46, right: narrow ? 10 : 16, top: 12, bottom: 34 };
  const right = width - pad.right;
  const floor = height - pad.bottom;
  const [first, last] = extent([...series, ...bands].flatMap((one) => one.points.map((p) => p[0])));
  const [xLow, xHigh] = last > -Infinity ? [Math.min(0, first), last || 1] : [0, 1];
  const [yLow, yHigh] = options.yDomain || domainOf(series, options.lines);
  const x = scale(xLow, xHigh, pad.left, right);
  const y = scale(yLow, yHigh, floor, pad.top);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
    "aria-label": `${options.label}. Arrow keys move the cursor.`,
  });
  for (const tick of ticks(yLow, yHigh, narrow ? 4 : 6)) {
    picture.append(
      svg("line", { class: "grid", x1: pad.left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: pad.left - 8, y: y(tick) + 4, "text-anchor": "end" }, options.yForm(tick)));
  }
  for (const tick of ticks(xLow, xHigh, narrow ? 3 : 7, options.xTime)) {
    const anchor = x(tick) > right - 22 ? "end" : "middle";
    picture.append(
      svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: floor, y2: floor + 4 }),
      svg("text", { x: Math.min(x(tick), right + 4), y: floor + 18, "text-anchor": anchor }, options.xForm(tick)));
  }
  picture.append(svg("line", { class: "axis", x1: pad.left, x2: right, y1: floor, y2: floor }));
  const frame = { x: pad.left, y: pad.top - 3, width: right - pad.left + 6, height: floor - pad.top + 6 };
  picture.append(clipped(frame, bands.map((band) => bandPath(band, x, y)), series.map((one) => linePath(one, x, y))));
  for (const line of options.lines || []) {
    if (line.y < yLow || line.y > yHigh) continue;
    picture.append(
      svg("line", { class: "target", x1: pad.left, x2: right, y1: y(line.y), y2: y(line.y) }),
      svg("text", { class: "target", x: pad.left + 8, y: y(line.y) - 6 }, line.text));
  }
  const tip = el("div", { class: "tip", hidden: true, "aria-live": "polite" });
  attachCursor(picture, tip, { series: series.filter((one) => !one.quiet), x, y, pad, width, floor, options });
  return [picture, tip];
}

let clips = 0;
function clipped(frame, ...children) {
  const id = `clip-${(clips += 1)}`;
  const area = svg("clipPath", { id }, svg("rect", frame));
  return svg("g", {}, area, svg("g", { "clip-path": `url(#${id})` }, children));
}

function domainOf(series, lines) {
  const values = series.flatMap((one) => one.points.map((p) => p[1]));
  values.push(...(lines || []).map((line) => line.y));
  if (!values.length) return [0, 1];
  const [low, high] = extent(values);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function linePath(one, x, y) {
  const path = one.points.map(([px, py], i) => {
    const across = i > 0 && one.steps ? `H${x(px).toFixed(1)}` : "";
    return `${across}${i ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
  });
  const line = svg("path", {
    class: "series", d: path.join(""), fill: "none", style: `stroke:${one.color}`,
    "stroke-width": one.width || 2, "stroke-opacity": one.opacity || 1, "stroke-dasharray": one.dash,
    "stroke-linejoin": "round", "stroke-linecap": "round",
  });
  const dots = one.dots && one.points.length < 3 ? one.points : []; // a line of one point is no line
  return [line, dots.map(([px, py]) => svg("circle", { cx: x(px), cy: y(py), r: 3.5, style: `fill:${one.color}` }))];
}

function bandPath(band, x, y) {
  const forth = band.points.map(([px, , high]) => `${x(px).toFixed(1)} ${y(high).toFixed(1)}`);
  const back = band.points.map(([px, low]) => `${x(px).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
  if (!forth.length) return null;
  return svg("path", { d: `M${[...forth, ...back].join("L")}Z`, style: `fill:${band.color}`, "fill-opacity": 0.16 });
}

// The value of a series at x: on the line between points (or the step's level), past its ends none.
function valueAt({ points, steps: level }, at) {
  if (at < points[0][0] || at > points.at(-1)[0]) return null;
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= at) low = middle; else high = middle;
  }
  const [x0, y0] = points[low];
  const [x1, y1] = points[high];
  if (level) return at >= x1 ? y1 : y0;
  return x1 === x0 ? y1 : y0 + ((y1 - y0) * (at - x0)) / (x1 - x0);
}

function attachCursor(picture, tip, view) {
  const { series, x, y, pad, width, floor, options } = view;
  const stops = [...new Set(series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b);
  if (!stops.length) return;
  const cursor = svg("g", { visibility: "hidden" });
  picture.append(cursor);
  const end = stops.length - 1;
  let place = end;
  function show(index) {
    place = Math.max(0, Math.min(end, index));
    const at = stops[place];
    const rows = series.map((one) => [one, valueAt(one, at)]).filter(([, value]) => value !== null);
    rows.sort((a, b) => b[1] - a[1]);
    const dots = rows.filter(([, value]) => y(value) > pad.top - 3).map(([one, value]) =>
      svg("circle", { class: "dot", cx: x(at), cy: y(value), r: 4, style: `fill:${one.color}` }));
    cursor.replaceChildren(svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: pad.top, y2: floor }), ...dots);
    cursor.setAttribute("visibility", "visible");
    const form = options.tipForm || options.yForm;
    const lines = rows.slice(0, 12).map(([one, value]) =>
      el("tr", {}, el("td", {}, keyMark(one.color), one.label), el("td", { class: "n" }, form(value))));
    tip.hidden = false;
    tip.replaceChildren(el("strong", {}, options.xForm(at)), el("table", {}, lines));
    const left = x(at) * (picture.clientWidth / width || 1);
    const fits = left + 14 + tip.offsetWidth < picture.clientWidth;
    tip.style.left = `${fits ? left + 14 : Math.max(0, left - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${pad.top + 2}px`;
  }
  function hide() {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  }
  function follow(event) {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const gap = (index) => Math.abs(x(stops[index]) - at);
    show(stops.reduce((best, _, index) => (gap(index) < gap(best) ? index : best), 0));
  }
  const page = Math.max(1, Math.round(stops.length / 20));
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -page, PageUp: page, Home: -end, End: end };
  function move(event) {
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(place + moves[event.key]);
  }
  put(picture, {
    onpointermove: follow, onpointerdown: follow, onpointerleave: hide, onblur: hide, onkeydown: move,
    onfocus: () => { if (picture.matches(":focus-visible")) show(place); },
  });
}

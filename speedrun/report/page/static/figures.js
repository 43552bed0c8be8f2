// Bars with intervals, the forest plot, the event strip, the block-mask picture.

function whisker(x, low, high, middle, color) {
  const [from, to] = [x(low), x(high)];
  const ends = [from, to].map((at) => `M${at} ${middle - 5}V${middle + 5}`).join("");
  const d = `M${from} ${middle}H${to}${ends}`;
  return svg("path", { d, fill: "none", style: `stroke:${color}`, "stroke-width": 1.7 });
}

function verticals(picture, x, marks, top, bottom, form) {
  for (const mark of marks) {
    const anchor = mark === marks[0] && mark === 0 ? "start" : "middle";
    picture.append(
      svg("line", { class: "grid", x1: x(mark), x2: x(mark), y1: top, y2: bottom }),
      svg("text", { x: x(mark), y: bottom + 16, "text-anchor": anchor }, form(mark)));
  }
}

// rows [{label, text, color, mean, low, high, values}]: a bar each, its seeds as circles.
function barFigure(box, rows, form, label) {
  return figure(box, (width) => {
    const tall = 52;
    const height = rows.length * tall + 26;
    const [, most] = extent([1e-9, ...rows.flatMap((row) => [row.mean, row.high, ...row.values]).filter(known)]);
    const x = scale(0, most, 0, width - 14);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    verticals(picture, x, ticks(0, most, width < 560 ? 3 : 6), 0, height - 22, form);
    rows.forEach((row, index) => {
      const top = index * tall + 4;
      const middle = top + 30;
      const name = svg("tspan", { class: "strong" }, row.label);
      picture.append(svg("text", { class: "halo", x: 0, y: top + 12 }, name, svg("tspan", { dx: 10 }, row.text)));
      if (known(row.mean)) {
        picture.append(svg("rect", {
          class: "mean", x: 0, y: middle - 9, width: Math.max(1, x(row.mean)), height: 18, rx: 3,
          style: `fill:${row.color}`, "fill-opacity": 0.82,
        }));
      }
      if (known(row.low)) picture.append(whisker(x, Math.max(0, row.low), row.high, middle, "var(--ink)"));
      const edge = known(row.mean) ? "var(--ink)" : row.color;
      picture.append(...row.values.filter(known).map((value) => svg("circle", {
        cx: x(value), cy: middle, r: 3.6, style: `fill:var(--card);stroke:${edge}`, "stroke-width": 1.4,
      }, svg("title", {}, form(value)))));
    });
    return picture;
  });
}

// rows [{label, text, effect, low, high, verdict}]; verdict 1: it helps, -1: it hurts, 0: open. No effect, no mark.
function forestFigure(box, rows, form, label) {
  const brief = (value) => form(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  const colors = { 1: "var(--good)", "-1": "var(--bad)", 0: "var(--faint)" };
  return figure(box, (width) => {
    const narrow = width < 640; // labels and p-values above the line instead of beside it
    const names = narrow ? 0 : Math.min(300, width * 0.32);
    const notes = narrow ? 0 : 196;
    const tall = narrow ? 62 : 36;
    const height = rows.length * tall + 52;
    const [low, high] = extent([0, ...rows.flatMap((row) => [row.effect, row.low, row.high]).filter(known)]);
    const room = (high - low || 1) * 0.05;
    const x = scale(low - room, high + room, names + 10, width - notes - 12);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    verticals(picture, x, ticks(low - room, high + room, narrow ? 3 : 5), 22, height - 24, brief);
    picture.append(
      svg("line", { x1: x(0), x2: x(0), y1: 18, y2: height - 24, style: "stroke:var(--soft)", "stroke-width": 1.4 }),
      svg("text", { x: x(0) + 7, y: 13 }, "the change hurts →"));
    if (x(0) - names > 150) {
      picture.append(svg("text", { x: x(0) - 7, y: 13, "text-anchor": "end" }, "← the change helps"));
    }
    rows.forEach((row, index) => {
      const top = 24 + index * tall;
      const middle = top + (narrow ? 44 : tall / 2);
      const color = colors[row.verdict];
      const place = narrow ? { x: 0, y: top + 14 } : { x: names, y: middle + 4, "text-anchor": "end" };
      const beside = narrow ? { x: 0, y: top + 30 } : { x: width - notes, y: middle + 4 };
      picture.append(
        svg("text", { class: "strong halo", ...place }, row.label),
        svg("text", { class: "halo", ...beside }, row.text));
      if (known(row.low)) picture.append(whisker(x, row.low, row.high, middle, color));
      if (!known(row.effect)) return;
      picture.append(svg("circle", {
        class: "effect", cx: x(row.effect), cy: middle, r: 5.5, "stroke-width": 2,
        style: `fill:${row.verdict ? color : "var(--card)"};stroke:${color}`,
      }, svg("title", {}, `${row.label}: ${form(row.effect)}`)));
    });
    return picture;
  });
}

const EVENTS = {
  start: { path: "M-4 -6L6 0L-4 6Z", color: "var(--soft)", text: "start" },
  end: { path: "M-5 -5H5V5H-5Z", color: "var(--soft)", text: "end" },
  checkpoint: { path: "M0 -6L6 0L0 6L-6 0Z", color: "var(--accent)", text: "checkpoint" },
  resume: { path: "M0 -6L6 5H-6Z", color: "var(--good)", text: "resume" },
  spike: { path: "M0 -7L5 6H-5Z", color: "var(--bad)", text: "spike" },
  nonfinite: { path: "M-5 -5L5 5M5 -5L-5 5", color: "var(--bad)", text: "not finite", open: true },
  rewind: { path: "M6 -6L-2 0L6 6M-1 -6V6", color: "var(--bad)", text: "rewind", open: true },
};
function eventMark(kind) {
  const circle = "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0";
  return EVENTS[kind] || { path: circle, color: "var(--faint)", text: kind.replaceAll("_", " ") };
}
function eventPath(kind, attributes, ...children) {
  const { path, color, open } = eventMark(kind);
  const style = open ? `fill:none;stroke:${color};stroke-width:2.4` : `fill:${color};stroke:var(--card);stroke-width:1`;
  return svg("path", { d: path, style, ...attributes }, children);
}
const eventIcon = (kind) => svg("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, eventPath(kind));

// rows [{label, color, end, events [{at, kind, title}]}]: one line a run along the shared axis.
function eventFigure(box, rows, axis) {
  return figure(box, (width) => {
    const narrow = width < 640;
    const tall = narrow ? 40 : 27;
    const longest = Math.max(...rows.map((row) => row.label.length));
    const names = narrow ? 0 : Math.min(230, 12 + 6.6 * longest);
    const height = rows.length * tall + 26;
    const [, most] = extent([1e-9, ...rows.map((row) => row.end)]);
    const x = scale(0, most, names + 8, width - 12);
    const label = `Events of each run over ${axis.noun}`;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    verticals(picture, x, ticks(0, most, narrow ? 3 : 7, axis.form === duration), 0, height - 22, axis.form);
    rows.forEach((row, index) => {
      const middle = index * tall + (narrow ? 28 : 15);
      const track = { x1: x(0), x2: x(row.end), y1: middle, y2: middle, style: `stroke:${row.color}` };
      picture.append(
        svg("text", { class: "halo", x: 0, y: narrow ? middle - 13 : middle + 4 }, row.label),
        svg("line", { ...track, "stroke-width": 3, "stroke-opacity": 0.45 }),
        ...row.events.map((event) => {
          const transform = `translate(${x(event.at).toFixed(1)} ${middle})`;
          return eventPath(event.kind, { class: "event", transform }, svg("title", {}, event.title));
        }));
    });
    return picture;
  });
}

// Of a long row the first 48 blocks: all 512 would be a hair along the diagonal.
function shownBlocks(mask) {
  const blocks = mask.frames[0].partial.length;
  return blocks > 64 ? 48 : blocks;
}

// One frame of the mask: query blocks downward, key blocks to the right. The lists of a query block
// are runs that end at the diagonal: partial ones, then full ones, then its own, cut by causality.
function maskPicture(mask, frame) {
  const size = 480;
  const shown = shownBlocks(mask);
  const tokens = Math.min(mask.length, shown * mask.block);
  const unit = size / tokens;
  const at = (token) => (Math.min(token, tokens) * unit).toFixed(2);
  const gap = Math.min(1.2, mask.block * unit * 0.06);
  const paths = { full: [], partial: [] };
  const boxes = (kind, query, from, count) => {
    for (let key = from; key < from + count; key += 1) {
      const [left, top] = [key, query].map((block) => block * mask.block);
      const side = (start) => ((Math.min(start + mask.block, tokens) - start) * unit - gap).toFixed(2);
      const [w, h] = [side(left), side(top)];
      paths[kind].push(`M${at(left)} ${at(top)}h${w}v${h}h-${w}z`);
    }
  };
  for (let query = 0; query < shown; query += 1) {
    const full = query - frame.full[query];
    const partial = full - (frame.partial[query] - 1);
    boxes("partial", query, partial, full - partial);
    boxes("full", query, full, query - full);
    boxes("partial", query, query, 1);
  }
  const pairs = frame.edge.length ? visiblePairs(frame.edge, tokens, at) : "";
  return svg("svg", {
    viewBox: `-1 -1 ${size + 2} ${size + 2}`, role: "img",
    "aria-label": `Blocks of queries (down) against keys (across) at step ${frame.step}`,
  },
  svg("rect", { x: 0, y: 0, width: size, height: size, style: "fill:none;stroke:var(--line)" }),
  svg("path", { d: `M0 0V${size}H${size}Z`, style: "fill:var(--grid)", "fill-opacity": 0.7 }),
  svg("path", { class: "partial", d: paths.partial.join(""), style: "fill:var(--partial)" }),
  svg("path", { class: "full", d: paths.full.join(""), style: "fill:var(--full)" }),
  svg("path", { class: "edge", d: pairs, style: "fill:var(--seen)", "fill-opacity": 0.3 }));
}

// The exact set of visible pairs: from the diagonal back to each query's first key.
function visiblePairs(edge, tokens, at) {
  const sides = edge.map(([query, first, slope], index) => {
    const next = index + 1 < edge.length ? edge[index + 1][0] : tokens;
    return `L${at(first)} ${at(query)}L${at(first + slope * (next - query))} ${at(next)}`;
  });
  return `M0 0${sides.join("")}L${at(tokens)} ${at(tokens)}Z`;
}

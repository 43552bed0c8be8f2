// Runs of a record's recipe against the public logs of that record.

import { el } from "./dom.js";
import { lineChart } from "./lines.js";
import { grouped, known, loss, orDash, signed } from "./numbers.js";
import { hue, numberColumn, table } from "./parts.js";
import { AXES } from "./scales.js";

/** A recipe's name promises nothing: what a run sets otherwise than the record it is laid over.
 * @type {(data: PageData, record: PublishedRecord) => string} */
export function setOtherwise(data, { changed, group, record }) {
  if (!changed.length) return "";
  const most = 8;
  const more = changed.length - most;
  const keys = changed.slice(0, most).join(", ") + (more > 0 ? ` and ${grouped(more)} more` : "");
  return ` ${data.groups[group].label} is set otherwise than record ${record} in ${keys}.`;
}

/** @type {Draw} */
export function publishedSection(data, _, box) {
  for (const record of data.published) {
    const group = data.groups[record.group];
    const color = hue(record.group);
    const borrowed = record.borrowed
      ? ` Only one log of it is public, so the spread is that of record ${record.borrowed}.` : "";
    const length = record.steps !== group.steps
      ? ` The record ran ${grouped(record.steps)} steps, these ${grouped(group.steps)}.` : "";
    box.append(el("p", { class: "say" }, `${group.label} against the public logs of record ${record.record}: `
      + `distance from their mean in standard deviations of one run.${borrowed}${length}`
      + setOtherwise(data, record)));
    const series = record.runs.map((run) => ({
      label: run.name, color, width: 1.8, dots: true,
      points: run.rows.flatMap(({ step, deviations }) => (known(deviations) ? [{ x: step, y: deviations }] : [])),
    }));
    const most = 1.08 * Math.max(3, ...series.flatMap((one) => one.points.map((point) => Math.abs(point.y))));
    if (series.some((one) => one.points.length)) {
      box.append(lineChart(el("div", { class: "chart", id: `published-${record.group}` }), {
        series, height: 220, label: "Deviation from the published mean", yDomain: [-most, most],
        bands: [{ color, points: record.points.map((point) => ({ x: point.step, low: -2, high: 2 })) }],
        xFormat: AXES.steps.format, yFormat: (value) => signed(value, 0),
        tipFormat: (value) => `${signed(value, 2)} sd`,
      }));
    }
    box.append(...record.runs.map((run) => el("details", {}, el("summary", {}, run.name), table(run.rows, [
      numberColumn("step", (row) => grouped(row.step)),
      numberColumn("loss", (row) => loss(row.loss)),
      numberColumn("published", (row) => loss(row.published)),
      numberColumn("difference", (row) => signed(row.loss - row.published, 4)),
      numberColumn("standard deviations", (row) => orDash(row.deviations, (value) => signed(value, 2))),
    ]))));
  }
}

// Types of the page's scripts, for the type checker alone: `make lint` reads this file, no page
// and no wheel holds it. First the data as `page_data` (build.py) makes it, then what the scripts
// hand each other. A number that is not finite arrives as null; a key marked ? may be missing.

type Maybe<T> = T | null | undefined;
type Values = (number | null)[];
/** Numbers by name, each of which may be null or missing. */
type Numbers<Name extends string> = { [name in Name]?: number | null };

interface PageData {
  title: string;
  live: boolean;
  target: number | null;
  groups: Group[];
  runs: Run[];
  raced: boolean;
  race: Race | null;
  ablation: Ablation | null;
  tuning: Tuning | null;
  published: PublishedRecord[];
  diff: { key: string; values: string[] }[];
  masks: Mask[];
  plans: Planned[];
}

/** Runs that differ in their seed alone. Others refer to a group by its index. */
interface Group {
  label: string;
  recipe: string;
  track: string;
  steps: number;
  batch_tokens: number;
  validation_every: number;
  optimizer: string;
  own_code: string;
  schedules: Record<ScheduleName, [step: number, value: number][]>;
}
/** Of a group on GPUs that need not be there: seconds, bytes of one GPU, and shares of the step. */
interface Planned {
  group: number;
  machine: string;
  step: number;
  run: number;
  passes: number;
  tokens_per_second: number;
  mfu: number;
  memory: number;
  room: number;
  fits: boolean;
  parts: [kind: string, share: number][];
}
type ScheduleName = "lr" | "momentum" | "window";

interface Run {
  name: string;
  path: string;
  group: number;
  seed: number;
  status: string;
  steps: number;
  total_steps: number;
  batch_tokens: number;
  jobs: number;
  val: Clocks & { loss: Values; bits_per_byte: Values };
  train: Clocks & { loss: Values; tokens_per_second: Values; peak_share: Values; stretch: number[] };
  events: RunEvent[];
  samples: { prompt: string; text: string }[];
  summary: Summary;
  peak_flops: number | null;
  wait_share: number | null;
  command: string;
  environment: { gpu?: string; cpu?: string; [fact: string]: unknown };
}
/** Columns of a curve: where each of its points is, by every measure of the horizontal axis. */
type Clocks = Record<ClockName, number[]>;
type ClockName = "step" | "tokens" | "seconds" | "wall_seconds";

type RunEvent = Record<ClockName, number | null> & { kind: string; detail: string };
interface Summary extends Numbers<"params" | "tokens_per_second" | "val_tokens" | "peak_share" | "peak_seconds"
  | "peak_memory_bytes" | "target" | RaceMetric> {
  [fact: string]: unknown;
}

interface Race {
  target: number;
  command: string | null;
  recipes: string[];
  groups: (number | null)[];
  metrics: Partial<Record<RaceMetric, RaceRow[]>>;
  final: RaceRow[];
  test: RaceRow[] | null;
  finished: boolean;
  verdicts: string[];
}
type RaceMetric = "tokens_to_target" | "steps_to_target" | "seconds_to_target" | "wall_seconds_to_target";
/** One recipe by one metric; means and ratios only where every seed reached the target. */
interface RaceRow extends Numbers<"mean" | "std" | "low" | "high" | "ratio" | "ratio_low" | "ratio_high"> {
  cell?: number | null;
  values: Values;
  n: number;
  reached: number;
  ratio_method?: "paired" | "Welch" | null;
}

interface Ablation {
  recipe: string | null;
  track: string | null;
  seeds: number | null;
  command: string | null;
  alpha: number | null;
  margin?: number | null;
  until?: string | null;
  settings: Record<string, string[]> | null;
  effects: Effect[];
}
interface Effect
  extends Numbers<"std" | "low" | "high" | "p" | "p_holm" | "p_equal" | "n" | "of" | "more_seeds"> {
  switch: string;
  metric: string;
  effect: number | null;
  decided?: boolean | null;
  verdict?: string | null;
  note?: string;
}

/** A search for the best values of some keys; `best` is the number of a trial. */
interface Tuning {
  recipe: string;
  track: string;
  command: string | null;
  over: SearchRange[];
  budget: { trials: number | null; seconds: number | null };
  seconds: number | null;
  seeds: number[];
  rows: string;
  settings: string[];
  file: string;
  trials: Trial[];
  stopped: number;
  best: number | null;
  /** Keys whose best value lies at the end of its range. */
  edges: string[];
}
type SearchRange = { key: string; low: number; high: number; log: boolean };
interface Trial {
  /** 0: the recipe as it stands. */
  number: number;
  values: Record<string, number>;
  box: number | null;
  losses: Values;
  loss: number | null;
  diverged: boolean;
}

interface PublishedRecord {
  group: number;
  record: number;
  changed: string[];
  steps: number;
  borrowed: number | null;
  points: { step: number; tokens: number; seconds: number; mean: number; std: number | null; n: number }[];
  runs: { name: string; rows: Deviation[] }[];
}
type Deviation = { step: number; loss: number; published: number; std: number | null; deviations: number | null };

interface Mask {
  groups: number[];
  length: number;
  block: number;
  rule: "none" | "tokens" | "blocks";
  documents: boolean;
  real: boolean;
  frames: MaskFrame[];
}
interface MaskFrame {
  step: number;
  window: number | null;
  partial: number[];
  full: number[];
  visible: number;
  edge: [query: number, first: number, slope: number][];
}

/** What the reader has chosen. */
interface State {
  axis: AxisName;
  curve: "val" | "train";
  range: "detail" | "whole";
  rate: "tokens" | "share";
  effect: string;
  hidden: Set<number>;
  mask: number | null;
  frame: number | null;
}
type AxisName = "tokens" | "steps" | "seconds" | "wall";

/** Fills its box, which stays empty and hidden if there is nothing to show. */
type Draw = (data: PageData, state: State, box: HTMLElement, redraw: () => void) => void;
interface Section {
  id: string;
  heading: string;
  link: string;
  draw: Draw;
  followsAxis?: boolean;
}

type Format = (value: number) => string;
type Scale = (value: number) => number;

/** A measure of the horizontal axis: the column of a curve, and the metric of a race. */
interface Axis {
  label: string;
  noun: string;
  column: ClockName;
  metric: RaceMetric;
  format: Format;
  isTime?: boolean;
}

/** null, undefined and false are left out; `on...` is a listener. */
type Attributes = Record<string, string | number | boolean | null | undefined | ((event: any) => void)>;
type Child = Node | string | number | false | null | undefined | Child[];

/** A column of a table: a cell is what goes into it, or a whole <td>. */
interface Column<Row> {
  title: string;
  class?: string;
  cell: (row: Row, index: number) => Child;
}

type Point = { x: number; y: number };
interface Series {
  label: string;
  color: string;
  points: Point[];
  width?: number;
  opacity?: number;
  dash?: string | null;
  /** Mark the points of a curve that has too few for a line. */
  dots?: boolean;
  /** The cursor passes over it. */
  quiet?: boolean;
  /** Level between points instead of sloping. */
  stepped?: boolean;
}
type Band = { color: string; points: { x: number; low: number; high: number }[] };
type Line = { y: number; text: string };
interface Chart {
  label: string;
  series: Series[];
  bands?: Band[];
  lines?: Line[];
  height?: number;
  xFormat: Format;
  xIsTime?: boolean;
  yFormat: Format;
  /** How the cursor reads values; yFormat unless given. */
  tipFormat?: Format;
  yDomain?: [low: number, high: number] | null;
}

/** One range of a tuning, with all trials. */
interface Scatter {
  range: SearchRange;
  trials: Trial[];
  best: Trial | undefined;
  label: string;
}

interface Bar extends Numbers<"mean" | "low" | "high"> {
  label: string;
  text: string;
  color: string;
  values: Values;
}
interface ForestRow extends Numbers<"effect" | "low" | "high"> {
  label: string;
  text: string;
  /** 1: the change is settled to hurt, -1: to help, 0: open or equal. */
  verdict: number;
  settled?: string | null;
}

// What is shown: which stretch of time, which step, which ranks; where lanes stand.

let model; // see modelOf
const labelOf = (i) => model.labels[model.label[i]];
const rankOf = (i) => model.ranks[model.rankOf[i]];

const view = {
  from: 0,
  to: 1, // ns
  step: 0, // its number; 0: all
  hidden: new Set(), // axes
  ops: true,
  arrows: true,
  group: null, // ranks that are shown; null: all
  query: "",
  matches: null, // of labels
  selected: -1,
  hovered: -1, // spans
  cursor: null, // ns
  memoryRank: 0,
};

const surfaces = {}; // canvases by id: pen, width, height in CSS pixels
let colours = {};
let patterns = {};
let lanes = []; // of the ranks that are shown: rank, top, height, rows with top and height
const ROW = { action: 20, op: 14, message: 14, copy: 7 };
const LANE_GAP = 10;

const stepFacts = (number) => facts.steps.find((step) => step.step === number);

/** The stretch of time of the step that is picked, or of the whole trace. */
function scope() {
  const step = stepFacts(view.step);
  return step ? [step.start, step.stop] : [0, model.end];
}

const gutter = () => (surfaces.base.width < 640 ? 62 : 128);
const margin = () => (surfaces.base.width < 640 ? 8 : 112);
const plotWidth = () => Math.max(10, surfaces.base.width - gutter() - margin());
const scale = () => plotWidth() / (view.to - view.from);
const xOf = (time) => gutter() + (time - view.from) * scale();
const timeAt = (x) => view.from + (x - gutter()) / scale();

/** Show a stretch of time; kept within the trace and not shorter than a microsecond. */
function show(from, to) {
  const room = 0.02 * model.end;
  const length = between(to - from, 1000, model.end + 2 * room);
  const start = between((from + to - length) / 2, -room, model.end + room - length);
  view.from = start;
  view.to = start + length;
  hideTip();
  redraw();
}

function showScope() {
  const [from, to] = scope();
  const room = 0.015 * (to - from);
  show(from - room, to + room);
}

function zoom(factor, x = gutter() + plotWidth() / 2) {
  const at = timeAt(x);
  const length = between((view.to - view.from) * factor, 1000, 1.04 * model.end);
  const share = (at - view.from) / (view.to - view.from);
  show(at - share * length, at + (1 - share) * length);
}

const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

function pickStep(number, fit = true) {
  view.step = stepFacts(number) ? number : 0;
  byId("step").value = String(view.step);
  const at = facts.steps.findIndex((step) => step.step === view.step);
  byId("step-before").disabled = at === 0 || !facts.steps.length;
  byId("step-after").disabled = at === facts.steps.length - 1;
  measureShares();
  fillTraffic();
  fillDetails();
  drawLoss();
  if (fit) showScope();
  remember();
}

function stepBeside(by) {
  if (!facts.steps.length) return;
  const at = facts.steps.findIndex((step) => step.step === view.step);
  const next = at < 0 ? (by > 0 ? 0 : facts.steps.length - 1) : between(at + by, 0, facts.steps.length - 1);
  pickStep(facts.steps[next].step);
}

/** Put the place into the address, so that it can be handed on. */
function remember() {
  const parts = [];
  if (view.step) parts.push("step=" + view.step);
  if (view.selected >= 0) parts.push("span=" + view.selected);
  try {
    history.replaceState(null, "", "#" + parts.join("&"));
  } catch {
    /* a page without an address of its own */
  }
}

function recall() {
  const found = {};
  for (const part of location.hash.slice(1).split("&")) {
    const [name, value] = part.split("=");
    if (/^[0-9]{1,9}$/.test(value || "")) found[name] = Number(value);
  }
  return found;
}

/** Where each rank's lane and its rows stand. */
function layOut() {
  lanes = [];
  let top = 4;
  for (const rank of model.ranks) {
    if (view.group && !view.group.includes(rank.rank)) continue;
    const lane = { rank, top, rows: [] };
    let y = top;
    for (const row of rank.rows) {
      if (row.kind === "op" && !view.ops) continue;
      lane.rows.push({ ...row, top: y, height: ROW[row.kind], rank });
      y += ROW[row.kind] + 1;
    }
    lane.height = y - top;
    lanes.push(lane);
    top = y + LANE_GAP;
  }
  const total = top - LANE_GAP + 6;
  byId("tall").style.height = total + "px";
  byId("lanes").style.height = Math.min(total, Math.max(220, 0.68 * innerHeight)) + "px";
  measureSurfaces();
}

/** How the time of the picked step went by, on each rank. */
function measureShares() {
  const [from, to] = scope();
  for (const rank of model.ranks) {
    const time = { compute: 0, moving: 0, waiting: 0 };
    for (let i = rank.from; i < rank.to; i++) {
      const start = Math.max(model.start[i], from);
      const stop = Math.min(model.stop[i], to);
      if (stop <= start) continue;
      const label = labelOf(i);
      if (label.kind === "action" && model.parent[i] < 0) time.compute += stop - start;
      if (!isMessage(label)) continue;
      const until = between(waitsUntil(i), start, stop);
      time.waiting += until - start;
      time.moving += stop - until;
      if (label.action) time.compute -= stop - start; // it lies inside an action
    }
    const whole = Math.max(1, to - from);
    rank.share = {
      compute: Math.max(0, time.compute / whole),
      moving: time.moving / whole,
      waiting: time.waiting / whole,
    };
  }
}

/** Until when the span of a message waits for another rank; from then on bytes move. */
const waitsUntil = (i) => model.start[i] + model.waited[i];

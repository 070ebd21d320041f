// Pointer and keys.

let dragged = null;

/** The span under a point of the lanes; -1: none. */
function spanAt(x, y) {
  if (x < gutter() || x > gutter() + plotWidth()) return -1;
  const inLanes = y + byId("lanes").scrollTop;
  const at = timeAt(x);
  const near = 2.5 / scale();
  for (const lane of lanes) {
    for (const row of lane.rows) {
      if (inLanes < row.top - 0.5 || inLanes > row.top + row.height + 0.5) continue;
      const first = row.kind === "copy" ? 0 : firstAt(row.spans, at - near); // copies may overlap
      let best = -1;
      for (let n = first; n < row.spans.length && model.start[row.spans[n]] <= at + near; n++) {
        const i = row.spans[n];
        if (model.start[i] <= at && model.stop[i] >= at) return i;
        if (model.stop[i] >= at - near) best = i;
      }
      return best;
    }
  }
  return -1;
}

const pointIn = (event, element) => {
  const box = element.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

function onMove(event) {
  const [x, y] = pointIn(event, byId("lanes"));
  if (dragged) {
    dragged.x = x;
    dragged.moved = dragged.moved || Math.hypot(x - dragged.startX, event.clientY - dragged.startY) > 3;
    if (dragged.moved && !dragged.select) {
      show(dragged.from - (x - dragged.startX) / scale(), dragged.to - (x - dragged.startX) / scale());
      if (!dragged.onRuler) byId("lanes").scrollTop = dragged.scroll - (event.clientY - dragged.startY);
    } else drawOver();
    return;
  }
  view.cursor = x >= gutter() && x <= gutter() + plotWidth() ? timeAt(x) : null;
  view.hovered = event.currentTarget === byId("lanes") ? spanAt(x, y) : -1;
  drawOver();
  drawMemory();
  if (view.hovered >= 0) showTip(view.hovered, event.clientX, event.clientY);
  else hideTip();
}

function onDown(event) {
  if (event.button !== 0) return;
  const onRuler = event.currentTarget === byId("ruler");
  const [x] = pointIn(event, byId("lanes"));
  if (!onRuler && x > byId("lanes").clientWidth) return; // the scroll bar
  dragged = {
    startX: x,
    x,
    startY: event.clientY,
    from: view.from,
    to: view.to,
    moved: false,
    onRuler,
    select: onRuler || event.shiftKey,
    scroll: byId("lanes").scrollTop,
  };
  event.currentTarget.setPointerCapture(event.pointerId);
  hideTip();
}

function onUp(event) {
  if (!dragged) return;
  const was = dragged;
  dragged = null;
  if (was.moved && was.select && Math.abs(was.x - was.startX) > 3) {
    const [a, b] = [timeAt(was.startX), timeAt(was.x)].sort((p, q) => p - q);
    show(a, b);
  } else if (!was.moved && !was.onRuler) {
    const [x, y] = pointIn(event, byId("lanes"));
    select(spanAt(x, y));
  }
  redraw();
}

function onLeave() {
  view.cursor = null;
  view.hovered = -1;
  hideTip();
  drawOver();
  drawMemory();
}

function onWheel(event) {
  const lines = event.deltaMode === 1 ? 16 : 1;
  const [x] = pointIn(event, byId("lanes"));
  if (event.shiftKey) byId("lanes").scrollTop += lines * (event.deltaY || event.deltaX);
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((lines * event.deltaX) / plotWidth());
  else zoom(Math.exp(between(lines * event.deltaY, -200, 200) * 0.0025), x);
  event.preventDefault();
}

/** The overview: a press beside the frame draws a new one, a press inside moves it. */
function watchOverview() {
  const canvas = byId("overview");
  const at = (event) => ((pointIn(event, canvas)[0] - gutter()) / plotWidth()) * model.end;
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    const time = at(event);
    held = { time, inside: time > view.from && time < view.to, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const by = at(event) - held.time;
    held.moved = held.moved || Math.abs(by) > (3 / plotWidth()) * model.end;
    if (!held.moved) return;
    if (held.inside) show(held.from + by, held.to + by);
    else show(Math.min(held.time, held.time + by), Math.max(held.time, held.time + by));
  });
  canvas.addEventListener("pointerup", () => {
    const step = held && !held.moved && facts.steps.find((one) => one.start <= held.time && held.time <= one.stop);
    if (step) pickStep(step.step);
    held = null;
  });
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const inLanes = document.activeElement === byId("lanes") || document.activeElement === document.body;
  const action = event.shiftKey && walks[event.key] ? walks[event.key] : keys[event.key];
  if (!action || (event.key.startsWith("Arrow") && !inLanes)) return;
  action();
  event.preventDefault();
}

const walks = {
  ArrowLeft: () => walk(-1, 0),
  ArrowRight: () => walk(1, 0),
  ArrowUp: () => walk(0, -1),
  ArrowDown: () => walk(0, 1),
};
const keys = {
  a: () => pan(-0.2),
  d: () => pan(0.2),
  ArrowLeft: () => pan(-0.2),
  ArrowRight: () => pan(0.2),
  w: () => zoom(0.7),
  s: () => zoom(1 / 0.7),
  "+": () => zoom(0.7),
  "=": () => zoom(0.7),
  "-": () => zoom(1 / 0.7),
  ArrowUp: () => (byId("lanes").scrollTop -= 60),
  ArrowDown: () => (byId("lanes").scrollTop += 60),
  "[": () => stepBeside(-1),
  "]": () => stepBeside(1),
  f: fit,
  0: () => pickStep(0),
  m: () => otherEnd(),
  n: () => nextMatch(1),
  p: () => nextMatch(-1),
  o: () => toggle("ops"),
  x: () => toggle("arrows"),
  "/": () => byId("search").focus(),
  "?": () => byId("help").showModal(),
  Escape: () => select(-1),
};

/** Show the selected span with room around it, else the step. */
function fit() {
  if (view.selected < 0) return showScope();
  const [from, to] = [model.start[view.selected], model.stop[view.selected]];
  const room = Math.max(0.25 * (to - from), 2000);
  show(from - room, to + room);
}

/** Select the span beside (by columns) or in the row above or below (by rows) of the selected one. */
function walk(columns, rows) {
  const all = lanes.flatMap((lane) => lane.rows).filter((row) => row.spans.length);
  if (!all.length) return;
  let at = all.findIndex((row) => view.selected >= 0 && has(row.spans, view.selected));
  const middle = at < 0 ? (view.from + view.to) / 2 : (model.start[view.selected] + model.stop[view.selected]) / 2;
  if (at < 0) at = 0;
  else at = between(at + rows, 0, all.length - 1);
  const spans = all[at].spans;
  let place =
    rows || view.selected < 0 || !has(spans, view.selected) ? nearest(spans, middle) : spans.indexOf(view.selected);
  place = between(place + columns, 0, spans.length - 1);
  for (let n = place; n >= 0 && n < spans.length && columns; n += columns) {
    if (!isLit(labelOf(spans[n]))) continue;
    place = n;
    break;
  }
  select(spans[place]);
  reveal(spans[place]);
}

function nearest(spans, at) {
  const first = firstAt(spans, at);
  return first + 1 < spans.length &&
    model.stop[spans[first]] < at &&
    model.start[spans[first + 1]] - at < at - model.stop[spans[first]]
    ? first + 1
    : first;
}

/** Move the timeline, if need be, so that a span is seen. */
function reveal(i) {
  if (i < 0) return;
  const rank = rankOf(i);
  if (view.group && !view.group.includes(rank.rank)) setGroup("");
  if (isOp(labelOf(i)) && !view.ops) toggle("ops");
  const length = view.to - view.from;
  const [from, to] = [model.start[i], model.stop[i]];
  if (to - from > length) show(from - 0.1 * (to - from), to + 0.1 * (to - from));
  else if (from < view.from || to > view.to) show((from + to - length) / 2, (from + to + length) / 2);
  const box = boxOf(i, 0);
  const list = byId("lanes");
  if (box && box.y < list.scrollTop) list.scrollTop = box.y - 8;
  if (box && box.y + box.height > list.scrollTop + list.clientHeight)
    list.scrollTop = box.y + box.height + 8 - list.clientHeight;
  redraw();
}

function goTo(i) {
  select(i);
  reveal(i);
}

function otherEnd() {
  const i = view.selected;
  if (i < 0) return;
  const pair = model.pairOf[i];
  if (pair >= 0) return goTo(model.sent[pair] === i ? model.got[pair] : model.sent[pair]);
  const meeting = model.meetings[model.meetingOf[i]];
  if (!meeting) return;
  const mine = meeting.findIndex(({ call, done }) => call === i || done === i);
  goTo(meeting[(mine + 1) % meeting.length].call);
}

function toggle(name) {
  view[name] = !view[name];
  byId("show-" + name).setAttribute("aria-pressed", String(view[name]));
  layOut();
  redraw();
}

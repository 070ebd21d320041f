// The timeline: a lane for each rank, and its rows of spans.

let drawing = 0;

/** Draw everything again, once, before the next frame. */
function redraw() {
  if (!drawing) drawing = requestAnimationFrame(drawAll);
}

function drawAll() {
  drawing = 0;
  drawLanes();
  drawRuler();
  drawOverview();
  drawMemory();
  drawOver();
}

function measureSurfaces() {
  for (const id of ["overview", "ruler", "base", "over", "memory", "loss"]) {
    const canvas = byId(id);
    const inLanes = id === "base" || id === "over";
    const box = inLanes ? byId("lanes") : canvas;
    const width = Math.max(50, box.clientWidth);
    const height = Math.max(20, box.clientHeight);
    const dense = Math.min(3, devicePixelRatio || 1);
    const [w, h] = [Math.round(width * dense), Math.round(height * dense)];
    if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    if (inLanes) [canvas.style.width, canvas.style.height] = [width + "px", height + "px"];
    const pen = canvas.getContext("2d");
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    surfaces[id] = { pen, width, height };
  }
}

/** A clean canvas, with the pen as all begin. */
function fresh(id) {
  const surface = surfaces[id];
  surface.pen.clearRect(0, 0, surface.width, surface.height);
  surface.pen.font = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
  surface.pen.textBaseline = "middle";
  surface.pen.textAlign = "left";
  surface.pen.globalAlpha = 1;
  return surface;
}

/** The first place in a row whose span may still be seen at a time. */
function firstAt(spans, time) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (model.start[spans[middle]] < time) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

function drawLanes() {
  const { pen, width, height } = fresh("base");
  const scroll = byId("lanes").scrollTop;
  drawBands(pen, height);
  pen.save();
  pen.beginPath();
  pen.rect(gutter(), 0, plotWidth(), height);
  pen.clip();
  for (const lane of lanes) {
    const y = lane.top - scroll;
    if (y + lane.height < 0 || y > height) continue;
    for (const row of lane.rows) drawRow(pen, row, row.top - scroll, row.height);
  }
  if (view.arrows) drawArrows(pen, scroll, height);
  pen.restore();
  for (const lane of lanes) {
    const y = lane.top - scroll;
    if (y + lane.height < 0 || y > height) continue;
    drawName(pen, lane, y);
    if (margin() > 20) drawShares(pen, lane.rank, y, width);
    pen.fillStyle = colours.line;
    pen.fillRect(0, Math.round(y + lane.height + LANE_GAP / 2) - 0.5, width, 1);
  }
}

/** Steps as light bands behind everything. */
function drawBands(pen, height) {
  facts.steps.forEach((step, at) => {
    const left = Math.max(gutter(), xOf(step.start));
    const right = Math.min(gutter() + plotWidth(), xOf(step.stop));
    if (right <= left) return;
    if (at % 2 === 0) {
      pen.fillStyle = colours.panel;
      pen.fillRect(left, 0, right - left, height);
    }
    if (xOf(step.start) >= gutter()) {
      pen.fillStyle = colours.line;
      pen.fillRect(Math.round(left), 0, 1, height);
    }
  });
  pen.globalAlpha = 0.55;
  pen.fillStyle = colours.line;
  for (const { x } of ticks()) if (x > gutter()) pen.fillRect(Math.round(x), 0, 1, height);
  pen.globalAlpha = 1;
}

/** One row of spans.  Where several fall on one pixel the first of them is drawn. */
function drawRow(pen, row, y, height) {
  const { start, stop, label, labels } = model;
  const spans = row.spans;
  const left = gutter();
  const k = scale();
  const zero = left - view.from * k;
  let edge = -1e9;
  for (let at = row.kind === "copy" ? 0 : firstAt(spans, view.from); at < spans.length; at++) {
    const i = spans[at];
    if (start[i] > view.to) break;
    const x = start[i] * k + zero;
    const end = stop[i] * k + zero;
    if (end < left || end < edge + 0.5) continue;
    const what = labels[label[i]];
    const lit = isLit(what);
    const from = Math.max(x, edge, left - 2);
    const wide = Math.max(end - from, 0.8);
    pen.globalAlpha = lit ? 1 : DIM;
    if (row.kind === "message") drawMessage(pen, i, what, from, y, wide, height, k, zero);
    else {
      pen.fillStyle = what.fill;
      pen.fillRect(from, y, wide > 3 ? wide - 1 : wide, height);
    }
    edge = from + wide;
    if (wide > 14 && height > 10) write(pen, what, from, y, wide, height, lit, i);
  }
  pen.globalAlpha = 1;
}

/** A message: striped while it waits for another rank, then filled. */
function drawMessage(pen, i, what, from, y, wide, height, k, zero) {
  const gap = wide > 3 ? 1 : 0;
  const until = between(waitsUntil(i) * k + zero, from, from + wide);
  pen.fillStyle = what.fill;
  if (until > from + 1) {
    pen.fillStyle = stripes(what.fill);
    pen.fillRect(from, y, until - from - (until >= from + wide ? gap : 0), height);
    pen.fillStyle = what.fill;
    pen.fillRect(from, y + height - 1.5, until - from - (until >= from + wide ? gap : 0), 1.5);
  }
  if (until < from + wide) pen.fillRect(until, y, Math.max(0.8, from + wide - until - gap), height);
}

/** What stands in a span's box: its name, or of an action its micro-batch, or nothing. */
function write(pen, what, x, y, wide, height, lit, i) {
  if (what.wide === undefined) what.wide = pen.measureText(what.name).width / Math.max(1, what.name.length);
  const room = wide - 6;
  let text = namesOf(what).find((name) => name.length * what.wide <= room);
  if (text === undefined) {
    const letters = Math.floor(room / what.wide) - 1;
    if (letters < 3 || ("FBW".includes(what.action) && what.kind === "action")) return;
    text = what.name.slice(0, letters) + "\u2026";
  }
  const size = text.length * what.wide;
  pen.globalAlpha = lit ? 1 : 0.35;
  if (isMessage(what)) {
    const until = xOf(waitsUntil(i));
    if (until > x + 1) {
      // On stripes a name needs a quiet ground.
      const shown = Math.min(size, room) + 6;
      pen.fillStyle = colours.back;
      pen.globalAlpha *= 0.82;
      pen.fillRect(x + 1, y + 1, Math.min(shown, wide - 3), height - 3);
      pen.globalAlpha = lit ? 1 : 0.35;
      pen.fillStyle = colours.text;
    } else pen.fillStyle = what.ink;
  } else pen.fillStyle = lit ? what.ink : colours.quiet;
  pen.fillText(text, Math.max(x, gutter()) + 3.5, y + height / 2 + 0.5);
}

/** What may stand in the box of a label: its name; for an action without its stage; of F3@1 at least the 3. */
function namesOf(what) {
  if (what.kind !== "action") return [what.name];
  const [short] = what.name.split("@");
  return [what.name, short, ...("FBW".includes(what.action) ? [short.replace(/^[A-Z_]+/, "")] : [])];
}

/** A rank's name and its place on the axes, left of its lane. */
function drawName(pen, lane, y) {
  const { rank } = lane;
  pen.fillStyle = colours.text;
  pen.font = "600 12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
  pen.fillText((gutter() > 100 ? "rank " : "") + rank.rank, 12, y + 10);
  pen.font = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
  if (gutter() < 100 || lane.height < 28) return;
  pen.fillStyle = colours.quiet;
  const words = coordinates(rank);
  if (model.hosts.length > 1) words.push(rank.host);
  let line = y + 26;
  for (let text = ""; words.length || text;) {
    const more = words.length ? (text ? text + "  " : "") + words[0] : "";
    if (words.length && (!text || pen.measureText(more).width < gutter() - 22)) {
      text = more;
      words.shift();
      continue;
    }
    if (line < y + lane.height) pen.fillText(clipped(pen, text, gutter() - 18), 12, line);
    line += 13;
    text = "";
  }
}

function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text && pen.measureText(text + "\u2026").width > room) text = text.slice(0, -1);
  return text + "\u2026";
}

/** Where a rank stands on the axes of more than one rank: `pp 0`, `tp 1`. */
function coordinates(rank) {
  return Object.entries(rank.axes)
    .filter(
      ([name, ranks]) => name !== "world" && ranks.length > 1 && !(name.includes("+") && ranks.length === facts.size),
    )
    .sort((a, b) => axisPlace(a[0]) - axisPlace(b[0]))
    .map(([name, ranks]) => name + " " + ranks.indexOf(rank.rank));
}

/** Right of a lane: which share of the step the rank computed, sent, waited. */
function drawShares(pen, rank, y, width) {
  const left = width - margin() + 12;
  const long = margin() - 28;
  const { compute, moving, waiting } = rank.share;
  pen.fillStyle = colours.faint;
  pen.fillRect(left, y + 2, long, 8);
  let x = left;
  for (const [share, fill] of [
    [compute, colours.forward],
    [moving, colours.quiet],
    [waiting, stripes(colours.quiet)],
  ]) {
    const wide = Math.min(share * long, left + long - x);
    pen.fillStyle = fill;
    pen.fillRect(x, y + 2, wide, 8);
    x += wide;
  }
  pen.fillStyle = colours.quiet;
  // A script of one's own may have no actions: what it computes is then not known.
  const lines = rank.rows[0].spans.length ? [percent(compute) + " computes"] : [];
  lines.push(percent(waiting) + " waits");
  lines.slice(0, lanes[0].height > 40 ? 2 : 1).forEach((line, n) => pen.fillText(line, left, y + 19 + 13 * n));
}

const percent = (share) => (100 * share).toFixed(0) + " %";

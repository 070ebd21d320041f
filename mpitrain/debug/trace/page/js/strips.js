// The strips above and below the lanes, which share their axis of time: ruler, overview, memory.

/** Round times from the beginning of the step, and where they stand. */
function ticks() {
  const origin = scope()[0];
  const found = [];
  const gap = roundTime((view.to - view.from) / Math.max(2, plotWidth() / 110));
  for (let n = Math.ceil((view.from - origin) / gap); origin + n * gap <= view.to; n++)
    found.push({ x: xOf(origin + n * gap), text: time(n * gap, gap) });
  return found;
}

function drawRuler() {
  const { pen, width, height } = fresh("ruler");
  pen.fillStyle = colours.quiet;
  pen.fillText(view.step ? "step " + view.step : "time", 12, height / 2);
  for (const { x, text } of ticks()) {
    pen.fillStyle = colours.line;
    pen.fillRect(Math.round(x), height - 6, 1, 6);
    pen.fillStyle = colours.quiet;
    if (x + pen.measureText(text).width / 2 < gutter() + plotWidth() + 4) centred(pen, text, x, height / 2 - 2);
  }
  if (margin() > 20) pen.fillText(view.step ? "share of step" : "share of time", width - margin() + 12, height / 2);
}

function centred(pen, text, x, y) {
  pen.textAlign = "center";
  pen.fillText(text, Math.max(x, gutter()), y);
  pen.textAlign = "left";
}

/** A round length of time that is not shorter. */
function roundTime(length) {
  const power = 10 ** Math.floor(Math.log10(Math.max(length, 1)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= length * 0.999);
}

/** Nanoseconds as text, with as many digits as an exactness asks for. */
function time(ns, exact = Math.abs(ns) / 100) {
  const size = Math.abs(ns);
  const [unit, name] = size >= 999999500 ? [1e9, "s"] : size >= 999950 || exact >= 1e6 ? [1e6, "ms"] : [1e3, "\u00b5s"];
  const digits = between(Math.ceil(-Math.log10(Math.max(exact, 1) / unit) - 1e-9), 0, unit === 1e3 ? 1 : 3);
  return (ns / unit).toFixed(digits) + " " + name;
}

function bytesText(bytes) {
  if (bytes >= 999.5e6) return (bytes / 1e9).toPrecision(3) + " GB";
  if (bytes >= 999.5e3) return (bytes / 1e6).toPrecision(3) + " MB";
  if (bytes >= 999.5) return (bytes / 1e3).toPrecision(3) + " kB";
  return Math.round(bytes) + " B";
}

let overviewKept = { key: "" }; // its picture, which is the same until the window or the colours change

/** The actions of all ranks in the whole trace, small. */
function overviewPicture(height) {
  const canvas = byId("overview");
  const key = [canvas.width, canvas.height, gutter(), plotWidth(), colours.back].join();
  if (overviewKept.key === key) return overviewKept.picture;
  const picture = document.createElement("canvas");
  const pen = picture.getContext("2d");
  [picture.width, picture.height] = [canvas.width, canvas.height];
  pen.scale(canvas.width / surfaces.overview.width, canvas.height / height);
  const left = gutter();
  const k = plotWidth() / model.end;
  const tall = between((height - 18) / model.ranks.length, 1, 5);
  model.ranks.forEach((rank, at) => {
    // What is no action, as messages of a start or of sampling, is grey.
    for (const row of rank.rows.filter((one) => one.kind === "message" || one.kind === "action").reverse()) {
      let edge = -1;
      pen.globalAlpha = row.kind === "action" ? 0.95 : 0.3;
      for (const i of row.spans) {
        const x = left + model.start[i] * k;
        const end = left + model.stop[i] * k;
        if (end < edge + 0.6) continue;
        pen.fillStyle = row.kind === "action" ? labelOf(i).fill : colours.quiet;
        pen.fillRect(
          Math.max(x, edge),
          15 + at * tall,
          Math.max(0.7, end - Math.max(x, edge)),
          Math.max(1, tall - 0.5),
        );
        edge = Math.max(end, x + 0.7);
      }
    }
  });
  overviewKept = { key, picture };
  return picture;
}

/** The whole trace; what the timeline shows of it stands in a frame. */
function drawOverview() {
  const { pen, width, height } = fresh("overview");
  const left = gutter();
  const k = plotWidth() / model.end;
  pen.drawImage(overviewPicture(height), 0, 0, width, height);
  pen.fillStyle = colours.quiet;
  pen.fillText(gutter() > 100 ? "whole trace" : "all", 12, 12);
  if (gutter() > 100) pen.fillText(time(model.end), 12, 27);
  let free = left;
  for (const step of facts.steps) {
    const x = left + step.start * k;
    pen.fillStyle = colours.line;
    pen.fillRect(Math.round(x), 0, 1, height);
    if (x < free) continue;
    pen.fillStyle = step.step === view.step ? colours.text : colours.quiet;
    pen.fillText(String(step.step), x + 3, 8);
    free = x + pen.measureText(String(step.step)).width + 12;
  }
  const [from, to] = [left + between(view.from, 0, model.end) * k, left + between(view.to, 0, model.end) * k];
  pen.fillStyle = colours.accent;
  pen.globalAlpha = 0.13;
  pen.fillRect(from, 0, Math.max(2, to - from), height);
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 1.5;
  pen.strokeRect(from - 0.5, 0.75, Math.max(3, to - from + 1), height - 1.5);
}

const NOT_LOOKED_AT = 0.35; // opacity of memory in steps in which nobody looked

/** The memory of one rank, owners upon each other, below the same stretch of time. */
function drawMemory() {
  const { pen, height } = fresh("memory");
  const { moments, peak } = model.held.ranks[view.memoryRank] || { moments: [], peak: 0 };
  const bottom = height - 8;
  const top = 14;
  const left = gutter();
  const right = left + plotWidth();
  pen.fillStyle = colours.quiet;
  if (!moments.length) {
    pen.fillText("not in this trace", left + 4, height / 2);
    return;
  }
  const yOf = (bytes) => bottom - (bytes / Math.max(1, peak)) * (bottom - top);
  const owners = [...model.held.named, ...(model.held.others.length ? [null] : [])];
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, right - left, height);
  pen.clip();
  const stretches = stretchesOf(moments);
  pen.globalAlpha = NOT_LOOKED_AT;
  for (const between of betweenStretches(stretches)) drawStretch(pen, between, owners, yOf);
  pen.globalAlpha = 1;
  for (const stretch of stretches) drawStretch(pen, stretch, owners, yOf);
  if (view.cursor !== null) {
    pen.globalAlpha = 0.5;
    pen.fillStyle = colours.quiet;
    pen.fillRect(Math.round(xOf(view.cursor)), 0, 1, height);
    pen.globalAlpha = 1;
  }
  pen.restore();
  for (const bytes of [0, peak / 2, peak]) {
    pen.fillStyle = colours.line;
    pen.fillRect(left, Math.round(yOf(bytes)), right - left, 1);
    pen.fillStyle = colours.quiet;
    pen.textAlign = "right";
    pen.fillText(bytesText(bytes), left - 6, between(yOf(bytes), 7, height - 7));
    pen.textAlign = "left";
  }
  byId("owners-at").textContent = view.cursor === null ? "at its peak:" : "at the cursor:";
  fillOwners(
    view.cursor === null ? moments.find((moment) => moment.total === peak) : momentAt(moments, view.cursor),
  );
}

/** Moments that can be seen, parted where steps between were not looked at. */
function stretchesOf(moments) {
  const found = [];
  for (let i = 0; i < moments.length; i++) {
    const next = moments[i + 1];
    if (next && next.time < view.from) continue;
    if (!found.length || moments[i].step > moments[i - 1].step + 1) found.push([]);
    found[found.length - 1].push(moments[i]);
    if (moments[i].time > view.to) break; // one more, up to which the last one lasts
  }
  return found;
}

/** Across steps that were not looked at, and behind the last: what was held before them, as far as anybody knows. */
function betweenStretches(stretches) {
  return stretches.map((stretch, i) => {
    const last = stretch[stretch.length - 1];
    const next = stretches[i + 1];
    return [last, { ...last, time: next ? next[0].time : Math.max(last.time, model.end) }];
  });
}

function drawStretch(pen, moments, owners, yOf) {
  const below = new Float64Array(moments.length);
  const held = (moment, owner) =>
    owner === null
      ? model.held.others.reduce((sum, one) => sum + (moment.bytes.get(one) || 0), 0)
      : moment.bytes.get(owner) || 0;
  owners.forEach((owner, place) => {
    pen.fillStyle = colours["owner-" + model.held.colours[place]];
    pen.beginPath();
    moments.forEach((moment, i) => {
      const y = yOf(below[i] + held(moment, owner));
      const x = xOf(moment.time);
      pen.lineTo(x, y);
      pen.lineTo(i + 1 < moments.length ? xOf(moments[i + 1].time) : x + 2, y);
    });
    for (let i = moments.length - 1; i >= 0; i--) {
      const y = yOf(below[i]);
      const x = xOf(moments[i].time);
      pen.lineTo(i + 1 < moments.length ? xOf(moments[i + 1].time) : x + 2, y);
      pen.lineTo(x, y);
    }
    pen.fill();
    moments.forEach((moment, i) => (below[i] += held(moment, owner)));
  });
}

function momentAt(moments, at) {
  let low = 0;
  let high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moments[middle].time <= at) low = middle + 1;
    else high = middle;
  }
  return moments[Math.max(0, low - 1)];
}

function setMemoryRank(at) {
  view.memoryRank = at;
  byId("memory-rank").value = String(at);
}

function fillMemory() {
  const select = byId("memory-rank");
  model.ranks.forEach((rank, at) =>
    select.append(new Option(`rank ${rank.rank}, peak ${bytesText(model.held.ranks[at].peak)}`, String(at))),
  );
  const peaks = model.held.ranks.map((held) => held.peak);
  setMemoryRank(Math.max(0, peaks.indexOf(Math.max(...peaks))));
  select.addEventListener("change", () => {
    setMemoryRank(Number(select.value));
    redraw();
  });
  const list = byId("owners");
  [...model.held.named, ...(model.held.others.length ? [null] : [])].forEach((owner, place) => {
    const item = element("li", (owner === null ? "other" : facts.strings[owner]) + " ");
    item.style.setProperty("--chip", `var(--owner-${model.held.colours[place]})`);
    item.append(element("b"));
    list.append(item);
  });
}

/** The bytes of each owner at a moment. */
function fillOwners(moment) {
  const items = byId("owners").querySelectorAll("b");
  model.held.named.forEach((owner, place) => (items[place].textContent = bytesText(moment.bytes.get(owner) || 0)));
  if (model.held.others.length)
    items[items.length - 1].textContent = bytesText(
      model.held.others.reduce((sum, owner) => sum + (moment.bytes.get(owner) || 0), 0),
    );
}

// Reading: the columns of the page as spans, rows, messages and memory.  Nothing here changes afterwards.
//
// A span is a number i: start[i] and stop[i] are ns from the first moment of the trace, label[i] says what it is, and
// ranks have one stretch of numbers each.  Text of a trace is only ever set as text (textContent, fillText), never as HTML.

const byId = (id) => document.getElementById(id);
const facts = JSON.parse(byId("facts").textContent);

/** Base64 that a browser can inflate, as bytes. */
async function unpacked(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The columns by name; each stands in `bytes` as one plane for every byte of its numbers, the low bytes first. */
function columnsOf(bytes, index) {
  const columns = {};
  let offset = 0;
  for (const [name, length, width] of index) {
    const numbers = width > 4 ? new Float64Array(length) : new Uint32Array(length);
    for (let plane = width - 1; plane >= 0; plane--) {
      const from = offset + plane * length;
      for (let i = 0; i < length; i++) numbers[i] = numbers[i] * 256 + bytes[from + i];
    }
    columns[name] = numbers;
    offset += width * length;
  }
  return columns;
}

/** Running sums of what stands between `from` and `to`, times a unit. */
function summed(numbers, from, to, unit, into) {
  for (let i = from, sum = 0; i < to; i++) into[i] = (sum += numbers[i]) * unit;
}

/** The labels, one object each: what a span is, but for its time. */
function labelsOf(columns) {
  const text = (field, i) => facts.strings[columns["label." + field][i]];
  return Array.from(columns["label.kind"], (kind, i) => ({
    kind: facts.kinds[kind],
    name: text("name", i),
    path: text("path", i),
    action: text("action", i),
    site: text("site", i),
    axis: text("axis", i),
    shape: text("shape", i),
    peer: columns["label.peer"][i] - 1,
    tag: columns["label.tag"][i] - facts.tagShift,
    bytes: columns["label.bytes"][i],
  }));
}

const isMessage = (label) => label.kind === "message" || label.kind === "wait";
const isOp = (label) => label.kind === "op" || label.kind === "unit";

/** Everything of the trace that does not change while one looks at it. */
function modelOf(columns) {
  const count = columns.label.length;
  const model = {
    count,
    labels: labelsOf(columns),
    label: columns.label,
    step: columns.step,
    start: new Float64Array(count),
    stop: new Float64Array(count),
    number: new Float64Array(count),
    waited: new Float64Array(count),
    whom: new Int32Array(count).fill(-1), // ns, and the rank
    parent: new Int32Array(count).fill(-1),
    level: new Uint8Array(count),
    rankOf: new Uint16Array(count),
    ranks: [],
  };
  let from = 0;
  let heldFrom = 0;
  facts.ranks.forEach((told, at) => {
    const to = from + told.spans;
    const heldTo = heldFrom + told.memory;
    summed(columns.start, from, to, facts.tick, model.start);
    model.rankOf.fill(at, from, to);
    const axes = { __proto__: null }; // a name may be "constructor"
    for (const [name, group] of Object.entries(told.axes)) axes[name] = facts.groups[group];
    model.ranks.push({ ...told, axes, at, from, to, heldFrom, heldTo });
    [from, heldFrom] = [to, heldTo];
  });
  for (let i = 0; i < count; i++) model.stop[i] = model.start[i] + columns.length[i] * facts.tick;
  const numbered = ["message", "wait", "arrival"];
  for (let i = 0, next = 0; i < count; i++) {
    if (columns.outer[i]) model.parent[i] = i - columns.outer[i];
    if (!numbered.includes(model.labels[model.label[i]].kind)) continue;
    model.number[i] = columns.number[next];
    model.waited[i] = columns.waited[next] * facts.tick;
    model.whom[i] = columns.whom[next++] - 1;
  }
  levelOps(model);
  for (const rank of model.ranks) rank.rows = rowsOf(model, rank);
  model.end = Math.max(1, ...facts.steps.map((step) => step.stop));
  for (let i = 0; i < count; i++) if (model.stop[i] > model.end) model.end = model.stop[i];
  model.held = heldOf(model, columns);
  Object.assign(model, messagesOf(model, columns));
  return model;
}

/** How many ops are around each op; where ops hold ops, each has its row. */
function levelOps(model) {
  for (let i = 0; i < model.count; i++) {
    const outer = model.parent[i];
    if (outer >= 0 && isOp(model.labels[model.label[i]]) && isOp(model.labels[model.label[outer]]))
      model.level[i] = Math.min(5, model.level[outer] + 1);
  }
}

/** The rows of a rank's lane: actions, ops by level, messages, what other threads did. */
function rowsOf(model, rank) {
  const rows = new Map();
  for (let i = rank.from; i < rank.to; i++) {
    const label = model.labels[model.label[i]];
    if (label.kind === "arrival") continue;
    const [place, kind] =
      label.kind === "action"
        ? [0, "action"]
        : isOp(label)
          ? [1 + model.level[i], "op"]
          : isMessage(label)
            ? [8, "message"]
            : [9, "copy"];
    if (!rows.has(place)) rows.set(place, { kind, spans: [] });
    rows.get(place).spans.push(i);
  }
  if (!rows.has(0)) rows.set(0, { kind: "action", spans: [] });
  if (!rows.has(8)) rows.set(8, { kind: "message", spans: [] });
  return [...rows]
    .sort((a, b) => a[0] - b[0])
    .map(([, row]) => ({ kind: row.kind, spans: Uint32Array.from(row.spans) }));
}

/** What each rank held: for each of its moments the bytes of every owner. */
function heldOf(model, columns) {
  const owners = [...new Set(columns["memory.owner"])];
  const peaks = new Map(owners.map((owner) => [owner, 0]));
  const times = new Float64Array(columns["memory.time"].length);
  const ranks = model.ranks.map((rank) => {
    summed(columns["memory.time"], rank.heldFrom, rank.heldTo, facts.tick, times);
    const moments = [];
    for (let i = rank.heldFrom; i < rank.heldTo; i++) {
      const owner = columns["memory.owner"][i];
      const bytes = columns["memory.bytes"][i];
      let moment = moments[moments.length - 1];
      if (!moment || moment.time !== times[i]) {
        // Only what changes is in the trace; the rest is as it was.
        moment = { time: times[i], step: columns["memory.step"][i], bytes: new Map(moment && moment.bytes), total: 0 };
        moments.push(moment);
      }
      moment.bytes.set(owner, bytes);
      if (bytes > peaks.get(owner)) peaks.set(owner, bytes);
    }
    for (const moment of moments) for (const bytes of moment.bytes.values()) moment.total += bytes;
    return { moments, peak: moments.reduce((most, moment) => Math.max(most, moment.total), 0) };
  });
  owners.sort((a, b) => peaks.get(b) - peaks.get(a));
  const named = owners.slice(0, owners.length > 8 ? 7 : 8);
  // What hardly changes lies below what does.
  const swing = new Map(named.map((owner) => [owner, swingOf(owner, ranks)]));
  const others = owners.slice(named.length);
  named.sort((a, b) => swing.get(a) - swing.get(b) || peaks.get(b) - peaks.get(a));
  const names = named.map((owner) => facts.strings[owner]);
  return { ranks, named, others, colours: [...ownerColours(names, others.length > 0), ...(others.length ? [8] : [])] };
}

/** By how much the bytes of an owner go up and down, on the rank where they do so most. */
function swingOf(owner, ranks) {
  let most = 0;
  for (const { moments } of ranks) {
    let low = Infinity;
    let high = 0;
    for (const moment of moments) {
      const bytes = moment.bytes.get(owner) || 0;
      if (bytes < low) low = bytes;
      if (bytes > high) high = bytes;
    }
    most = Math.max(most, high - low);
  }
  return most;
}

/** Both ends of messages, and who took part in collectives. */
function messagesOf(model, columns) {
  const found = {
    sent: columns.sent,
    got: columns.got,
    pairOf: new Int32Array(model.count).fill(-1),
    meetings: [],
    meetingOf: new Int32Array(model.count).fill(-1),
  };
  found.sent.forEach((span, pair) => (found.pairOf[span] = found.pairOf[found.got[pair]] = pair));
  columns.call.forEach((call, i) => {
    if (i === 0 || columns.meeting[i]) found.meetings.push([]);
    found.meetings[found.meetings.length - 1].push({ call, done: columns.done[i] });
    found.meetingOf[call] = found.meetingOf[columns.done[i]] = found.meetings.length - 1;
  });
  return found;
}

const between = (value, low, high) => Math.min(Math.max(value, low), high);

// What a span says of itself: tooltip, details, the sentence for a screen reader.

/** A new element with a class and text. */
function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** A button that selects another span. */
function link(text, i) {
  const button = element("button", text, "link");
  button.addEventListener("click", () => goTo(i));
  return button;
}

function titleOf(i) {
  const label = labelOf(i);
  return (
    (label.kind === "wait" ? "wait for " : label.kind === "arrival" ? "arrival of " : "") + (label.name || label.kind)
  );
}

/** The time of a span that no span inside it takes. */
function selfTime(i) {
  let inside = 0;
  const { to } = rankOf(i);
  for (let n = i + 1; n < to && model.start[n] <= model.stop[i]; n++)
    if (model.parent[n] === i) inside += model.stop[n] - model.start[n];
  return model.stop[i] - model.start[i] - inside;
}

/** The other rank of a message between two, in the world. */
function peerOf(i) {
  const label = labelOf(i);
  const axis = rankOf(i).axes[label.axis] || [];
  return label.peer >= 0 && label.peer < axis.length ? axis[label.peer] : null;
}

/** Who kept a message waiting, in words; empty if nobody did. */
function waitedText(i) {
  if (model.waited[i] < 1000) return "";
  return time(model.waited[i]) + (model.whom[i] >= 0 ? " for rank " + model.whom[i] : "");
}

function showTip(i, x, y) {
  const tip = byId("tip");
  const label = labelOf(i);
  const place = [time(model.stop[i] - model.start[i]), "rank " + rankOf(i).rank];
  if (model.step[i]) place.push("step " + model.step[i]);
  const waited = waitedText(i);
  const lines = [
    element("b", titleOf(i)),
    element("div", place.join(" \u00b7 "), "strong"),
    ...[label.path, bytesOf(i), label.shape].filter(Boolean).map((text) => element("div", text)),
    ...(waited ? [element("div", "waited " + waited, "strong")] : []),
    ...(label.site ? [element("div", label.site)] : []),
  ];
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = between(x + 14, 4, innerWidth - wide - 6) + "px";
  tip.style.top = (y + 18 + tall > innerHeight ? Math.max(4, y - tall - 10) : y + 18) + "px";
}

/** Where a message goes and how much it sends, in a line: `on pp to rank 4, sends 131 kB`; of a copy its bytes. */
function bytesOf(i) {
  const label = labelOf(i);
  const peer = peerOf(i);
  if (!label.axis) return label.bytes ? bytesText(label.bytes) : "";
  const whom = peer === null ? "" : ` ${directionOf(label)} rank ${peer}`;
  return "on " + label.axis + whom + (label.bytes ? ", sends " + bytesText(label.bytes) : "");
}

const directionOf = (label) => (label.name.includes("send") ? "to" : "from");

function hideTip() {
  byId("tip").hidden = true;
}

function select(i) {
  view.selected = i;
  fillDetails();
  byId("said").textContent = i < 0 ? "" : spoken(i);
  if (i >= 0 && model.held.ranks[model.rankOf[i]].moments.length) setMemoryRank(model.rankOf[i]);
  remember();
  redraw();
}

/** A span in one sentence, for those who listen. */
function spoken(i) {
  const waited = waitedText(i);
  const said = [titleOf(i), "rank " + rankOf(i).rank, labelOf(i).path, time(model.stop[i] - model.start[i])];
  return [...said, waited && "waited " + waited].filter(Boolean).join(", ");
}

const HOW_TO_SELECT =
  "Click a span, or walk with Shift and the arrow keys. Of a message both ends are marked, " +
  "of a collective everyone who took part, with lines from the rank that came last.";

/** The card of the selected span; where none is, who waited longest. */
function fillDetails() {
  const box = byId("details");
  const i = view.selected;
  if (i < 0) return box.replaceChildren(element("p", HOW_TO_SELECT, "quiet"), ...waitsTable());
  const list = element("dl");
  for (const [name, ...values] of detailsOf(i)) {
    const there = values.filter((value) => value !== "");
    if (!there.length) continue;
    const cell = element("dd");
    cell.append(...there);
    list.append(element("dt", name), cell);
  }
  box.replaceChildren(element("h3", titleOf(i)), list, ...endsOf(i));
}

/** What there is to say of a span: a name and values, texts or links, each; an empty text is nothing. */
function detailsOf(i) {
  const label = labelOf(i);
  const rank = rankOf(i);
  const step = stepFacts(model.step[i]);
  const peer = peerOf(i);
  const host = model.hosts.length > 1 ? " on " + rank.host : "";
  const within = step ? ", from " + time(model.start[i] - step.start, 1000) : "";
  const pair = label.peer >= 0 ? ` of this pair, tag ${label.tag}` : " on this axis";
  const exactly = label.bytes >= 1000 ? ` (${Math.round(label.bytes).toLocaleString("en")} bytes)` : "";
  return [
    ["rank", [rank.rank, ...coordinates(rank)].join(" \u00b7 ") + host],
    ["step", model.step[i] ? model.step[i] + within : ""],
    ["took", time(model.stop[i] - model.start[i])],
    ["itself", isOp(label) || label.kind === "action" ? time(selfTime(i)) + " without what is inside" : ""],
    ["inside", ...around(i).map((outer) => link(titleOf(outer), outer))],
    [label.kind === "disk" ? "file" : "module", label.path],
    ["shape", label.shape],
    ["axis", label.axis && `${label.axis}: ranks ${(rank.axes[label.axis] || []).join(" ")}`],
    ["call", label.axis && model.number[i] ? "number " + model.number[i] + pair : ""],
    [directionOf(label), peer === null ? "" : "rank " + peer],
    [label.axis ? "sends" : "moved", label.bytes ? bytesText(label.bytes) + exactly : ""],
    ["waited", waitedText(i)],
    ["called at", label.site],
  ];
}

/** The longest waits of the picked step, of a collective the longest of all its ranks. */
function longestWaits(most) {
  const [from, to] = scope();
  const longest = new Map();
  for (let i = 0; i < model.count; i++) {
    const waited = model.waited[i];
    if (waited < 1000 || model.start[i] < from || model.start[i] > to || !isLit(labelOf(i))) continue;
    const key = model.meetingOf[i] >= 0 ? -1 - model.meetingOf[i] : i;
    if (!longest.has(key) || waited > longest.get(key).waited) longest.set(key, { i, waited });
  }
  return [...longest.values()]
    .sort((a, b) => b.waited - a.waited)
    .slice(0, most)
    .map(({ i }) => i);
}

function waitsTable() {
  const waits = longestWaits(7);
  if (!waits.length) return [];
  const table = element("table");
  for (const i of waits) {
    const line = element("tr");
    const who = element("td");
    const label = labelOf(i);
    const rank = rankOf(i);
    who.append(link("rank " + rank.rank, i));
    const what = [label.action, label.action.startsWith("RECV") ? "" : label.name].filter(Boolean).join(" ");
    line.append(who, element("td", what + " on " + label.axis, "words"), element("td", waitedText(i)));
    table.append(line);
  }
  return [element("h3", "Longest waits in " + (view.step ? "step " + view.step : "the trace")), table];
}

/** The spans around one, the innermost first. */
function around(i) {
  const found = [];
  for (let outer = model.parent[i]; outer >= 0; outer = model.parent[outer]) found.push(outer);
  return found;
}

/** The other end of a message, or everybody's part in a collective. */
function endsOf(i) {
  const pair = model.pairOf[i];
  const meeting = model.meetings[model.meetingOf[i]];
  if (pair >= 0) return [otherEndOf(i, model.sent[pair], model.got[pair])];
  return meeting ? [meetingTable(meeting), element("p", errorText(meeting.map(({ call }) => call)), "quiet")] : [];
}

function otherEndOf(i, sent, got) {
  const line = element("p", "", "quiet");
  const other = sent === i ? got : sent;
  const error = errorText([sent, got]);
  line.append(
    `From the send to its end at the receiver: ${time(model.stop[got] - model.start[sent])}${error && ", " + error}. `,
    link((other === sent ? "the send on rank " : "where it came, rank ") + rankOf(other).rank, other),
  );
  return line;
}

/** When each rank entered and left a collective. */
function meetingTable(meeting) {
  const first = Math.min(...meeting.map(({ call }) => model.start[call]));
  const last = meeting.reduce((a, b) => (model.start[b.call] > model.start[a.call] ? b : a));
  const table = element("table");
  const head = element("tr");
  head.append(...["rank", "entered", "left", ""].map((name) => element("th", name)));
  table.append(head);
  for (const member of meeting) {
    const row = element("tr", "", member === last ? "last" : "");
    const rank = element("td");
    rank.append(link("rank " + rankOf(member.call).rank, member.call));
    const times = [model.start[member.call], model.stop[member.done]].map((at) => "+" + time(at - first, 1000));
    row.append(rank, ...times.map((text) => element("td", text)), element("td", member === last ? "came last" : ""));
    table.append(row);
  }
  return table;
}

/** How far times of several ranks may be wrong against each other; empty where they share a clock. */
function errorText(spans) {
  if (facts.clocks.exact) return "";
  const errors = spans.map((i) => rankOf(i).error).sort((a, b) => b - a);
  if (errors.includes(null)) return "by clocks that nothing brings together";
  return "by clocks that agree to " + time(errors[0] + (errors[1] || 0));
}

// What ties lanes together, and what lies over them: arrows of messages, frames, the cursor.

const MOST_ARROWS = 3000; // more would be a grey veil

/** Lines from where messages were sent to where they came. */
function drawArrows(pen, scroll, height) {
  const places = placesOfMessages(scroll);
  const seen = [];
  for (let pair = 0; pair < model.sent.length; pair++) {
    const sent = model.sent[pair];
    const got = model.got[pair];
    if (model.stop[got] < view.from || model.start[sent] > view.to) continue;
    const [from, to] = [places[model.rankOf[sent]], places[model.rankOf[got]]];
    if (from === undefined || to === undefined || Math.max(from, to) < 0 || Math.min(from, to) > height) continue;
    if (isLit(labelOf(sent))) seen.push(pair);
  }
  if (seen.length > MOST_ARROWS) return;
  const light = seen.length > 300;
  pen.globalAlpha = light ? 60 / seen.length + 0.04 : 0.85;
  for (const pair of seen) {
    const colour = axisColour(labelOf(model.sent[pair]).axis);
    tie(pen, places, model.sent[pair], model.got[pair], colour, light ? 0.8 : 1.2, !light);
  }
  pen.globalAlpha = 1;
}

/** For each rank that is shown the middle of its row of messages. */
function placesOfMessages(scroll) {
  const places = [];
  for (const lane of lanes) {
    const row = lane.rows.find((one) => one.kind === "message");
    places[lane.rank.at] = row.top - scroll + row.height / 2;
  }
  return places;
}

/** A line from the beginning of one span to the end of another, in the rows of messages of their ranks. */
function tie(pen, places, from, to, colour, thick, head = true) {
  const [x, y] = [xOf(model.start[from]), places[model.rankOf[from]]];
  const [toX, toY] = [xOf(model.stop[to]), places[model.rankOf[to]]];
  const bend = between((toX - x) / 2, 6, 60);
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = thick;
  pen.beginPath();
  pen.moveTo(x, y);
  pen.bezierCurveTo(x + bend, y, toX - bend, toY, toX, toY);
  pen.stroke();
  if (!head) return;
  pen.beginPath();
  pen.arc(x, y, 2, 0, 7);
  pen.moveTo(toX + 0.5, toY);
  pen.lineTo(toX - 6, toY - 3.5);
  pen.lineTo(toX - 6, toY + 3.5);
  pen.fill();
}

/** What lies over the lanes and changes with the pointer: the cursor, frames, the ends of one message. */
function drawOver() {
  const { pen, height } = fresh("over");
  const scroll = byId("lanes").scrollTop;
  pen.save();
  pen.beginPath();
  pen.rect(gutter(), 0, plotWidth(), height);
  pen.clip();
  if (view.cursor !== null) {
    pen.globalAlpha = 0.5;
    pen.fillStyle = colours.quiet;
    pen.fillRect(Math.round(xOf(view.cursor)), 0, 1, height);
    pen.globalAlpha = 1;
  }
  if (dragged && dragged.select) {
    const [a, b] = [dragged.startX, dragged.x].sort((p, q) => p - q);
    pen.fillStyle = colours.accent;
    pen.globalAlpha = 0.16;
    pen.fillRect(a, 0, b - a, height);
    pen.globalAlpha = 1;
  }
  for (const i of new Set([view.selected, view.hovered])) if (i >= 0) drawTies(pen, i, scroll);
  for (const i of new Set([view.hovered, view.selected]))
    if (i >= 0) frame(pen, i, scroll, i === view.selected ? 2 : 1.25);
  pen.restore();
}

/** The box of a span on the canvas; null where it is not shown. */
function boxOf(i, scroll) {
  const lane = lanes.find((one) => one.rank.at === model.rankOf[i]);
  const row = lane && lane.rows.find((one) => has(one.spans, i));
  return row
    ? {
        x: xOf(model.start[i]),
        y: row.top - scroll,
        wide: Math.max(2, xOf(model.stop[i]) - xOf(model.start[i])),
        height: row.height,
        row,
      }
    : null;
}

function has(spans, i) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle] < i) low = middle + 1;
    else high = middle;
  }
  return spans[low] === i;
}

function frame(pen, i, scroll, thick) {
  const box = boxOf(i, scroll);
  if (!box) return;
  const left = Math.max(box.x, gutter() - 4);
  const right = Math.min(box.x + box.wide, gutter() + plotWidth() + 4);
  pen.strokeStyle = colours.mark;
  pen.lineWidth = thick;
  pen.strokeRect(left - 0.5, box.y - 1, Math.max(2, right - left), box.height + 2);
}

/** The message of a span: its arrow; or of a collective everybody's part, and lines from the one who came last. */
function drawTies(pen, i, scroll) {
  const places = placesOfMessages(scroll);
  const isShown = (span) => places[model.rankOf[span]] !== undefined;
  const pair = model.pairOf[i];
  if (pair >= 0 && isShown(model.sent[pair]) && isShown(model.got[pair])) {
    frame(pen, model.sent[pair], scroll, 1.25);
    frame(pen, model.got[pair], scroll, 1.25);
    tie(pen, places, model.sent[pair], model.got[pair], colours.mark, 2);
  }
  const meeting = (model.meetings[model.meetingOf[i]] || []).filter(({ call }) => isShown(call));
  const last = meeting.length && meeting.reduce((a, b) => (model.start[b.call] > model.start[a.call] ? b : a));
  for (const { call, done } of meeting) {
    frame(pen, call, scroll, 1.25);
    if (done !== call) frame(pen, done, scroll, 1.25);
    if (call !== last.call) tie(pen, places, last.call, done, colours.mark, 1.25);
  }
}

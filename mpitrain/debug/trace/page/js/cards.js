// The cards below the timeline: traffic between ranks, losses.

/** Bytes from each rank to each, in the picked step; of a collective each other rank of its axis is given as much. */
function trafficOf() {
  const size = facts.size;
  const matrix = new Float64Array(size * size);
  const [from, to] = scope();
  for (const rank of model.ranks) {
    for (let i = rank.from; i < rank.to; i++) {
      const label = labelOf(i);
      if (label.kind !== "message" || !label.bytes || view.hidden.has(label.axis)) continue;
      if (view.step ? model.step[i] !== view.step : model.start[i] < from || model.start[i] > to) continue;
      const peer = peerOf(i);
      const others = peer === null ? (rank.axes[label.axis] || []).filter((other) => other !== rank.rank) : [peer];
      for (const other of others) if (other < size) matrix[rank.rank * size + other] += label.bytes / others.length;
    }
  }
  return matrix;
}

const MOST_CELLS = 32; // of a side; ranks of a larger world stand together

/** A matrix of ranks with no more cells than can be seen: `each` ranks together. */
function condensed(matrix, size, each) {
  const side = Math.ceil(size / each);
  const sums = new Float64Array(side * side);
  for (let i = 0; i < size; i++) {
    for (let j = 0; j < size; j++) sums[Math.floor(i / each) * side + Math.floor(j / each)] += matrix[i * size + j];
  }
  return sums;
}

function fillTraffic() {
  const size = facts.size;
  const each = Math.max(1, Math.ceil(size / MOST_CELLS));
  const sums = condensed(trafficOf(), size, each);
  const side = Math.ceil(size / each);
  const most = Math.max(1, ...sums);
  const heading = (n) => element("th", side <= 16 || n % 4 === 0 ? String(n * each) : "");
  const name = (n) => (each === 1 ? String(n) : `${n * each}\u2013${Math.min(size, (n + 1) * each) - 1}`);
  const lines = [element("tr")];
  lines[0].append(element("th", "from \\ to"));
  for (let j = 0; j < side; j++) lines[0].append(heading(j));
  for (let i = 0; i < side; i++) {
    const line = element("tr");
    line.append(heading(i));
    for (let j = 0; j < side; j++) {
      const cell = trafficCell(sums[i * side + j], most, i === j && each === 1, side <= 8);
      cell.title = `rank ${name(i)} to rank ${name(j)}: ${bytesText(sums[i * side + j])}`;
      line.append(cell);
    }
    lines.push(line);
  }
  byId("traffic").className = side > 16 ? "many" : "";
  byId("traffic").replaceChildren(...lines);
  const total = bytesText(sums.reduce((a, b) => a + b, 0)) + " sent" + (view.hidden.size ? " on the chosen axes" : "");
  byId("traffic-said").textContent =
    `${total} in ${view.step ? "step " + view.step : "the whole trace"}, from rank (row) to rank (column). ` +
    "A collective's bytes are shared out evenly over its other ranks.";
}

/** A cell as dark as its bytes are many. */
function trafficCell(bytes, most, isSelf, isWide) {
  const cell = element("td", bytes && isWide ? bytesText(bytes) : "");
  cell.className = isSelf ? "self" : bytes > 0.55 * most ? "strong" : "";
  if (bytes) cell.style.setProperty("--share", (0.08 + (0.87 * bytes) / most).toFixed(3));
  return cell;
}

/** Where steps and losses stand on the card; null if there is no loss. */
function lossPlot(width, height) {
  const losses = facts.curve.flatMap((point) => point.slice(1)).filter((loss) => loss !== null);
  if (!losses.length) return null;
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const [first, final] = [facts.curve[0][0], facts.curve[facts.curve.length - 1][0]];
  const log = low > 0 && high / low > 1.75;
  const box = { left: 46, right: width - 12, top: 10, bottom: height - 24 };
  const share = (loss) => {
    if (high === low) return 0.5;
    return log ? Math.log(loss / low) / Math.log(high / low) : (loss - low) / (high - low);
  };
  const steps = Math.max(1, final - first);
  return {
    ...{ low, high, first, final, log, box },
    x: (step) => box.left + ((step - first) / steps) * (box.right - box.left),
    y: (loss) => box.bottom - 6 - share(loss) * (box.bottom - box.top - 12),
    stepAt: (x) => Math.round(first + ((x - box.left) / (box.right - box.left)) * steps),
  };
}

function drawLoss() {
  const { pen, width, height } = fresh("loss");
  const plot = lossPlot(width, height);
  surfaces.loss.plot = plot;
  if (!plot) return;
  drawTraced(pen, plot);
  for (const loss of lossTicks(plot.low, plot.high, plot.log)) {
    pen.fillStyle = colours.line;
    pen.fillRect(plot.box.left, Math.round(plot.y(loss)), plot.box.right - plot.box.left, 1);
    pen.fillStyle = colours.quiet;
    pen.textAlign = "right";
    pen.fillText(String(loss), plot.box.left - 6, plot.y(loss));
  }
  pen.textAlign = "center";
  const gap = Math.max(1, roundTime((plot.final - plot.first) / 5));
  for (let step = Math.ceil(plot.first / gap) * gap; step <= plot.final; step += gap)
    pen.fillText(step.toLocaleString("en"), plot.x(step), height - 10);
  const trained = facts.curve.filter((point) => point[1] !== null);
  const checked = facts.curve.filter((point) => point[2] !== null);
  const place = (column) => (point) => [plot.x(point[0]), plot.y(point[column])];
  curve(pen, trained.map(place(1)), colours.train, 2);
  curve(pen, checked.map(place(2)), colours.valid, 1.5, true);
  sayLoss(trained, checked, plot);
}

/** The losses in words. */
function sayLoss(trained, checked, plot) {
  const last = trained[trained.length - 1];
  const said = [];
  if (last) said.push(`training ${last[1].toFixed(4)} at step ${last[0].toLocaleString("en")}`);
  if (checked.length) said.push(`validation (dots) ${checked[checked.length - 1][2].toFixed(4)}`);
  if (plot.log) said.push("logarithmic");
  byId("loss-said").textContent = [...said, "shaded: traced steps; click one"].join(" \u00b7 ");
  const from = last ? `Loss from ${trained[0][1].toFixed(3)} at step ${trained[0][0]}` : "Loss";
  byId("loss").setAttribute("aria-label", last ? `${from} to ${last[1].toFixed(3)} at step ${last[0]}` : from);
}

/** Which steps of the curve are in the trace, and which one is picked. */
function drawTraced(pen, { x, box }) {
  const half = Math.max(1, (x(1) - x(0)) / 2);
  for (const step of facts.steps) {
    pen.fillStyle = step.step === view.step ? colours.accent : colours.faint;
    pen.globalAlpha = step.step === view.step ? 0.3 : 1;
    const left = Math.max(box.left, x(step.step) - half);
    pen.fillRect(left, box.top, Math.max(1, Math.min(box.right, x(step.step) + half) - left), box.bottom - box.top);
  }
  pen.globalAlpha = 1;
}

function curve(pen, points, colour, thick, dots = false) {
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = thick;
  pen.lineJoin = "round";
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.stroke();
  for (const [x, y] of dots || points.length === 1 ? points : []) {
    pen.beginPath();
    pen.arc(x, y, 2.5, 0, 7);
    pen.fill();
  }
}

/** A few round losses for the axis. */
function lossTicks(low, high, log) {
  const found = [];
  if (log) {
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
      for (const digit of [1, 1.5, 2, 3, 4, 6, 8])
        if (digit * power >= low && digit * power <= high) found.push(Number((digit * power).toPrecision(3)));
    const every = Math.ceil(found.length / 7);
    if (found.length >= 3) return found.filter((_, i) => i % every === 0);
  }
  const rough = (high - low || Math.abs(high) || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const gap = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / gap); n * gap <= high; n++) ticks.push(Number((n * gap).toPrecision(6)));
  return ticks;
}

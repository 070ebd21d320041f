// The start: everything is filled in, and listens.

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme-button").textContent = name === "dark" ? "light" : "dark";
  readColours();
  fillLegend();
  redraw();
  drawLoss();
}

/** What colours and stripes mean, drawn as the timeline draws them. */
function fillLegend() {
  const entries = [
    ["forward", colours.forward],
    ["backward", colours.backward],
    ["update, sums", colours.update],
    ["executor's messages", colours.between],
    ["message moves", axisColour("pp")],
    ["waits for another rank", stripes(axisColour("pp"))],
  ];
  if (model.labels.some((label) => label.action === "W"))
    entries.splice(2, 0, ["backward of weights", colours.weights]);
  byId("legend").replaceChildren(
    ...entries.map(([name, fill]) => {
      const item = element("span");
      const swatch = element("canvas");
      [swatch.width, swatch.height] = [22, 12];
      const pen = swatch.getContext("2d");
      pen.fillStyle = fill;
      pen.fillRect(0, 0, 22, 12);
      item.append(swatch, name);
      return item;
    }),
  );
  for (const chip of byId("axes").querySelectorAll("button"))
    chip.style.setProperty("--chip", axisColour(chip.dataset.axis));
}

const counted = (count, name) => count.toLocaleString("en") + " " + name + (count === 1 ? "" : "s");

/** The heading, what the run is, and what this page lacks; cards of which there is nothing to show go. */
function fillHead() {
  byId("traffic-card").hidden = facts.size < 2;
  byId("loss-card").hidden = !facts.curve.some((point) => point[1] !== null || point[2] !== null);
  byId("memory-head").hidden = byId("memory").hidden = !model.held.named.length;
  byId("title").textContent = facts.title || "trace";
  const told = Object.fromEntries(facts.facts);
  const missing = facts.size - model.ranks.length;
  const hosts = model.hosts.length > 1 ? ` on ${model.hosts.length} hosts` : "";
  const ranks = (missing ? model.ranks.length + " of " : "") + counted(facts.size, "rank") + hosts;
  const steps = facts.steps.length ? counted(facts.steps.length, "step") : "";
  const summary = [told.model, told.layout, ranks, steps, counted(model.count, "span"), facts.clocks.said];
  byId("summary").textContent = summary.filter(Boolean).join(" \u00b7 ");
  byId("facts-list").append(...facts.facts.flatMap(([name, fact]) => [element("dt", name), element("dd", fact)]));
  byId("facts-button").hidden = !facts.facts.length;
  const dropped = facts.ranks.reduce((sum, rank) => sum + rank.dropped, 0);
  const notices = [];
  if (facts.leftOut) notices.push(`To keep this page small it leaves out ${facts.leftOut}.`);
  if (dropped) notices.push(`${dropped.toLocaleString("en")} spans are lost: the trace had reached its bound on size.`);
  if (missing) notices.push(`The traces of ${counted(missing, "rank")} are missing.`);
  byId("notice").textContent = notices.join(" ");
  byId("notice").hidden = !notices.length;
}

function fillSteps() {
  const select = byId("step");
  select.append(new Option("all steps", "0"));
  for (const step of facts.steps) {
    const loss = typeof step.loss === "number" ? `, loss ${step.loss.toFixed(3)}` : "";
    select.append(
      new Option(
        `step ${step.step}: ${time(step.stop - step.start)}${loss}${step.ops ? "" : ", no ops"}`,
        String(step.step),
      ),
    );
  }
  select.addEventListener("change", () => pickStep(Number(select.value)));
}

/** The step to begin with: of the middle length among those whose ops are known. */
function usualStep() {
  const length = (step) => step.stop - step.start;
  const steps = facts.steps.filter((step) => step.ops);
  const sorted = (steps.length ? steps : [...facts.steps]).sort((a, b) => length(a) - length(b));
  return sorted.length ? sorted[sorted.length >> 1].step : 0;
}

function watch() {
  const list = byId("lanes");
  const ruler = byId("ruler");
  for (const place of [list, ruler]) {
    place.addEventListener("pointermove", onMove);
    place.addEventListener("pointerdown", onDown);
    place.addEventListener("pointerup", onUp);
    place.addEventListener("pointercancel", () => (dragged = null));
    place.addEventListener("pointerleave", onLeave);
    place.addEventListener("wheel", onWheel, { passive: false });
  }
  byId("memory").addEventListener("wheel", onWheel, { passive: false });
  byId("memory").addEventListener("pointermove", onMove);
  byId("memory").addEventListener("pointerleave", onLeave);
  list.addEventListener("dblclick", (event) => {
    select(spanAt(...pointIn(event, list)));
    fit();
  });
  list.addEventListener("scroll", redraw);
  watchOverview();
  document.addEventListener("keydown", onKey);
  byId("step-before").addEventListener("click", () => stepBeside(-1));
  byId("step-after").addEventListener("click", () => stepBeside(1));
  byId("zoom-in").addEventListener("click", () => zoom(0.6));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  byId("zoom-fit").addEventListener("click", fit);
  for (const name of ["ops", "arrows"]) byId("show-" + name).addEventListener("click", () => toggle(name));
  byId("search").addEventListener("input", (event) => search(event.target.value));
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
  });
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("facts-button").addEventListener("click", () => {
    byId("facts-list").hidden = !byId("facts-list").hidden;
    byId("facts-button").setAttribute("aria-expanded", String(!byId("facts-list").hidden));
  });
  byId("theme-button").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  );
  byId("loss").addEventListener("click", (event) => {
    if (!surfaces.loss.plot) return;
    const wanted = surfaces.loss.plot.stepAt(pointIn(event, byId("loss"))[0]);
    const near = [...facts.steps].sort((a, b) => Math.abs(a.step - wanted) - Math.abs(b.step - wanted))[0];
    if (near) pickStep(near.step);
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  new ResizeObserver(() => {
    layOut();
    drawLoss();
    redraw();
  }).observe(document.body);
  return dark.matches ? "dark" : "light";
}

async function begin() {
  model = modelOf(columnsOf(await unpacked(byId("columns").textContent), facts.columns));
  model.hosts = [...new Set(model.ranks.map((rank) => rank.host))];
  fillHead();
  fillSteps();
  fillAxes();
  fillGroups();
  fillMemory();
  fillDetails();
  measureShares();
  layOut();
  setTheme(watch());
  const place = recall();
  pickStep(place.step === undefined ? usualStep() : place.step);
  if (place.span < model.count) goTo(place.span);
  drawAll();
  drawLoss();
  performance.mark("drawn");
}

begin().catch((error) => {
  byId("notice").hidden = false;
  byId("notice").textContent =
    typeof DecompressionStream === "undefined"
      ? "This browser is too old for this page: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)."
      : "The page could not be drawn: " + error;
});

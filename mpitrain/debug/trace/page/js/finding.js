// Filters: axes, groups of ranks, search.

function fillAxes() {
  const axes = [...new Set(model.labels.filter(isMessage).map((label) => label.axis))].sort(
    (a, b) => axisPlace(a) - axisPlace(b) || (a < b ? -1 : 1),
  );
  for (const axis of axes) {
    const chip = element("button", axis || "(none)");
    chip.dataset.axis = axis;
    chip.setAttribute("aria-pressed", "true");
    chip.title = "messages on " + axis + "; double click: only these";
    chip.addEventListener("click", () => {
      if (!view.hidden.delete(axis)) view.hidden.add(axis);
      showAxes();
    });
    chip.addEventListener("dblclick", () => {
      view.hidden = new Set(axes.filter((other) => other !== axis));
      showAxes();
    });
    byId("axes").append(chip);
  }
  byId("axes").hidden = !axes.length;
}

function showAxes() {
  for (const chip of byId("axes").querySelectorAll("button"))
    chip.setAttribute("aria-pressed", String(!view.hidden.has(chip.dataset.axis)));
  fillTraffic();
  fillDetails();
  redraw();
}

/** Which ranks can be shown: all, or those of one axis that a rank is on. */
function fillGroups() {
  const select = byId("group");
  const seen = new Set();
  select.append(new Option("all ranks", ""));
  for (const rank of model.ranks) {
    for (const [name, ranks] of Object.entries(rank.axes)) {
      const key = ranks.join(" ");
      if (ranks.length < 2 || ranks.length === facts.size || seen.has(key) || seen.size > 500) continue;
      seen.add(key);
      select.append(
        new Option(name + ": ranks " + (ranks.length > 8 ? ranks.slice(0, 8).join(" ") + " \u2026" : key), key),
      );
    }
  }
  select.hidden = !seen.size;
  select.addEventListener("change", () => setGroup(select.value));
}

function setGroup(key) {
  byId("group").value = key;
  view.group = key ? key.split(" ").map(Number) : null;
  layOut();
  redraw();
}

function search(text) {
  view.query = text.trim().toLowerCase();
  view.matches = null;
  let count = 0;
  if (view.query) {
    const isFound = (label) =>
      [label.name, label.path, label.site].some((text) => text.toLowerCase().includes(view.query));
    view.matches = new Set(model.labels.filter((label) => label.kind !== "arrival" && isFound(label)));
    for (let i = 0; i < model.count; i++) if (view.matches.has(labelOf(i))) count++;
  }
  byId("found").textContent = view.query ? counted(count, "span") : "";
  redraw();
}

/** Select the next span that is found, in order of time over all ranks. */
function nextMatch(by) {
  if (!view.matches) return;
  const key = (i) => model.start[i] * by;
  const here = view.selected >= 0 ? key(view.selected) : by > 0 ? view.from : -view.to;
  let best = -1;
  for (let i = 0; i < model.count; i++) {
    if (!view.matches.has(labelOf(i)) || i === view.selected) continue;
    const later = key(i) > here || (key(i) === here && (i - view.selected) * by > 0);
    if (later && (best < 0 || key(i) < key(best) || (key(i) === key(best) && (i - best) * by < 0))) best = i;
  }
  if (best >= 0) goTo(best);
}

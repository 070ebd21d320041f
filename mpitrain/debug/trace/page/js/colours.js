// Colours of spans, from the style of the page; stripes for what waits.

const AXES = ["pp", "dp", "tp", "cp", "ep"]; // the first five colours; the sixth is for all others
const DIM = 0.13; // opacity of what a filter takes away

const axisPlace = (axis) => {
  const at = AXES.findIndex(
    (name) => axis === name || axis.split("+").includes(name) || (name === "dp" && axis.includes("edp")),
  );
  return at < 0 ? 6 : at + 1;
};
const axisColour = (axis) => colours["axis-" + axisPlace(axis)];

// An owner of memory has one colour in all pages; names that are not here take those that are left.
const OWNERS = {
  __proto__: null, // a name may be "constructor"
  weights: 1,
  gradients: 2,
  "optimizer state": 3,
  masters: 4,
  activations: 5,
  "wire scratch": 6,
  messages: 7,
};

/** The number of its colour for each name; 8 is kept for all others together, if there are any. */
function ownerColours(names, others) {
  const taken = new Set([...names.map((name) => OWNERS[name]), others ? 8 : 0]);
  const left = [8, 4, 7, 6, 3, 2, 5, 1].filter((n) => !taken.has(n));
  return names.map((name) => OWNERS[name] || left.shift());
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = (
    "back panel raised text quiet line faint accent mark forward backward weights update between op-forward op-backward " +
    "op-weights op-other op-edge on on-weights on-axis train valid bad " +
    [1, 2, 3, 4, 5, 6].map((n) => "axis-" + n).join(" ") +
    " " +
    [1, 2, 3, 4, 5, 6, 7, 8].map((n) => "owner-" + n).join(" ")
  ).split(" ");
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  patterns = {};
  for (const label of model.labels) paint(label);
}

/** Stripes of a colour: waiting is told by them, not by the colour alone. */
function stripes(colour) {
  if (patterns[colour]) return patterns[colour];
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = colours.back;
  pen.fillRect(0, 0, 6, 6);
  pen.globalAlpha = 0.22;
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 6, 6);
  pen.globalAlpha = 1;
  pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) {
    pen.beginPath();
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
    pen.stroke();
  }
  return (patterns[colour] = surfaces.base.pen.createPattern(tile, "repeat"));
}

/** Give a label its colours. */
function paint(label) {
  label.ink = colours.on;
  if (label.kind === "action") {
    const fills = { __proto__: null, F: "forward", B: "backward", W: "weights", REDUCE: "update", STEP: "update" };
    label.fill = colours[fills[label.action] || "between"];
    if (label.action === "W") label.ink = colours["on-weights"];
    else if (!fills[label.action]) label.ink = colours.text;
  } else if (isOp(label)) {
    const fills = { __proto__: null, F: "op-forward", B: "op-backward", W: "op-weights" };
    label.fill = colours[fills[label.action] || "op-other"];
    label.ink = colours.text;
  } else if (isMessage(label)) {
    label.fill = axisColour(label.axis);
    label.ink = colours["on-axis"];
  } else label.fill = colours.quiet;
}

/** Whether filters leave a label as it is. */
function isLit(label) {
  return !(label.axis && view.hidden.has(label.axis)) && (!view.matches || view.matches.has(label));
}

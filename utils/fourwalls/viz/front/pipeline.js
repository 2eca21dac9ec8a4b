// What the bubble explorer and the schedule editor share: a pipeline as ranks down and time across, what each rank holds under it, and
// a scrubber that goes from tick to tick and says what each rank does and holds just then.

const LOOKS = { F: ["#56B4E9", "forward"], B: ["#E69F00", "backward"], I: ["#FFD27F", "input gradient"], W: ["#009E73", "weight gradient"] };
const KINDS = Object.keys(LOOKS);
const LETTERS_UP_TO = 700; // cells that may carry their name

// rows: for each rank [kind, start, end, stage, micro-batch]; live: for each rank [time, held]; span: the time that fills the width
function drawPipeline({ rows, live, makespan, peaks }, { width, height, span, cap, ghost, label }) {
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "fw-svg", role: "img", "aria-label": label });
  const left = 46, right = 8, foot = 30, top = 16, room = (height - top - foot) / rows.length, bar = Math.min(26, room * 0.52);
  const x = (t) => left + (width - left - right) * t / span, most = Math.max(1, cap || 0, ...peaks);
  const count = rows.reduce((sum, row) => sum + row.length, 0), single = rows.every((row) => row.every((e) => e[3] === row[0][3]));
  const pattern = `fw-dots-${Math.random().toString(36).slice(2)}`;
  svg.append(make("defs", {}, make("pattern", { id: pattern, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
    make("circle", { cx: 2.5, cy: 2.5, r: 0.9, fill: "#00332a" }))));
  let at = left;
  for (const kind of KINDS.filter((k) => rows.some((row) => row.some((e) => e[0] === k)))) {
    svg.append(make("rect", { x: at, y: 2, width: 14, height: 10, fill: LOOKS[kind][0], stroke: "#555", "stroke-width": 0.5 }),
      make("text", { x: at + 18, y: 11, class: "fw-axis" }, `${kind} ${LOOKS[kind][1]}`));
    at += 44 + 6 * LOOKS[kind][1].length;
  }
  svg.append(make("text", { x: at, y: 11, class: "fw-axis" }, "grey: what is held"));
  rows.forEach((row, rank) => {
    const y = top + rank * room, floor = y + room - 2, high = room - bar - 5;
    svg.append(make("text", { x: left - 5, y: y + bar / 2 + 4, "text-anchor": "end", class: "fw-axis" }, rows.length > 12 ? `r${rank}` : `rank ${rank}`),
      make("rect", { x: left, y, width: x(makespan) - left, height: bar, fill: "#f1f1f1" }));
    const paths = {}, up = y.toFixed(1), down = bar.toFixed(1);
    for (const [kind, a, b] of row) {
      const from = x(a).toFixed(2);
      paths[kind] = `${paths[kind] ?? ""}M${from} ${up}H${x(b).toFixed(2)}v${down}H${from}z`;
    }
    for (const kind of KINDS) {
      const path = paths[kind];
      if (!path) continue;
      const line = count < 1500 ? { stroke: "#555", "stroke-width": 0.5 } : {};
      svg.append(make("path", { d: path, fill: LOOKS[kind][0], class: `fw-work fw-work-${kind}`, ...line }));
      if (kind === "W") svg.append(make("path", { d: path, fill: `url(#${pattern})` }));
    }
    if (count <= LETTERS_UP_TO) for (const [kind, a, b, stage, number] of row) {
      const text = single ? `${kind}${number}` : `${stage}${kind}${number}`, wide = x(b) - x(a);
      const size = wide > 7.6 * text.length ? 10 : wide > 5.6 * text.length ? 7.5 : 0;
      if (size && bar > 9) svg.append(make("text", { x: (x(a) + x(b)) / 2, y: y + bar / 2 + 3.5, "text-anchor": "middle", class: `fw-tag fw-tag-${kind}`, style: `font-size:${size}px` }, text));
    }
    const step = (held) => (floor - high * held / most).toFixed(1);
    if (live[rank]) {
      const path = live[rank].map(([t, held], k) => `${k ? `H${x(t).toFixed(2)}V` : `M${x(t).toFixed(2)} ${floor.toFixed(1)}V`}${step(held)}`).join("");
      svg.append(make("path", { d: `${path}H${x(makespan).toFixed(2)}V${floor.toFixed(1)}z`, class: "fw-held", fill: "#bbb", stroke: "#444", "stroke-width": 0.7 }));
      if (high > 9) svg.append(make("text", { x: x(makespan) - 3, y: floor - 2, "text-anchor": "end", class: "fw-axis" }, `peak ${peaks[rank]}`));
      if (cap) svg.append(make("line", { x1: left, x2: x(makespan), y1: step(cap), y2: step(cap), stroke: "#D55E00", "stroke-width": 1.2, "stroke-dasharray": "5 3", class: "fw-cap" }));
    }
  });
  const end = (t, text, css) => svg.append(make("line", { x1: x(t), x2: x(t), y1: top - 2, y2: height - foot + 3, stroke: "#000", "stroke-width": 1, ...css }),
    make("text", { x: Math.min(x(t), width - right - 30), y: height - 4, "text-anchor": "middle", class: "fw-axis", ...(css.stroke ? { fill: "#777" } : {}) }, text));
  const unit = 10 ** Math.floor(Math.log10(span)), tick = [0.2, 0.5, 1, 2].map((k) => k * unit).find((k) => span / k <= 12) ?? unit;
  for (let t = 0; t <= span * 1.0001; t += tick)
    svg.append(make("line", { x1: x(t), x2: x(t), y1: height - foot, y2: height - foot + 4, stroke: "#444" }), make("text", { x: x(t), y: height - foot + 14, "text-anchor": "middle", class: "fw-axis" }, String(Number(t.toPrecision(6)))));
  if (ghost) end(ghost, "pinned", { stroke: "#777", "stroke-dasharray": "3 3", "data-testid": "fw-old" });
  end(makespan, "end", {});
  const cursor = make("line", { x1: left, x2: left, y1: top - 2, y2: height - foot, class: "fw-cursor", "data-testid": "fw-cursor" });
  svg.append(cursor);
  return { svg, moveTo(t) { cursor.setAttribute("x1", x(t)); cursor.setAttribute("x2", x(t)); } };
}

// all moments at which something starts or ends
function ticksOf(rows) {
  const all = new Set([0]);
  for (const row of rows) for (const [, a, b] of row) { all.add(a); all.add(b); }
  return [...all].sort((a, b) => a - b);
}

// What every rank does at a moment, and which micro-batches it holds: [[doing, [held]]]. An action counts from its start up to its end.
function momentOf(rows, t) {
  return rows.map((row) => {
    const held = new Map();
    let doing = "";
    for (const [kind, a, b, stage, number] of row) {
      if (a > t) break;
      const key = `${stage}.${number}`;
      if (b > t) doing = doing ? `${doing}+${stage}${kind}${number}` : `${stage}${kind}${number}`;
      if (kind === "F") held.set(key, number);
      else if (b <= t && kind !== "I") held.delete(key);
    }
    return [doing, [...held.values()].sort((p, q) => p - q)];
  });
}

function runs(numbers) { // 1 2 3 5 -> "1–3 5"
  const out = [];
  for (const n of numbers) {
    const last = out.at(-1);
    if (last && n === last[1] + 1) last[1] = n; else if (!last || n !== last[1]) out.push([n, n]);
  }
  return out.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(" ");
}

function momentTable(rows, t) {
  const table = make("table", { class: `fw-table fw-moment ${rows.length > 12 ? "fw-dense" : ""}`, "data-testid": "fw-moment" });
  table.append(make("tr", {}, ...["rank", "does", "holds"].map((text) => make("th", {}, text))));
  momentOf(rows, t).forEach(([doing, held], rank) => table.append(make("tr", {},
    ...[String(rank), doing || "waits", held.length ? `${held.length}: ${runs(held)}` : "nothing"].map((text) => make("td", {}, text)))));
  return table;
}

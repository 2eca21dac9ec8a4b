// The memory explorer: a bar for each stage, the device's line, and what the saving costs in bytes sent and FLOPs done again.

const W = 560, H = 372, BOX = { x: 62, y: 30, w: 434, h: 292 }; // right of the box: the device's name
const ASKED = 136; // the height of the bars while a question stands below them
const NAMES = { model: "Model", card: "Card", batch: "Batch", b: "b", s: "s", t: "t", p: "p", d: "d", zero: "ZeRO", sequence: "Sequence parallel",
  recompute: "Recompute", precision: "Numbers", schedule: "Schedule", v: "v", attention: "Attention", kv: "Key heads", gated: "MLP" };
const SAYS = { kv: { 0: "as the model" }, gated: { false: "as the model", true: "gated" }, schedule: { gpipe: "GPipe", "1f1b": "1F1B" },
  attention: { whole: "s × s kept", tiled: "in tiles" }, precision: { mixed: "mixed 16 B", "mixed-fp32-gradients": "mixed 18 B", half: "all 16 bit" } };
const TIPS = { batch: "sequences of a step, all ranks together", b: "sequences of a micro-batch", s: "tokens of a sequence", t: "tensor parallel ranks",
  p: "pipeline stages", d: "data parallel ranks", v: "chunks of a rank, interleaved", kv: "key and value heads: fewer than heads is grouped queries",
  precision: "bytes a parameter, with Adam" };
const HATCHED = { gradients: "//", optimizer: "xx", logits: "..", recomputed: "\\\\" };

function render({ model, el }) {
  const ui = frame(el, { title: "Memory explorer", testid: "fw-memory", height: H + 8 });
  const uid = Math.random().toString(36).slice(2), done = new Set(), box = {};
  const { options, setting: start, presets } = sceneOf(model);
  const line = () => ui.controls.append(make("span", { class: "fw-break" }));
  const explore = () => game.want({ mode: "explore", setting: Object.fromEntries(Object.entries(box).map(([word, node]) => [word, options[word][node.selectedIndex]])) });
  const choice = (word) => {
    const listed = options[word].map((value) => [String(value), SAYS[word]?.[value] ?? String(value)]);
    box[word] = ui.select(NAMES[word], listed, String(start[word]), `fw-${word}`, explore);
    box[word].title = TIPS[word] ?? "";
  };
  const preset = ui.select("Preset", [["", "…"], ...presets.map((name) => [name, name])], "", "fw-preset", (name) => { if (name) game.want({ mode: "preset", name }); });
  for (const word of ["model", "card"]) choice(word);
  line();
  for (const word of ["batch", "b", "s", "t", "p", "d", "zero"]) choice(word);
  line();
  for (const word of ["sequence", "recompute", "precision"]) choice(word);
  line();
  for (const word of ["schedule", "v", "attention", "kv", "gated"]) choice(word);
  line();
  const game = guessed(model, ui, {
    pinTip: "Keep these bars as outlines behind the next ones", nextText: "Next question", draw,
    keyOf: (event) => game.scene.question.choices.map(([letter]) => letter).find((letter) => letter === event.key.toLowerCase()),
    onfresh: () => {
      if (game.scene.before) game.pinned = game.scene.before;
      game.scene.reached.forEach((is, k) => { if (is) done.add(k); });
    },
  });
  const main = make("div", { class: "fw-main" }), side = make("div", { class: "fw-side", "data-testid": "fw-side" });
  ui.stage.append(main, side);
  ui.stage.style.overflow = "auto"; // at 200% the picture keeps its size, and scrolls
  main.style.minWidth = "340px";

  const sum = (stage) => Object.values(stage).reduce((a, b) => a + b, 0);
  const text = (bytes) => { const [u, name] = bytes >= 1e12 ? [1e12, "TB"] : bytes >= 1e9 ? [1e9, "GB"] : [1e6, "MB"]; return `${Number((bytes / u).toPrecision(3))} ${name}`; };

  function draw() {
    const { scene } = game, shut = scene.curtain;
    for (const [word, node] of Object.entries(box)) node.selectedIndex = options[word].indexOf(scene.setting[word]);
    preset.value = "";
    game.lock([preset, ...Object.values(box)], "First the guess. That unlocks the controls.");
    if (!shut) box.v.disabled = scene.setting.schedule !== "interleaved";
    ui.setBadge(scene.source);
    const asked = shut ? [questionBox(game, [scene.question.text], scene.question.choices.map(([letter, name]) => [letter, `${letter}: ${name}`, `fw-answer-${letter}`]))] : [];
    game.show(main, scene.error ? make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error) : picture(), ...asked);
    drawSide();
    ui.say(scene.error ? "This setting cannot be. The message says what is legal." : scene.words);
    const goal = scene.targets.findIndex((_, k) => !done.has(k));
    const count = `${done.size} of ${scene.targets.length} goals so far; ${game.right} of ${scene.points} questions right`;
    if (goal < 0) ui.setGoal(`all ${scene.targets.length} goals; ${game.right} of ${scene.points} questions right.`, "reached");
    else ui.setGoal(`${scene.targets[goal]} (${count}.)`, scene.verdict === false ? "missed" : "open");
  }

  function patterns() {
    const marks = { "//": ["M0 6L6 0"], xx: ["M0 6L6 0", "M0 0L6 6"], "..": [], "\\\\": ["M0 0L6 6"] };
    return make("defs", {}, ...game.scene.parts.filter((part) => HATCHED[part]).map((part) => make("pattern", { id: `fw-${part}-${uid}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      ...(HATCHED[part] === ".." ? [make("circle", { cx: 3, cy: 3, r: 1.1, fill: "#222" })] : marks[HATCHED[part]].map((d) => make("path", { d, stroke: "#333", "stroke-width": 0.8, fill: "none" }))))));
  }

  function picture() {
    const { scene } = game, { stages, looks, limit } = scene, pinned = game.pinned && !scene.curtain && !game.pinned.error ? game.pinned : null;
    const tall = scene.curtain ? ASKED : BOX.h;
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, class: "fw-svg", role: "img", "aria-label": scene.words });
    const top = (scene.curtain ? 1.15 : 1.06) * Math.max(limit, ...stages.map(sum), ...(pinned ? pinned.stages.map(sum) : [])), y = (bytes) => BOX.y + tall * (1 - bytes / top);
    const count = stages.length, same = pinned && pinned.stages.length === count, room = Math.min(90, BOX.w / count), wide = room * (count > 24 ? 0.86 : 0.66);
    const x = (k) => BOX.x + (BOX.w - room * count) / 2 + room * (k + 0.5) - wide / 2;
    const halo = "paint-order:stroke;stroke:#fff;stroke-width:3px", totals = [];
    svg.append(patterns());
    let at = 8;
    for (const part of scene.parts.filter((one) => stages.some((stage) => stage[one] > 0))) {
      svg.append(make("rect", { x: at, y: 6, width: 14, height: 11, fill: looks[part][0], stroke: "#555", "stroke-width": 0.5 }));
      if (HATCHED[part]) svg.append(make("rect", { x: at, y: 6, width: 14, height: 11, fill: `url(#fw-${part}-${uid})` }));
      svg.append(make("text", { x: at + 18, y: 15, class: "fw-axis" }, `${looks[part][1]} ${part}`));
      at += 42 + 5.8 * part.length;
    }
    const unit = 10 ** Math.floor(Math.log10(top)), tick = [0.1, 0.2, 0.5, 1, 2, 5].map((k) => k * unit).find((k) => top / k <= (scene.curtain ? 5 : 8)) ?? unit;
    for (let bytes = 0; bytes <= top; bytes += tick)
      svg.append(make("line", { x1: BOX.x, x2: BOX.x + BOX.w, y1: y(bytes), y2: y(bytes), stroke: "#ddd", "stroke-width": 0.7 }),
        make("text", { x: BOX.x - 5, y: y(bytes) + 3.5, "text-anchor": "end", class: "fw-axis" }, bytes ? text(bytes) : "0"));
    stages.forEach((stage, k) => {
      let floor = 0;
      for (const part of scene.parts) {
        if (!stage[part]) continue;
        const high = y(floor) - y(floor + stage[part]), place = { x: x(k), y: y(floor + stage[part]), width: wide, height: Math.max(high, 0.3) };
        svg.append(make("rect", { ...place, fill: looks[part][0], stroke: "#444", "stroke-width": 0.5, class: `fw-part fw-part-${part}` }, make("title", {}, `stage ${k}, ${part}: ${text(stage[part])}`)));
        if (HATCHED[part]) svg.append(make("rect", { ...place, fill: `url(#fw-${part}-${uid})`, "pointer-events": "none" }));
        if (high > 13 && wide > 12) svg.append(make("rect", { x: x(k) + wide / 2 - 6, y: place.y + high / 2 - 6.5, width: 12, height: 13, rx: 3, fill: "#fff", opacity: 0.85 }),
          make("text", { x: x(k) + wide / 2, y: place.y + high / 2 + 3.5, "text-anchor": "middle", class: "fw-tag" }, looks[part][1]));
        floor += stage[part];
      }
      const every = Math.ceil(count / 16), first = k === scene.tall;
      if (k % every === 0 || first) svg.append(make("text", { x: x(k) + wide / 2, y: BOX.y + tall + 14, "text-anchor": "middle", class: "fw-axis", style: first ? "font-weight:bold" : "" }, String(k)));
      if (first || (room > 34 && count <= 12)) totals.push(make("text", { x: Math.max(x(k) + wide / 2, BOX.x + 22), y: y(floor) - 3, "text-anchor": "middle", class: "fw-axis", style: `${halo};${first ? "font-weight:bold" : ""}` }, text(floor)));
    });
    const ghosts = { fill: "none", stroke: "#555", "stroke-width": 1.3, "stroke-dasharray": "4 3", "data-testid": "fw-old" };
    if (same) pinned.stages.forEach((stage, k) => svg.append(make("path", { d: `M${x(k) - 3} ${y(0)}V${y(sum(stage))}H${x(k) + wide + 3}V${y(0)}`, ...ghosts })));
    else if (pinned) svg.append(make("path", { d: `M${BOX.x} ${y(pinned.total)}H${BOX.x + BOX.w}`, ...ghosts }),
      make("text", { x: BOX.x + 4, y: y(pinned.total) - 4, class: "fw-note", style: halo }, `pinned, the tallest of ${pinned.stages.length}: ${text(pinned.total)}`));
    svg.append(make("line", { x1: BOX.x, x2: BOX.x + BOX.w, y1: y(limit), y2: y(limit), stroke: "#D55E00", "stroke-width": 2, "stroke-dasharray": "7 4", class: "fw-limit" }),
      ...[scene.setting.card, text(limit)].filter((line, k, both) => both.indexOf(line) === k).map((line, k) => make("text", { x: BOX.x + BOX.w + 4, y: y(limit) + (k ? 13 : -2), class: "fw-note" }, line)),
      make("text", { x: BOX.x + BOX.w / 2, y: BOX.y + tall + 38, "text-anchor": "middle", class: "fw-axis" }, count > 1 ? "pipeline stage; bytes that each of its ranks holds" : "one stage; bytes that each rank holds"),
      make("rect", { x: BOX.x, y: BOX.y, width: BOX.w, height: tall, fill: "none", stroke: "#444" }), ...totals);
    return svg;
  }

  function drawSide() {
    const { scene } = game, old = game.pinned && !scene.curtain && !game.pinned.error ? game.pinned : null;
    const table = make("table", { class: "fw-table fw-moment", "data-testid": "fw-lines" });
    table.append(make("tr", {}, ...["", "now", ...(old ? ["pinned"] : [])].map((one) => make("th", {}, one))));
    scene.table.forEach(([what, value], k) => table.append(make("tr", { style: what === "bar" ? "font-weight:bold" : "" }, ...[what, value, ...(old ? [old.table[k][1]] : [])].map((one) => make("td", {}, one)))));
    const head = scene.error ? "" : `Stage ${scene.tall}, the tallest`;
    const ghost = old ? `Pinned (dashed): ${old.setting.model}, t ${old.setting.t}, p ${old.setting.p}, d ${old.setting.d}.` : scene.curtain ? "The answer unlocks the switches." : "Pin keeps these bars as outlines.";
    side.replaceChildren(make("div", { class: "fw-ghost-title" }, head), table, make("div", { class: "fw-hint", "data-testid": "fw-ghost" }, ghost));
  }

  draw();
  return () => game.stop();
}

export default { render };

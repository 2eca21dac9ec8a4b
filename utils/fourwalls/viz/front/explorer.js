// The alpha-beta explorer: log-log curves, the winner as background, measured dots with their spread, a table at the cursor.

const W = 600, H = 330, BOX = { x: 50, y: 8, w: 530, h: 282 };
const LOW = -6, HIGH = 2; // decades of seconds: 1 µs to 100 s, the same in every picture, so that a ghost can be compared
const STEP = 0.05; // of a slider, in powers of ten

function render({ model, el }) {
  const ui = frame(el, { title: "Alpha-beta explorer", testid: "fw-explorer", height: H + 8 });
  const uid = Math.random().toString(36).slice(2);
  let scene = sceneOf(model), pinned = null, off = new Set(), own = {};

  const limits = (name) => scene.limits[name].map((x) => Math.round(Math.log10(x) / STEP));
  const octaves = scene.sizes.map((s) => Math.round(2 * Math.log2(s)));
  const setting = () => ({ wire: wire.value, n: Number(ranks.value), size: Math.round(2 ** (size.node.value / 2)), off: [...off], ...own });
  const explore = () => game.want({ mode: "explore", setting: setting() });

  let shownRanks = String(scene.ranks); // a wire may allow fewer numbers of ranks than another
  const wire = ui.select("Wire", scene.wires.map((w) => [w, w]), scene.setting.wire, "fw-wire", () => { own = {}; explore(); });
  const ranks = ui.select("Ranks n", scene.ranks.map((n) => [String(n), String(n)]), String(scene.setting.n), "fw-n", explore);
  const size = slider(ui, "Bytes S", octaves[0], octaves.at(-1), "fw-size", explore);
  ui.controls.append(make("span", { class: "fw-break" }));
  const where = [0, 1].map(() => make("span", {}));
  const alpha = slider(ui, "alpha", ...limits("alpha"), "fw-alpha", () => { own.alpha = 10 ** (alpha.node.value * STEP); explore(); });
  const bandwidth = slider(ui, "1/beta", ...limits("bandwidth"), "fw-bandwidth", () => { own.bandwidth = 10 ** (bandwidth.node.value * STEP); explore(); });
  alpha.node.before(where[0]); bandwidth.node.before(where[1]);
  ui.controls.append(make("span", { class: "fw-break" }));
  const switches = scene.all.map((name) => {
    const node = make("input", { type: "checkbox", checked: true, "data-testid": `fw-on-${name}`, onchange: () => {
      if (node.checked) off.delete(name); else off.add(name);
      if (scene.names.every((one) => off.has(one))) { off.delete(name); node.checked = true; ui.say("One algorithm must stay."); return; }
      explore();
    } });
    ui.controls.append(make("label", { class: "fw-label" }, node, ` ${scene.looks[name][2]} ${name}`));
    return node;
  });
  const game = guessed(model, ui, {
    pinTip: "Keep these curves, grey, behind the next ones", nextText: "Next hidden point", draw,
    keyOf: (event) => scene.names.find((one) => scene.looks[one][2].toLowerCase() === event.key.toLowerCase()),
    onfresh: (was) => { if (game.scene.curtain || was.curtain) { own = {}; off = new Set(); switches.forEach((node) => { node.checked = true; }); } },
  });
  for (const node of [alpha.node, bandwidth.node]) node.title = "Of the wire; where there are nodes, of the wire between them";

  const main = make("div", { class: "fw-main" }), side = make("div", { class: "fw-side fw-side-wide", "data-testid": "fw-side" });
  ui.stage.append(main, side);
  function draw() {
    ({ scene, pinned } = game);
    const { setting: now, texts } = scene, shut = scene.curtain;
    if (String(scene.ranks) !== shownRanks) {
      shownRanks = String(scene.ranks);
      ranks.replaceChildren(...scene.ranks.map((n) => make("option", { value: String(n) }, String(n))));
    }
    wire.value = now.wire; ranks.value = String(now.n);
    for (const node of where) node.textContent = scene.nodes ? "between nodes " : "";
    size.node.value = Math.round(2 * Math.log2(now.size)); size.text.textContent = texts.size;
    alpha.node.value = Math.round(Math.log10(now.alpha) / STEP); alpha.text.textContent = texts.alpha;
    bandwidth.node.value = Math.round(Math.log10(now.bandwidth) / STEP); bandwidth.text.textContent = texts.bandwidth;
    switches.forEach((node, k) => { node.parentNode.hidden = !scene.names.includes(scene.all[k]); });
    game.lock([wire, ranks, size.node, alpha.node, bandwidth.node, ...switches], "First the guess: who wins at this point? That unlocks the controls.");
    ui.setBadge(scene.source);
    game.show(main, scene.error ? make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error) : picture(), ...(shut ? [question()] : []));
    drawSide();
    ui.say(scene.error ? "This setting stopped with an error." : scene.words);
    ui.setGoal(`name the winner at three hidden points (within 10% counts). ${Math.min(game.right, 3)} of 3 so far.`, game.right >= 3 ? "reached" : scene.verdict === false ? "missed" : "open");
  }

  function question() {
    const lines = [`Hidden point ${game.asked + 1}. Who wins?`, `${scene.setting.n} ranks, ${scene.texts.size}`, scene.setting.wire];
    return questionBox(game, lines, scene.names.map((one) => [one, `${scene.looks[one][2]} ${one}`, `fw-name-${one}`]));
  }

  const x = (bytes) => BOX.x + BOX.w * (Math.log2(bytes) - Math.log2(scene.sizes[0])) / (Math.log2(scene.sizes.at(-1)) - Math.log2(scene.sizes[0]));
  const y = (seconds) => BOX.y + BOX.h * (HIGH - Math.log10(seconds)) / (HIGH - LOW);
  const line = (seconds) => seconds.map((t, k) => `${k ? "L" : "M"}${x(scene.sizes[k]).toFixed(1)} ${y(t).toFixed(1)}`).join("");

  function picture() {
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, class: "fw-svg", role: "img", "aria-label": scene.words });
    svg.append(make("defs", {}, make("clipPath", { id: `fw-box-${uid}` }, make("rect", { x: BOX.x, y: BOX.y, width: BOX.w, height: BOX.h }))));
    for (const [start, end, winner, beside] of scene.fields) {
      const left = x(start), wide = x(end) - left, [colour, , letter] = scene.looks[winner], text = beside ? `${letter}≈${scene.looks[beside][2]}` : letter;
      svg.append(make("rect", { x: left, y: BOX.y, width: wide, height: BOX.h, fill: colour, opacity: beside ? 0.1 : 0.28, class: "fw-field", "data-winner": winner },
        make("title", {}, beside ? `${winner}, or ${beside}` : winner)));
      svg.append(make("line", { x1: left + wide, x2: left + wide, y1: BOX.y, y2: BOX.y + BOX.h, stroke: "#888", "stroke-width": 0.7 }));
      if (wide > text.length * 11) svg.append(make("text", { x: left + wide / 2, y: BOX.y + BOX.h - 6, "text-anchor": "middle", class: "fw-winner" }, text));
    }
    for (let decade = LOW; decade <= HIGH; decade++) {
      const at = y(10 ** decade), words = { "-6": "1 µs", "-5": "10 µs", "-4": "0.1 ms", "-3": "1 ms", "-2": "10 ms", "-1": "0.1 s", 0: "1 s", 1: "10 s", 2: "100 s" };
      svg.append(make("line", { x1: BOX.x, x2: BOX.x + BOX.w, y1: at, y2: at, stroke: "#ddd", "stroke-width": 0.7 }),
        make("text", { x: BOX.x - 5, y: at + 3.5, "text-anchor": "end", class: "fw-axis" }, words[decade]));
    }
    for (let power = 6; power <= 32; power += 4) {
      const at = x(2 ** power), [value, unit] = power < 10 ? [power, "B"] : power < 20 ? [power - 10, "KiB"] : power < 30 ? [power - 20, "MiB"] : [power - 30, "GiB"];
      svg.append(make("line", { x1: at, x2: at, y1: BOX.y + BOX.h, y2: BOX.y + BOX.h + 4, stroke: "#444" }),
        make("text", { x: at, y: BOX.y + BOX.h + 15, "text-anchor": "middle", class: "fw-axis" }, `${2 ** value} ${unit}`));
    }
    svg.append(make("text", { x: BOX.x + BOX.w / 2, y: H - 5, "text-anchor": "middle", class: "fw-axis" }, "bytes of the tensor"),
      make("rect", { x: BOX.x, y: BOX.y, width: BOX.w, height: BOX.h, fill: "none", stroke: "#444" }));
    const inside = make("g", { "clip-path": `url(#fw-box-${uid})` });
    svg.append(inside);
    (pinned && !scene.curtain ? pinned.curves : []).forEach((curve, k) => { // letters at the right end, where the present curves have none
      const at = scene.sizes.length - 3 - 3 * k;
      inside.append(make("path", { d: line(curve.seconds), class: "fw-old", "data-testid": "fw-old" }),
        make("circle", { cx: x(scene.sizes[at]), cy: y(curve.seconds[at]), r: 6, fill: "#eee", stroke: "#777" }),
        make("text", { x: x(scene.sizes[at]), y: y(curve.seconds[at]) + 3.5, "text-anchor": "middle", class: "fw-tag fw-old-tag" }, scene.looks[curve.name][2]));
    });
    const dotted = [...new Set(scene.dots.flatMap((dot) => dot.points.map((point) => point[0])))].map(x);
    const free = scene.sizes.map((_, k) => k).filter((k) => k % 3 === 1 && dotted.every((at) => x(scene.sizes[k]) < at - 14 || x(scene.sizes[k]) > at + 30));
    const tags = []; // they keep clear of the dots and their letters, and lie above all curves
    scene.curves.forEach((curve, k) => {
      const [colour, dash, letter] = scene.looks[curve.name], at = free[k % free.length], t = curve.seconds[at];
      inside.append(make("path", { d: line(curve.seconds), class: "fw-curve", stroke: colour, "stroke-dasharray": dash, "data-name": curve.name }));
      tags.push(make("circle", { cx: x(scene.sizes[at]), cy: y(t), r: 7, fill: "#fff", stroke: colour }),
        make("text", { x: x(scene.sizes[at]), y: y(t) + 3.5, "text-anchor": "middle", class: "fw-tag" }, letter));
    });
    inside.append(...tags);
    for (const at of dotted) { // every dot where it was measured; the letters stand beside it, pushed apart, each with a thread to its dot
      const found = scene.dots.flatMap(({ name, points }) => points.filter((point) => x(point[0]) === at).map((point) => ({ name, point })));
      found.sort((a, b) => b.point[1] - a.point[1]);
      let above = -Infinity;
      const places = found.map(({ point }) => { above = Math.max(y(point[1]), above + 11); return above; });
      const down = Math.max(0, places.at(-1) - (BOX.y + BOX.h - 24)) + (places.at(-1) - places[0] - (y(found.at(-1).point[1]) - y(found[0].point[1]))) / 2;
      found.forEach(({ name, point: [, t, low, high] }, k) => {
        const [colour, , letter] = scene.looks[name], beside = places[k] - down;
        inside.append(make("g", { class: "fw-dot", "data-name": name },
          make("line", { x1: at, x2: at, y1: y(low), y2: y(high), stroke: colour, "stroke-width": 1.5 }),
          make("line", { x1: at, x2: at + 14, y1: y(t), y2: beside, stroke: colour, "stroke-width": 0.8 }),
          make("circle", { cx: at, cy: y(t), r: 3.5, fill: "#fff", stroke: colour, "stroke-width": 2 }, make("title", {}, `${name}, measured`)),
          make("rect", { x: at + 14, y: beside - 5.5, width: 11, height: 11, fill: "#fff", stroke: colour, "stroke-width": 0.8 }),
          make("text", { x: at + 19.5, y: beside + 3.5, "text-anchor": "middle", class: "fw-tag" }, letter)));
      });
    }
    if (!scene.curtain) {
      const at = x(scene.setting.size);
      inside.append(make("line", { x1: at, x2: at, y1: BOX.y, y2: BOX.y + BOX.h, class: "fw-cursor" }));
      for (const row of scene.table) inside.append(make("circle", { cx: at, cy: y(row.seconds), r: 3.5, fill: scene.looks[row.name][0], stroke: "#000" }));
    }
    return svg;
  }

  function drawSide() {
    const table = make("table", { class: "fw-table" });
    const share = (s) => `${s < 10 ? s.toFixed(2) : Math.round(s)} S`;
    const across = scene.nodes ? ["between"] : [];
    if (scene.table.length) table.append(make("tr", {}, ...["", "time", "messages", "bytes", ...across].map((text) => make("th", {}, text))));
    for (const row of scene.table) {
      const line = make("tr", { title: `${row.messages} messages in a row, ${row.share.toPrecision(3)} S in all, ${row.across.toPrecision(3)} S of it between nodes` });
      for (const text of [`${scene.looks[row.name][2]} ${row.name}`, row.text, String(row.messages), share(row.share), ...across.map(() => share(row.across))])
        line.append(make("td", {}, text));
      table.append(line);
    }
    const head = scene.curtain ? "The answer unlocks the curves." : `At the cursor, ${scene.texts.size}; the longest chain of messages that wait for each other${scene.nodes ? ", and how much of it goes between nodes" : ""}:`;
    const dots = scene.dots.length ? [make("div", { class: "fw-hint" }, `Measured: ${scene.dots.map((d) => `${scene.looks[d.name][2]} ${d.name}`).join(", ")}`)] : [];
    const old = pinned ? `Pinned (grey): ${pinned.setting.n} ranks, ${pinned.setting.wire}, ${pinned.texts.alpha}, ${pinned.texts.bandwidth}; at ${pinned.texts.size} ${pinned.table[0].name} won with ${pinned.table[0].text}.`
      : "Pin keeps a ghost of the present curves.";
    side.replaceChildren(make("div", { class: "fw-ghost-title" }, head), table, ...dots, make("div", { class: "fw-hint", "data-testid": "fw-ghost" }, old));
  }

  draw();
  return () => game.stop();
}

export default { render };

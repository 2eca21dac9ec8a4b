// The bucket explorer: buckets under the backward above, exposed time over the size of a bucket below, a table beside them.

const W = 600, H = 392, BOX = { x: 58, y: 138, w: 526, h: 206 }, BARS = { x: 58, w: 526, back: 16, wire: 58, ghost: 98, high: 32 };
const LOW = -5, HIGH = 3; // decades of seconds: 10 µs to 1000 s, the same in every picture, so that a ghost can be compared
const STEP = 0.05; // of a slider, in powers of ten

function render({ model, el }) {
  const ui = frame(el, { title: "Bucket explorer", testid: "fw-buckets", height: H + 8 });
  const uid = Math.random().toString(36).slice(2);
  let scene = sceneOf(model), pinned = null, own = {};

  const limits = (name) => scene.limits[name].map((x) => Math.round(Math.log10(x) / STEP));
  const octaves = scene.sizes.map((s) => Math.round(2 * Math.log2(s)));
  const explore = () => game.want({ mode: "explore", setting: { case: which.value, bucket: 2 ** (bucket.node.value / 2), ...own } });

  const which = ui.select("Case", scene.cases.map((c) => [c, c]), scene.setting.case, "fw-case", () => { own = {}; explore(); });
  const bucket = slider(ui, "Bucket", octaves[0], octaves.at(-1), "fw-bucket", explore);
  ui.controls.append(make("span", { class: "fw-break" }));
  const bandwidth = slider(ui, "Bandwidth", ...limits("bandwidth"), "fw-bandwidth", () => { own.bandwidth = 10 ** (bandwidth.node.value * STEP); explore(); });
  const backward = slider(ui, "Backward", ...limits("backward"), "fw-backward", () => { own.backward = 10 ** (backward.node.value * STEP); explore(); });
  ui.controls.append(make("span", { class: "fw-break" }));
  const game = guessed(model, ui, {
    pinTip: "Keep this curve and these buckets, grey, beside the next ones", nextText: "Next hidden point", draw,
    keyOf: (event) => scene.choices.find((_, k) => letter(k).toLowerCase() === event.key.toLowerCase()),
    onfresh: (was) => { if (game.scene.curtain || was.curtain) own = {}; },
  });

  const main = make("div", { class: "fw-main" }), side = make("div", { class: "fw-side", "data-testid": "fw-side" });
  ui.stage.append(main, side);
  ui.stage.style.overflow = "auto"; // at 200% the picture keeps its size, and scrolls
  main.style.minWidth = "340px";
  const letter = (k) => "ABCDEFGH"[k];

  function draw() {
    ({ scene, pinned } = game);
    const { setting: now, texts } = scene, shut = scene.curtain;
    which.value = now.case;
    bucket.node.value = Math.round(2 * Math.log2(now.bucket)); bucket.text.textContent = shut ? "?" : texts.bucket;
    bandwidth.node.value = Math.round(Math.log10(now.bandwidth) / STEP); bandwidth.text.textContent = texts.bandwidth;
    backward.node.value = Math.round(Math.log10(now.backward) / STEP); backward.text.textContent = texts.backward;
    game.lock([which, bucket.node, bandwidth.node, backward.node], "First the guess: which bucket exposes least? That unlocks the controls.");
    ui.setBadge(scene.source);
    game.show(main, scene.error ? make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error) : picture(), ...(shut ? [question()] : []));
    drawSide();
    ui.say(scene.error ? "This setting stopped with an error." : scene.words);
    ui.setGoal(`name the bucket that exposes least at three hidden points (within 10% counts). ${Math.min(game.right, 3)} of 3 so far.`, game.right >= 3 ? "reached" : scene.verdict === false ? "missed" : "open");
  }

  function question() {
    const lines = [`Hidden point ${game.asked + 1}. Which bucket exposes least?`, scene.setting.case, `backward ${scene.texts.backward}, wire ${scene.texts.bandwidth}`];
    return questionBox(game, lines, scene.choices.map((one, k) => [one, `${letter(k)} ${one}`, `fw-choice-${k}`]));
  }

  const x = (bytes) => BOX.x + BOX.w * (Math.log2(bytes) - Math.log2(scene.sizes[0])) / (Math.log2(scene.sizes.at(-1)) - Math.log2(scene.sizes[0]));
  const y = (seconds) => BOX.y + BOX.h * (HIGH - Math.log10(Math.min(Math.max(seconds, 10 ** LOW), 10 ** HIGH))) / (HIGH - LOW);
  const line = (seconds) => seconds.map((t, k) => `${k ? "L" : "M"}${x(scene.sizes[k]).toFixed(1)} ${y(t).toFixed(1)}`).join("");
  const timeText = (t) => { const [u, name] = t >= 1 ? [1, "s"] : t >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"]; return `${Number((t / u).toPrecision(3))} ${name}`; };

  function bars(svg) {
    const ghost = pinned && !scene.curtain ? pinned.bars : null, end = Math.max(scene.bars.end, ghost ? ghost.end : 0);
    const at = (t) => BARS.x + BARS.w * t / end, block = (a, z, top, extra) => make("rect", { x: at(a), y: top, width: Math.max(at(z) - at(a), 0.6), height: BARS.high, ...extra });
    const pattern = make("pattern", { id: `fw-hatch-${uid}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      make("rect", { width: 6, height: 6, fill: "#D55E00" }), make("line", { x1: 0, x2: 0, y1: 0, y2: 6, stroke: "#000", "stroke-width": 2.4 }));
    svg.append(make("defs", {}, pattern));
    for (const [top, text] of [[BARS.back, "backward"], [BARS.wire, "wire"], ...(ghost ? [[BARS.ghost - 9, "pinned"]] : [])])
      svg.append(make("text", { x: BARS.x - 5, y: top + BARS.high / 2 + 4, "text-anchor": "end", class: "fw-axis" }, text));
    svg.append(block(0, scene.bars.backward, BARS.back, { fill: "#E69F00", stroke: "#444", class: "fw-backward" }));
    const { backward: over, buckets, joined } = scene.bars, few = !joined && at(over) - at(0) > 4 * buckets.length; // lines need room
    buckets.forEach(([ready, start, stop], k) => {
      if (few && ready < over) svg.append(make("line", { x1: at(ready), x2: at(ready), y1: BARS.back, y2: BARS.back + BARS.high, stroke: "#444", "stroke-width": 0.8 }));
      const edge = few ? { stroke: "#444", "stroke-width": 0.6 } : {};
      if (start < over) svg.append(block(start, Math.min(stop, over), BARS.wire, { fill: "#D55E00", class: "fw-block", ...edge }));
      if (stop > over) svg.append(block(Math.max(start, over), stop, BARS.wire, { fill: `url(#fw-hatch-${uid})`, class: "fw-block fw-exposed", ...edge }));
      const wide = at(stop) - at(start);
      if (few && wide > 16) svg.append(make("rect", { x: at(start) + wide / 2 - 8, y: BARS.wire + 9, width: 16, height: 14, rx: 3, fill: "#fff", opacity: 0.85 }),
        make("text", { x: at(start) + wide / 2, y: BARS.wire + 20, "text-anchor": "middle", class: "fw-tag" }, String(k + 1)));
    });
    if (ghost) for (const [, start, stop] of ghost.buckets) svg.append(make("rect", { x: at(start), y: BARS.ghost, width: Math.max(at(stop) - at(start), 0.6), height: 8, fill: "#999", "data-testid": "fw-old-bar" }));
    const here = at(over);
    svg.append(make("line", { x1: here, x2: here, y1: 6, y2: BARS.ghost + 10, stroke: "#000", "stroke-width": 1.2, "stroke-dasharray": "4 3" }),
      make("text", { x: here > BARS.x + 150 ? here - 4 : here + 5, y: 11, "text-anchor": here > BARS.x + 150 ? "end" : "start", class: "fw-axis" }, `backward ends, ${timeText(over)}`));
    if (!scene.curtain) svg.append(make("text", { x: BARS.x + BARS.w, y: BARS.ghost + 22, "text-anchor": "end", class: "fw-axis" }, `${timeText(end)}`),
      make("text", { x: BARS.x, y: BARS.ghost + 22, class: "fw-axis" }, joined ? `0 s; ${joined.toLocaleString("en")} buckets, drawn as one where they touch` : "0 s"));
  }

  function picture() {
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, class: "fw-svg", role: "img", "aria-label": scene.words });
    bars(svg);
    svg.append(make("defs", {}, make("clipPath", { id: `fw-box-${uid}` }, make("rect", { x: BOX.x, y: BOX.y, width: BOX.w, height: BOX.h }))));
    const said = { "-5": "10 µs", "-4": "0.1 ms", "-3": "1 ms", "-2": "10 ms", "-1": "0.1 s", 0: "1 s", 1: "10 s", 2: "100 s", 3: "1000 s" };
    for (let decade = LOW; decade <= HIGH; decade++) {
      const at = y(10 ** decade);
      svg.append(make("line", { x1: BOX.x, x2: BOX.x + BOX.w, y1: at, y2: at, stroke: "#ddd", "stroke-width": 0.7 }),
        make("text", { x: BOX.x - 5, y: at + 3.5, "text-anchor": "end", class: "fw-axis" }, said[decade]));
    }
    for (let power = 16; power <= 30; power += 2) {
      const at = x(2 ** power), [value, unit] = power < 20 ? [power - 10, "KiB"] : power < 30 ? [power - 20, "MiB"] : [power - 30, "GiB"];
      svg.append(make("line", { x1: at, x2: at, y1: BOX.y + BOX.h, y2: BOX.y + BOX.h + 4, stroke: "#444" }),
        make("text", { x: at, y: BOX.y + BOX.h + 15, "text-anchor": "middle", class: "fw-axis" }, `${2 ** value} ${unit}`));
    }
    svg.append(make("text", { x: BOX.x + BOX.w / 2, y: H - 8, "text-anchor": "middle", class: "fw-axis" }, "bytes of a bucket"),
      make("text", { x: BOX.x + 6, y: BOX.y + 13, class: "fw-note" }, "exposed communication"),
      make("rect", { x: BOX.x, y: BOX.y, width: BOX.w, height: BOX.h, fill: "none", stroke: "#444" }));
    const inside = make("g", { "clip-path": `url(#fw-box-${uid})` });
    svg.append(inside);
    if (scene.curtain) return svg;
    if (pinned) inside.append(make("path", { d: line(pinned.curve), class: "fw-old", "data-testid": "fw-old" }));
    if (scene.floor > 0) inside.append(make("line", { x1: BOX.x, x2: BOX.x + BOX.w, y1: y(scene.floor), y2: y(scene.floor), stroke: "#0072B2", "stroke-dasharray": "7 3", class: "fw-floor" }),
      make("text", { x: BOX.x + BOX.w - 5, y: y(scene.floor) + 13, "text-anchor": "end", class: "fw-note" }, "the bytes alone, less backward"));
    inside.append(make("path", { d: line(scene.curve), class: "fw-curve", stroke: "#D55E00" }));
    for (const [bytes, t, low, high] of scene.dots)
      inside.append(make("g", { class: "fw-dot" }, make("line", { x1: x(bytes), x2: x(bytes), y1: y(low), y2: y(high), stroke: "#000", "stroke-width": 2 }),
        make("circle", { cx: x(bytes), cy: y(t), r: 5, fill: "#fff", stroke: "#000", "stroke-width": 2.2 }, make("title", {}, timeText(t)))));
    const at = x(scene.setting.bucket), least = Math.min(...scene.curve), place = scene.curve.indexOf(least);
    inside.append(make("line", { x1: at, x2: at, y1: BOX.y, y2: BOX.y + BOX.h, class: "fw-cursor" }),
      make("circle", { cx: x(scene.sizes[place]), cy: y(least), r: 6, fill: "none", stroke: "#009E73", "stroke-width": 2.5 }, make("title", {}, "least")),
      make("circle", { cx: at, cy: y(scene.bars.end - scene.bars.backward), r: 4, fill: "#D55E00", stroke: "#000" }));
    return svg;
  }

  function drawSide() {
    const table = make("table", { class: "fw-table" });
    for (const [what, value] of scene.table) table.append(make("tr", { style: `font-weight:${what === "exposed" ? "bold" : "normal"}` }, make("td", {}, what), make("td", {}, value)));
    const head = scene.curtain ? "The answer unlocks the curve." : `Buckets of ${scene.texts.bucket}`;
    const dots = scene.dots.length ? [make("div", { class: "fw-hint" }, `○ with a bar: ${scene.source.split(" ")[0]}, with its spread`)] : [];
    const hints = scene.curtain ? [] : [make("div", { class: "fw-hint" }, "Green ring: least. Hatched: exposed.")];
    const old = pinned ? `Pinned (grey): ${pinned.setting.case}, ${pinned.texts.bucket}, ${pinned.texts.bandwidth}, backward ${pinned.texts.backward}: ${timeText(pinned.bars.end - pinned.bars.backward)} exposed.`
      : "Pin keeps a ghost of the present curve and buckets.";
    side.replaceChildren(make("div", { class: "fw-ghost-title" }, head), table, ...hints, ...dots, make("div", { class: "fw-hint", "data-testid": "fw-ghost" }, old));
  }

  draw();
  return () => game.stop();
}

export default { render };

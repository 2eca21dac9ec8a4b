// The rounding bench: a histogram that stays, ticks that the scale moves over it, what is lost on both sides, and the model's loss.

const W = 560, H = 330, BOX = { x: 46, y: 34, w: 504, h: 226 };

function render({ model, el }) {
  const ui = frame(el, { title: "Rounding bench", testid: "fw-rounding", height: H + 8 });
  const uid = Math.random().toString(36).slice(2), done = new Set();
  const first = sceneOf(model), [low, high, STEP] = first.limits;
  const listed = (names) => names.map((name) => [name, name]);
  const wish = (loss) => game.want({ mode: "explore", loss, setting: { tensor: tensor.value, format: format.value, split: split.value, scale: Number(scale.node.value) * STEP } });

  const tensor = ui.select("Tensor", listed(first.tensors), first.setting.tensor, "fw-tensor", () => wish(true));
  const format = ui.select("Format", listed(first.formats), first.setting.format, "fw-format", () => wish(true));
  const split = ui.select("A scale for each", listed(first.splits), first.setting.split, "fw-split", () => wish(true));
  ui.controls.append(make("span", { class: "fw-break" }));
  const scale = slider(ui, "Scale", low / STEP, high / STEP, "fw-scale", () => { scale.text.textContent = `2^${scale.node.value * STEP}`; wish(false); });
  scale.node.classList.add("fw-scrub");
  scale.node.addEventListener("change", () => wish(true)); // released: now the model is asked
  const game = guessed(model, ui, {
    pinTip: "Keep these counters beside the next ones, and where zero and clipping begin as dashed lines", nextText: "Next question", draw,
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

  function draw() {
    const { scene } = game, now = scene.setting, shut = scene.curtain;
    tensor.value = now.tensor; format.value = now.format; split.value = now.split;
    scale.node.value = Math.round(now.scale / STEP); scale.text.textContent = `2^${now.scale}`;
    game.lock([tensor, format, split, scale.node], "First the guess. That unlocks the controls.");
    ui.setBadge(scene.source);
    const asked = shut ? [questionBox(game, [scene.question.text], scene.question.choices.map(([letter, name]) => [letter, `${letter}: ${name}`, `fw-answer-${letter}`]))] : [];
    game.show(main, scene.error ? make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error) : picture(), ...asked);
    drawSide();
    ui.say(scene.error ? "This setting cannot be. The message says what is allowed." : scene.words);
    const goal = scene.targets.findIndex((_, k) => !done.has(k));
    const count = `${done.size} of ${scene.targets.length} goals so far; ${game.right} of ${scene.points} questions right`;
    if (goal < 0) ui.setGoal(`all ${scene.targets.length} goals; ${game.right} of ${scene.points} questions right.`, "reached");
    else ui.setGoal(`${scene.targets[goal]} (${count}.)`, scene.verdict === false ? "missed" : "open");
  }

  function picture() {
    const { scene } = game, [left, right] = scene.span, floor = BOX.y + BOX.h;
    const x = (power) => BOX.x + BOX.w * (Math.min(Math.max(power, left), right) - left) / (right - left);
    const most = Math.max(...scene.bins.map((bin) => bin[2])), y = (share) => BOX.h * Math.sqrt(share / most);
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, class: "fw-svg", role: "img", "aria-label": scene.words });
    svg.append(make("defs", {}, ...[["zero", "M0 6L6 0", "#D55E00"], ["clip", "M0 0L6 6", "#CC79A7"], ["one", "M3 0V6", "#222"]].map(([name, d, stroke]) =>
      make("pattern", { id: `fw-${name}-${uid}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, make("path", { d, stroke, "stroke-width": 1.3, fill: "none" })))));
    const side_ = (a, b, name, fill, text) => {
      if (x(b) - x(a) < 0.5) return;
      svg.append(make("rect", { x: x(a), y: BOX.y, width: x(b) - x(a), height: BOX.h, fill, opacity: 0.18 }),
        make("rect", { x: x(a), y: BOX.y, width: x(b) - x(a), height: BOX.h, fill: `url(#fw-${name}-${uid})`, opacity: 0.5, class: `fw-${name}` }));
      if (x(b) - x(a) > 70) svg.append(make("text", { x: (x(a) + x(b)) / 2, y: BOX.y - 4, "text-anchor": "middle", class: "fw-tag" }, text));
    };
    if (scene.zero !== null) {
      side_(left, scene.zero, "zero", "#D55E00", "becomes zero");
      side_(scene.top, right, "clip", "#CC79A7", "clipped");
    }
    for (const [at, width, share, marked] of scene.bins) {
      const wide = Math.max(x(at + width) - x(at) - 0.6, 0.6), high_ = y(share);
      svg.append(make("rect", { x: x(at), y: floor - high_, width: wide, height: high_, fill: "#56B4E9", stroke: "#444", "stroke-width": 0.4, class: "fw-bin" }));
      if (marked > 0) {
        const part = high_ * marked / share;
        svg.append(make("rect", { x: x(at), y: floor - part, width: wide, height: part, fill: "#E69F00", stroke: "#444", "stroke-width": 0.4 }),
          make("rect", { x: x(at), y: floor - part, width: wide, height: part, fill: `url(#fw-one-${uid})`, opacity: 0.6 }));
      }
    }
    svg.append(make("line", { x1: BOX.x, x2: BOX.x + BOX.w, y1: floor, y2: floor, stroke: "#444" }));
    const old = game.pinned && !scene.curtain && ["tensor", "split"].every((word) => game.pinned.setting[word] === scene.setting[word]) ? game.pinned : null;
    if (old) for (const [power, text] of [[old.zero, "zero"], [old.top, "clip"]]) {
      if (power <= left || power >= right) continue;
      svg.append(make("line", { x1: x(power), x2: x(power), y1: BOX.y, y2: floor, class: "fw-old", "stroke-dasharray": "4 3", "data-testid": "fw-old" }),
        make("text", { x: x(power) + 3, y: BOX.y + 24, class: "fw-axis fw-old-tag", style: "paint-order:stroke;stroke:#fff;stroke-width:3px" }, `pinned: ${text}`));
    }
    const comb = scene.ticks.filter((power) => power >= left && power <= right).map((power) => `M${x(power).toFixed(1)} ${floor + 3}v14`).join("");
    if (comb) svg.append(make("path", { d: comb, stroke: "#000", "stroke-width": 0.9, class: "fw-ticks", "data-testid": "fw-ticks" }));
    if (!scene.curtain) svg.append(make("text", { x: BOX.x - 5, y: floor + 15, "text-anchor": "end", class: "fw-axis" }, scene.setting.format === "bf16" || scene.setting.format === "fp16" ? "2^k" : "ticks"));
    const step = [1, 2, 4, 8].find((k) => (right - left) / k <= 12) ?? 8;
    for (let power = Math.ceil(left / step) * step; power <= right; power += step)
      svg.append(make("text", { x: x(power), y: floor + 31, "text-anchor": "middle", class: "fw-axis" }, `2^${power}`));
    const units = scene.setting.split === "tensor" ? "size of a number" : `size of a number, each ${scene.setting.split} brought to the largest`;
    svg.append(make("text", { x: BOX.x + BOX.w / 2, y: H - 22, "text-anchor": "middle", class: "fw-axis" }, units),
      make("text", { x: BOX.x + BOX.w / 2, y: H - 7, "text-anchor": "middle", class: "fw-axis" }, "blue: how many; orange, striped: of the largest channel (height: square root of the share)"),
      make("text", { x: BOX.x, y: 14, class: "fw-note" }, `${scene.setting.tensor}${scene.curtain ? "" : `, ${scene.setting.format}`}`));
    return svg;
  }

  function drawSide() {
    const { scene } = game, old = game.pinned && !scene.curtain ? game.pinned : null;
    const part = (share) => share === 0 ? "none" : `${Number((100 * share).toPrecision(3))}%`, number = (v) => v === null ? "–" : v.toFixed(4);
    const rows = [["format", (s) => s.setting.format], ["scale", (s) => `2^${s.setting.scale}`], ["for each", (s) => s.setting.split],
      ["becomes zero", (s) => part(s.underflowed)], ["clipped", (s) => part(s.clipped)], ["RMS error", (s) => part(s.rms)], ["loss", (s) => number(s.loss)], ["unrounded", (s) => number(s.base)]];
    const table = make("table", { class: "fw-table fw-moment", "data-testid": "fw-counters" });
    table.append(make("tr", {}, ...["", "now", ...(old ? ["pinned"] : [])].map((text) => make("th", {}, text))));
    if (!scene.error && !scene.curtain) for (const [word, value] of rows) table.append(make("tr", {}, ...[word, value(scene), ...(old ? [value(old)] : [])].map((text) => make("td", {}, text))));
    side.replaceChildren(make("div", { class: "fw-ghost-title" }, scene.curtain ? "The answer unlocks the ticks." : "What is lost"), ...(scene.curtain ? [] : [table]),
      make("div", { class: "fw-hint" }, scene.curtain ? "" : "The loss is asked when the scale is let go."));
  }

  draw();
  return () => game.stop();
}

export default { render };

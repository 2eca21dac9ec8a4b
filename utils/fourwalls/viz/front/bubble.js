// The bubble explorer: schedule, sizes, times, link, a slow stage and a memory cap; what is lost, in three parts.

const WIDE = 540, HIGH = 400;

function render({ model, el }) {
  const ui = frame(el, { title: "Bubble explorer", testid: "fw-bubble", height: HIGH + 8 });
  let scene = sceneOf(model), asked = 0, right = 0, pinned = null, tick = 0, times = [], drawn = null;
  const done = new Set();

  const want = (wish) => questions.want(wish);
  const explore = () => want({ mode: "explore", setting: setting() });
  const numbers = (low, high, step = 1) => Array.from({ length: Math.floor((high - low) / step + 1e-9) + 1 }, (_, k) => String(Number((low + k * step).toPrecision(6)))).map((n) => [n, n]);
  const start = scene.setting;
  const box = {};
  const choice = (word, label, options) => { box[word] = ui.select(label, options, String(start[word]), `fw-${word}`, explore); };
  const line = () => ui.controls.append(make("span", { class: "fw-break" }));
  choice("schedule", "Schedule", scene.names.map(([name, title]) => [name, title]));
  choice("p", "p", numbers(1, scene.limits.p[1]));
  choice("m", "m", numbers(1, scene.limits.m[1]));
  choice("v", "v", numbers(1, scene.limits.v[1]));
  choice("cap", "Memory cap", [["0", "none"], ...numbers(1, 64)]);
  line();
  for (const word of ["F", "I", "W"]) choice(word, word, numbers(...scene.limits[word], 0.25));
  choice("link", "Link", numbers(...scene.limits.link, 0.05));
  choice("slow", "Slow stage", [["-1", "none"], ...numbers(0, 15)]);
  choice("factor", "by", ["1.1", "1.2", "1.5", "2", "3"].map((k) => [k, `× ${k}`]));
  line();
  const scrub = make("input", { type: "range", min: 0, max: 1, step: 1, value: 0, class: "fw-range fw-scrub", "data-testid": "fw-scrub", "aria-label": "Moment", oninput: () => { tick = Number(scrub.value); move(); } });
  const moment = make("output", { class: "fw-value", "data-testid": "fw-at" });
  ui.controls.append(make("label", { class: "fw-label" }, "Moment ", scrub, moment));
  const pin = ui.button("Pin", "Keep the present end as a mark behind the next pictures (key: p)", "fw-pin", () => { pinned = scene; draw(); });
  const next = ui.button("Next question", "Another question (key: n)", "fw-next", () => { asked += 1; want({ mode: "ask", point: asked }); });
  const controls = [...Object.values(box), scrub, pin, next], tips = new Map(controls.map((node) => [node, node.title]));
  tips.set(box.v, "stages on a rank, where the schedule leaves the choice"); tips.set(box.cap, "activations that a rank may hold; “filled by cost” keeps to it");
  const setting = () => Object.fromEntries(Object.entries(box).map(([word, node]) => [word, word === "schedule" ? node.value : Number(node.value)]));

  const main = make("div", { class: "fw-main" }), side = make("div", { class: "fw-side", "data-testid": "fw-side" });
  ui.stage.append(main, side);
  const questions = asker(model, ui, (fresh) => {
    scene = fresh;
    if (scene.verdict !== null) { right += scene.verdict ? 1 : 0; pinned = scene.before; }
    if (!scene.curtain) scene.reached.forEach((is, k) => { if (is) done.add(k); });
    tick = 0;
    draw();
  });

  const name = (answer) => { if (scene.curtain) want({ mode: "answer", point: asked, name: answer }); };

  function move() {
    scrub.max = times.length - 1; scrub.value = tick = Math.min(tick, times.length - 1);
    const t = times[tick];
    moment.textContent = `t = ${Number(t.toPrecision(6))}`;
    if (drawn) drawn.moveTo(t);
    drawSide(t);
  }

  function draw() {
    const now = scene.setting, shut = scene.curtain;
    for (const [word, node] of Object.entries(box)) node.value = String(word === "schedule" ? now[word] : Number(Number(now[word]).toPrecision(6)));
    [...box.slow.options].forEach((option) => { option.hidden = Number(option.value) >= now.p; });
    for (const node of controls) {
      node.disabled = shut;
      node.title = shut ? "First the guess. That unlocks the controls." : tips.get(node) ?? "";
    }
    const looped = scene.names.find(([one]) => one === now.schedule)?.[2];
    box.v.disabled = shut || !looped; box.factor.disabled = shut || now.slow < 0;
    ui.setBadge(scene.source);
    const held = main.contains(document.activeElement);
    const span = scene.error ? 1 : Math.max(scene.makespan, pinned && !shut ? pinned.makespan : 0);
    drawn = scene.error ? null : drawPipeline(scene, { width: WIDE, height: HIGH, span, cap: now.cap, ghost: pinned && !shut ? pinned.makespan : 0, label: scene.words });
    main.replaceChildren(drawn ? drawn.svg : make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error), ...(shut ? [question()] : []));
    if (held) (shut ? main.querySelector("button") : next)?.focus();
    times = ticksOf(scene.rows);
    if (drawn) move(); else side.replaceChildren();
    ui.say(scene.error ? "This setting cannot be run." : scene.words);
    const goal = scene.targets.findIndex((_, k) => !done.has(k));
    const count = `${done.size} of ${scene.targets.length} goals so far; ${right} of ${scene.points} questions right.`;
    if (goal < 0) ui.setGoal(`all ${scene.targets.length} goals; ${right} of ${scene.points} questions right.`, "reached");
    else ui.setGoal(`${scene.targets[goal]} (${count})`, scene.verdict === false ? "missed" : "open");
  }

  function question() {
    const node = make("div", { class: "fw-question", "data-testid": "fw-question", role: "group", "aria-label": scene.question.text },
      make("div", { class: "fw-ask" }, `${scene.question.text} …`));
    const row = make("div", { class: "fw-answers" });
    for (const [key, text] of scene.question.choices)
      row.append(make("button", { type: "button", class: "fw-button", "data-testid": `fw-answer-${key}`, onclick: () => name(key) }, `${key}: ${text}`));
    node.append(row);
    return node;
  }

  function drawSide(t) {
    const lost = make("table", { class: "fw-table fw-moment", "data-testid": "fw-lost" }), show = (n) => String(Number(n.toPrecision(4)));
    const old = pinned && !scene.curtain ? pinned : null;
    lost.append(make("tr", {}, ...["", "now", ...(old ? ["pinned"] : [])].map((text) => make("th", {}, text))));
    const lines = [["end", (s) => show(s.makespan)], ["work of a rank", (s) => show(s.parts.work)], ...["warm-up", "imbalance", "link"].map((word) => [word, (s) => show(s.parts[word])]),
      ["of total", (s) => `${(100 * s.of_total).toFixed(1)}%`], ["of ideal", (s) => `${(100 * s.of_ideal).toFixed(1)}%`], ["peak", (s) => show(Math.max(...s.peaks))]];
    for (const [word, value] of lines) lost.append(make("tr", {}, ...[word, value(scene), ...(old ? [value(old)] : [])].map((text) => make("td", {}, text))));
    side.replaceChildren(lost, ...(scene.curtain ? [] : [make("div", { class: "fw-ghost-title" }, `At t = ${show(t)}`), momentTable(scene.rows, t)]));
  }

  ui.root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const known = scene.curtain && scene.question.choices.some(([key]) => key === event.key);
    if (known) name(event.key);
    else if (event.key === "p" && !pin.disabled) pin.click();
    else if (event.key === "n" && !next.disabled) next.click();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  draw();
  return () => questions.stop();
}

export default { render };

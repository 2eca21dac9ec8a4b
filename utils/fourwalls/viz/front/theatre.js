// The message theatre: buffers as grids whose cells list their contributors, arrows that carry bytes, one step at a time.

const COLOUR = { own: "#ffffff", partial: "#56B4E9", finished: "#009E73", wrong: "#D55E00", empty: "#eeeeee" };
const SIGN = { finished: " ✓", wrong: " ✗" };
const HEIGHT = 300, WIDTH = 660, LEFT = 34, GRID = 430;

function render({ model, el }) {
  const ui = frame(el, { title: "Message theatre", testid: "fw-theatre", height: HEIGHT + 26 });
  const uid = Math.random().toString(36).slice(2);
  let scene = sceneOf(model);
  let step = 0, guess = new Set(), verdict = "", free = false, checked = "open", focus = [0, 0], told = new Set();

  const setting = () => ({ algorithm: algorithm.value, ranks: Number(ranks.value), slow: slow.value });
  const change = () => questions.want(setting());
  const algorithm = ui.select("Algorithm", model.get("choices").map((c) => [c, c]), scene.algorithm, "fw-algorithm", change);
  const ranks = ui.select("Ranks", [2, 3, 4, 5, 6, 7, 8].map((n) => [String(n), String(n)]), String(scene.ranks), "fw-ranks", () => { fillSlow(); change(); });
  const slow = ui.select("Slow link", [], "", "fw-slow", change);
  function fillSlow() {
    const n = Number(ranks.value), before = slow.value || scene.slow || "";
    slow.replaceChildren(make("option", { value: "" }, "none"));
    for (let r = 0; r < n; r++) {
      const key = `${r}>${(r + 1) % n}`;
      slow.append(make("option", { value: key, selected: key === before }, `r${r} → r${(r + 1) % n}, 10 × slower`));
    }
  }
  ui.controls.append(make("span", { class: "fw-break" }));
  const back = ui.button("◀ Back", "One step back (key: left arrow)", "fw-back", () => go(step - 1));
  const run = ui.button("Run step ▶", "", "fw-run", () => runStep());
  const all = ui.button("Run to the end", "", "fw-end", () => go(scene.steps.length - 1));
  const again = ui.button("Start again", "Back to the start (key: Home)", "fw-start", () => go(0));
  const pin = ui.button("Pin", "Keep this state beside the next ones (key: p)", "fw-pin", () => { pinned = { scene, step }; draw(); });
  const check = ui.button("Check goal", "Is the goal true at this step? (key: g)", "fw-check", () => checkGoal());
  let pinned = null;

  const main = make("div", { class: "fw-main" }), ghost = make("div", { class: "fw-ghost", "data-testid": "fw-ghost" });
  ui.stage.append(main, ghost);
  const questions = asker(model, ui, (fresh) => {
    scene = fresh; step = 0; guess = new Set(); verdict = ""; free = false; checked = "open"; focus = [0, 0]; told = new Set();
    draw();
  });

  function go(to) {
    const last = scene.steps.length - 1;
    to = Math.max(0, Math.min(last, to));
    if (to > step && !free) { ui.say(locked()); return; }
    step = to; guess = new Set(); verdict = "";
    if (checked === "missed") checked = "open";
    draw();
  }
  const locked = () => "First the guess: click the cells that you think the next step will change. That unlocks Run.";
  function runStep() {
    if (scene.error || step >= scene.steps.length - 1) return;
    if (!guess.size && !free) { ui.say(locked()); return; }
    const next = scene.steps[step + 1], truth = new Set(next.changed.map(String));
    const right = [...guess].filter((k) => truth.has(k)).length;
    verdict = guess.size ? `You chose ${guess.size}: ${right} right; the step changed ${truth.size}. ` : "";
    told = new Set(guess);
    free = true; step += 1; guess = new Set();
    if (checked === "missed") checked = "open";
    draw();
  }
  function checkGoal() {
    if (scene.error) return;
    checked = scene.goal.step === step ? "reached" : "missed";
    draw();
  }
  function toggle(key) {
    if (scene.error || step >= scene.steps.length - 1) return;
    if (guess.has(key)) guess.delete(key); else guess.add(key);
    draw();
  }

  function draw() {
    const had = main.contains(document.activeElement);
    const last = scene.steps.length - 1, now = scene.steps[step];
    ui.setBadge(scene.source);
    back.disabled = again.disabled = step === 0;
    const stuck = scene.error || step === last;
    run.disabled = stuck || (!free && !guess.size);
    all.disabled = stuck || !free;
    run.title = run.disabled && !stuck ? locked() : "The next step (key: right arrow)";
    all.title = all.disabled && !stuck ? locked() : "All steps (key: End)";
    check.disabled = pin.disabled = !!scene.error;
    ui.setGoal(scene.goal.text, checked);
    main.replaceChildren(scene.error ? make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error) : picture(scene, now, true));
    drawGhost();
    ui.say(scene.error ? "This run stopped with an error." : `${verdict}${now.words}${!free && !step ? " Click the cells that the first step will change." : ""}`);
    if (had) main.querySelector('[tabindex="0"]')?.focus();
  }

  function picture(scene, now, live) {
    const n = scene.ranks, rows = HEIGHT / n, w = GRID / scene.cells, h = Math.min(46, rows - 5), shown = live ? told : new Set();
    const changed = new Set(now.changed.map(String));
    const picture = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 22}`, class: "fw-svg", role: live ? "grid" : "img", "aria-label": now.words });
    picture.append(make("defs", {},
      make("pattern", { id: `fw-x-${uid}`, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, make("path", { d: "M0 0L7 7M7 0L0 7", stroke: "#000", "stroke-width": 0.6, opacity: 0.35 })),
      make("pattern", { id: `fw-d-${uid}`, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, make("path", { d: "M3 3h1.4v1.4h-1.4z", fill: "#000", opacity: 0.3 })),
      make("marker", { id: `fw-m-${uid}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" }, make("path", { d: "M0 0L8 4L0 8z", fill: "#D55E00" }))));
    for (let c = 0; c < scene.cells; c++)
      picture.append(make("text", { x: LEFT + w * (c + 0.5), y: 13, class: "fw-axis", "text-anchor": "middle" }, `chunk ${c}`));
    for (let r = 0; r < n; r++) {
      const y = 20 + r * rows, row = make("g", { role: "row" });
      row.append(make("text", { x: LEFT - 8, y: y + h / 2 + 4, class: "fw-rank", "text-anchor": "end" }, `r${r}`));
      for (let c = 0; c < scene.cells; c++) {
        const [text, state, full] = now.after[r][c], key = `${r},${c}`, isNew = changed.has(key);
        const cell = make("g", {
          class: `fw-cell fw-cell-${state}${isNew ? " fw-changed" : ""}${guess.has(key) && live ? " fw-guessed" : ""}`,
          role: "gridcell", "data-testid": live ? `fw-cell-${r}-${c}` : null, "data-holds": full,
          tabindex: live ? (focus[0] === r && focus[1] === c ? 0 : -1) : null, "aria-selected": String(guess.has(key)),
          "aria-label": `rank ${r}, chunk ${c}: ${full}, ${state}${isNew ? ", changed by this step" : ""}${guess.has(key) ? ", your guess" : ""}`,
          onclick: live ? () => { focus = [r, c]; toggle(key); } : () => {},
        });
        const box = { x: LEFT + w * c + 1.5, y, width: w - 5, height: h, rx: 3 };
        cell.append(make("rect", { ...box, fill: COLOUR[state], class: "fw-box" }));
        if (state === "wrong" || state === "finished") cell.append(make("rect", { ...box, fill: `url(#fw-${state === "wrong" ? "x" : "d"}-${uid})`, "pointer-events": "none" }));
        const label = text + (SIGN[state] ?? "");
        const cut = label.length * 8 > w * 1.2 ? label.indexOf("+") : -1; // two lines where one would be too small
        const lines = cut > 0 ? [label.slice(0, cut), label.slice(cut)] : [label];
        const size = Math.max(8, Math.min(lines.length > 1 ? 11 : 14, ((w - 8) * 1.65) / Math.max(...lines.map((l) => l.length))));
        lines.forEach((line, k) => cell.append(make("text", { x: LEFT + w * (c + 0.5) - 1,
          y: y + h / 2 + 4.5 + (lines.length > 1 ? (k - 0.5) * (size + 1) : 0), "text-anchor": "middle", class: "fw-text", "font-size": size }, line)));
        if (guess.has(key) && live) cell.append(make("text", { x: box.x + 4, y: y + 11, class: "fw-mark" }, "?"));
        if (shown.has(key) && verdict) cell.append(make("text", { x: box.x + 4, y: y + 12, class: "fw-mark" }, isNew ? "✓" : "✗"));
        row.append(cell);
      }
      picture.append(row);
    }
    const edge = LEFT + GRID + 2, notes = {}, reach = Math.max(0, ...now.messages.map(([a, b]) => Math.abs(a - b)));
    for (const [src, dst, bytes, carried] of now.messages) {
      const a = 20 + src * rows + h / 2, b = 20 + dst * rows + h / 2, bulge = 18 + 8 * Math.abs(src - dst), up = src < dst ? 5 : -5;
      picture.append(make("path", { d: `M${edge} ${a + up}C${edge + bulge} ${a + up} ${edge + bulge} ${b - up} ${edge} ${b - up}`, class: "fw-arrow",
        "marker-end": `url(#fw-m-${uid})` }, make("title", {}, `r${src} → r${dst}: ${bytes}, ${carried}`)));
      (notes[dst] ??= []).push(`from r${src}: ${bytes}`);
    }
    for (const [dst, lines] of Object.entries(notes))
      picture.append(make("text", { x: edge + 26 + 6 * reach, y: 20 + dst * rows + h / 2 + 4, class: "fw-note" }, lines.slice(0, 2).join("; ") + (lines.length > 2 ? " …" : "")));
    return picture;
  }

  function drawGhost() {
    if (!pinned) { ghost.replaceChildren(make("div", { class: "fw-hint" }, "Pin keeps a ghost of the present state here.")); return; }
    const { scene: old, step: at } = pinned, n = old.ranks, size = Math.min(26, 150 / Math.max(n, old.cells));
    const mini = make("svg", { viewBox: `0 0 ${old.cells * size} ${n * size}`, width: old.cells * size, height: n * size, role: "img", "aria-label": `pinned: ${old.steps[at].words}` });
    old.steps[at].after.forEach((row, r) => row.forEach(([text, state], c) => {
      mini.append(make("rect", { x: c * size + 1, y: r * size + 1, width: size - 2, height: size - 2, fill: COLOUR[state], stroke: "#777", "stroke-width": 0.7 }));
      if (SIGN[state]) mini.append(make("text", { x: (c + 0.5) * size, y: (r + 0.5) * size + 4, "text-anchor": "middle", "font-size": 11 }, SIGN[state].trim()));
    }));
    ghost.replaceChildren(make("div", { class: "fw-ghost-title" }, `Pinned: ${old.algorithm}, ${n} ranks`), mini,
      make("div", {}, `step ${at} of ${old.steps.length - 1}, ${old.steps[at].time}`), make("div", {}, `whole run: ${old.total}`));
  }

  ui.root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inCell = event.target.closest?.(".fw-cell"), select = event.target.tagName === "SELECT";
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (inCell && moves[event.key]) {
      focus = [Math.max(0, Math.min(scene.ranks - 1, focus[0] + moves[event.key][0])), Math.max(0, Math.min(scene.cells - 1, focus[1] + moves[event.key][1]))];
      main.querySelectorAll(".fw-cell").forEach((cell) => cell.setAttribute("tabindex", -1));
      const target = main.querySelector(`[data-testid="fw-cell-${focus[0]}-${focus[1]}"]`);
      target.setAttribute("tabindex", 0);
      target.focus();
    } else if (inCell && (event.key === " " || event.key === "Enter")) toggle(String(focus));
    else if (!select && event.key === "ArrowRight") runStep();
    else if (!select && event.key === "ArrowLeft") go(step - 1);
    else if (!select && event.key === "Home") go(0);
    else if (!select && event.key === "End") go(scene.steps.length - 1);
    else if (!select && event.key === "p" && !pin.disabled) pin.click();
    else if (!select && event.key === "g" && !check.disabled) check.click();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  fillSlow();
  draw();
  return () => questions.stop();
}

export default { render };

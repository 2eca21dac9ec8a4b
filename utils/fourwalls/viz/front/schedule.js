// The schedule editor: a grid as text, checked by the kernel; legal: the timeline, else the grid with the first bad cell outlined.

const WIDE = 540, HIGH = 300;

function render({ model, el }) {
  const ui = frame(el, { title: "Schedule editor", testid: "fw-editor", height: HIGH + 8 });
  let scene = sceneOf(model), pinned = null, tick = 0, moments = [], drawn = null, dirty = !scene.checked;
  const done = new Set();

  const text = make("textarea", { class: "fw-grid-text", "data-testid": "fw-text", "aria-label": "The schedule: a line for each rank", rows: 5, spellcheck: "false", wrap: "off", tabindex: 0, oninput: () => { dirty = true; locks(); } });
  text.value = scene.text;
  const want = (wish) => questions.want(wish);
  const times = () => Object.fromEntries(["F", "I", "W"].map((word) => [word, Number(box[word].value)]));
  const box = {};
  const known = ui.select("Load", [["", "a known one …"], ...scene.names], "", "fw-load", (name) => { if (name) want({ mode: "load", name }); });
  for (const word of ["F", "I", "W"]) box[word] = ui.select(word, ["0.5", "1", "1.5", "2", "3"].map((n) => [n, n]), "1", `fw-${word}`, () => { if (!guess.disabled && guess.value !== "") check(); });
  const guess = make("input", { type: "number", min: 1, step: "any", class: "fw-number", "data-testid": "fw-guess", "aria-label": "How many slots will it take?", oninput: () => locks() });
  ui.controls.append(make("label", { class: "fw-label" }, "Your guess: slots ", guess));
  const check = () => want({ mode: "check", text: text.value, times: times(), guess: guess.value === "" ? null : Number(guess.value) });
  const button = ui.button("Check", "Is it legal, how long does it take, what does it hold? (Ctrl+Enter in the text)", "fw-check", check);
  const run = ui.button("Run on ranks", "Run it on real processes", "fw-run", () => want({ mode: "run", text: text.value, times: times() }));
  const pin = ui.button("Pin", "Keep the present end as a mark behind the next pictures (key: p)", "fw-pin", () => { pinned = scene; draw(); });
  ui.controls.append(make("span", { class: "fw-break" }));
  const scrub = make("input", { type: "range", min: 0, max: 1, step: 1, value: 0, class: "fw-range fw-scrub", "data-testid": "fw-scrub", "aria-label": "Moment", oninput: () => { tick = Number(scrub.value); move(); } });
  const moment = make("output", { class: "fw-value", "data-testid": "fw-at" });
  ui.controls.append(make("label", { class: "fw-label" }, "Moment ", scrub, moment));
  ui.controls.after(text);

  const main = make("div", { class: "fw-main" }), side = make("div", { class: "fw-side", "data-testid": "fw-side" });
  ui.stage.append(main, side);
  const questions = asker(model, ui, (fresh) => {
    scene = fresh;
    dirty = !scene.checked;
    if (text.value !== scene.text) text.value = scene.text;
    if (scene.checked) scene.reached.forEach((is, k) => { if (is) done.add(k); });
    else { guess.value = ""; known.value = ""; }
    tick = 0;
    draw();
  });

  const shown = () => scene.checked && scene.rows.length > 0;
  function locks() {
    const first = "First a guess: how many slots will it take?";
    button.disabled = guess.value === ""; button.title = button.disabled ? first : "Is it legal, how long does it take, what does it hold? (Ctrl+Enter in the text)";
    run.disabled = !shown() || dirty || !scene.can_run;
    run.title = !scene.can_run ? "This notebook gave no ranks to run on" : run.disabled ? "Check it first" : "Run it on real processes";
    pin.disabled = scrub.disabled = !shown();
  }

  function move() {
    scrub.max = moments.length - 1; scrub.value = tick = Math.min(tick, moments.length - 1);
    const t = moments[tick], said = `t = ${Number(t.toPrecision(6))}`;
    moment.textContent = said;
    drawn.moveTo(t);
    side.replaceChildren(make("div", { class: "fw-ghost-title" }, `At ${said}`), momentTable(scene.rows, t), pinnedWords());
  }
  const pinnedWords = () => make("div", { class: "fw-hint", "data-testid": "fw-ghost" }, pinned ? `Pinned: ${Number(pinned.makespan.toPrecision(4))} slots, holding at most ${Math.max(...pinned.peaks)}.` : "Pin keeps a mark of the present end.");

  function draw() {
    ui.setBadge(scene.source);
    drawn = null;
    if (scene.error) main.replaceChildren(make("pre", { class: "fw-error", "data-testid": "fw-error" }, scene.error));
    else if (scene.bad) main.replaceChildren(cells());
    else if (shown()) {
      drawn = drawPipeline(scene, { width: WIDE, height: HIGH, span: Math.max(scene.makespan, pinned?.makespan ?? 0), cap: 0, ghost: pinned?.makespan ?? 0, label: scene.words });
      main.replaceChildren(drawn.svg);
    } else main.replaceChildren(cells());
    locks();
    moments = ticksOf(scene.rows);
    if (drawn) move(); else { moment.textContent = ""; side.replaceChildren(make("div", { class: "fw-hint" }, scene.checked ? "" : "Guess how many slots it takes, then Check."), pinnedWords()); }
    ui.say(scene.checked ? scene.words : "A line for each rank: 2F0 is stage 2, forward, micro-batch 0; B backward, or I and W, its two halves. How many slots will this one take?");
    const goal = scene.goals.findIndex((_, k) => !done.has(k)), last = scene.goals.length;
    if (goal < 0) ui.setGoal(`all ${last}. W is filler; place is everything.`, "reached");
    else ui.setGoal(`${scene.goals[goal]} (${done.size} of ${last} so far)`, scene.checked && (scene.bad || scene.error) ? "missed" : "open");
  }

  function cells() { // the grid as it was written, no time
    const svg = make("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "fw-svg", role: "img", "aria-label": scene.words });
    const most = Math.max(1, ...scene.cells.map((row) => row.length)), left = 46, w = Math.min(44, (WIDE - left - 6) / most), h = Math.min(34, (HIGH - 10) / Math.max(1, scene.cells.length));
    scene.cells.forEach((row, rank) => {
      svg.append(make("text", { x: left - 5, y: 8 + rank * h + h / 2 + 3, "text-anchor": "end", class: "fw-axis" }, `rank ${rank}`));
      row.forEach((cell, place) => {
        const bad = scene.bad && scene.bad[0] === rank && scene.bad[1] === place, kind = /[FBIW]/.exec(cell)?.[0];
        svg.append(make("rect", { x: left + place * w, y: 6 + rank * h, width: w - 2, height: h - 4, fill: kind ? LOOKS[kind][0] : "#f1f1f1", class: bad ? "fw-box fw-bad" : "fw-box", "data-testid": bad ? "fw-bad" : null }));
        if (w > 15) svg.append(make("text", { x: left + place * w + w / 2 - 1, y: 6 + rank * h + h / 2 + 2, "text-anchor": "middle", class: "fw-tag", ...(cell.length > 4 || w < 24 ? { style: "font-size:7px" } : {}) }, cell));
      });
    });
    return svg;
  }

  text.addEventListener("keydown", (event) => {
    event.stopPropagation(); // keys belong to the text
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !button.disabled) { event.preventDefault(); check(); }
  });
  ui.root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
    if (event.key !== "p" || pin.disabled || event.target === guess) return;
    pin.click();
    event.preventDefault();
    event.stopPropagation();
  });

  draw();
  return () => questions.stop();
}

export default { render };

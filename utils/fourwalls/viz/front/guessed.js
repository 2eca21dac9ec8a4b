// What the explorers share: a hidden question whose answer unlocks the controls, Pin, the next question, and their keys.

// draw(): draws game.scene; keyOf(event) -> the answer that a key names, or undefined; onfresh(was): a new scene has come.
// Pin and Next are put where `guessed` is called; game.lock and game.show are for draw().
function guessed(model, ui, { pinTip, nextText, draw, keyOf, onfresh = () => {} }) {
  const game = { scene: sceneOf(model), asked: 0, right: 0, pinned: null }, tips = new Map();
  game.want = (wish) => questions.want(wish);
  game.name = (answer) => { if (game.scene.curtain) game.want({ mode: "answer", point: game.asked, name: answer }); };
  game.pin = ui.button("Pin", `${pinTip} (key: p)`, "fw-pin", () => { game.pinned = game.scene; draw(); });
  game.next = ui.button(nextText, "Another question (key: n)", "fw-next", () => { game.asked += 1; game.want({ mode: "ask", point: game.asked }); });

  // while the question stands: shut, and the tip says why
  game.lock = (controls, why) => {
    for (const node of [...controls, game.pin, game.next]) {
      if (!tips.has(node)) tips.set(node, node.title);
      node.disabled = game.scene.curtain;
      node.title = game.scene.curtain ? why : tips.get(node);
    }
  };
  // new content for `main`; who was inside, or on Next, goes on with the keyboard
  game.show = (main, ...nodes) => {
    const held = main.contains(document.activeElement) || document.activeElement === game.next;
    main.replaceChildren(...nodes);
    if (held) (game.scene.curtain ? main.querySelector("button") : game.next)?.focus();
  };
  const questions = asker(model, ui, (fresh) => {
    const was = game.scene;
    game.scene = fresh;
    if (fresh.verdict) game.right += 1;
    onfresh(was); draw();
  });
  game.stop = () => questions.stop();

  ui.root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const answer = game.scene.curtain ? keyOf(event) : undefined;
    if (answer !== undefined) game.name(answer);
    else if (event.key === "p" && !game.pin.disabled) game.pin.click();
    else if (event.key === "n" && !game.next.disabled) game.next.click();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return game;
}

// a range with its value beside it
function slider(ui, label, low, high, testid, action) {
  const text = make("output", { class: "fw-value" });
  const node = make("input", { type: "range", min: low, max: high, step: 1, class: "fw-range", "data-testid": testid, "aria-label": label, oninput: action });
  ui.controls.append(make("label", { class: "fw-label" }, `${label} `, node, text));
  return { node, text };
}

// the question in the middle of the picture, with a button for each answer: [[answer, text, testid]]
function questionBox(game, lines, answers) {
  const box = make("div", { class: "fw-question", "data-testid": "fw-question", role: "group", "aria-label": lines[0] },
    make("div", { class: "fw-ask" }, lines[0]), ...lines.slice(1).map((line) => make("div", {}, line)));
  const row = make("div", { class: "fw-answers" });
  for (const [answer, text, testid] of answers)
    row.append(make("button", { type: "button", class: "fw-button", "data-testid": testid, onclick: () => game.name(answer) }, text));
  box.append(row);
  return box;
}

// What all widgets share: title, badge, controls, a stage of fixed height, one line of words, a goal that turns green.
// Keys pressed inside never reach the notebook: JupyterLab looks for data-lm-suppress-shortcuts from the focused element upward and
// stops at the first selector that fits (one with :focus does), so the mark stands on everything that can have the focus.
// The kernel is asked at once, then at most ten times a second: the latest wish wins.

const SVG = "http://www.w3.org/2000/svg";
const GAP = 100; // ms from one question to the next

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "defs", "pattern", "marker", "title", "line", "circle", "clipPath"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  if (["button", "select", "input"].includes(tag) || "tabindex" in attributes) node.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const child of children) node.append(child);
  return node;
}

function frame(el, { title, testid, height }) {
  const badge = make("span", { class: "fw-badge", "data-testid": "fw-badge" });
  const controls = make("div", { class: "fw-controls", role: "toolbar", "aria-label": `${title}: controls` });
  const stage = make("div", { class: "fw-stage", style: `height:${height}px` });
  const words = make("div", { class: "fw-words", "data-testid": "fw-words", role: "status", "aria-live": "polite" });
  const goal = make("div", { class: "fw-goal", "data-testid": "fw-goal", role: "status", "aria-live": "polite" });
  const root = make("div",
    { class: "fw-widget", "data-testid": testid, "data-lm-suppress-shortcuts": "true", role: "group", "aria-label": title },
    make("div", { class: "fw-head" }, make("strong", {}, title), badge), controls, stage, words, goal);
  el.replaceChildren(root);
  return {
    root, controls, stage,
    button(text, tip, testid, action) {
      const node = make("button", { type: "button", class: "fw-button", title: tip, "data-testid": testid, onclick: action }, text);
      controls.append(node);
      return node;
    },
    select(label, options, value, testid, action) {
      const node = make("select", { class: "fw-select", "data-testid": testid, "aria-label": label, onchange: () => action(node.value) });
      for (const [key, text] of options) node.append(make("option", { value: key, selected: key === value }, text));
      controls.append(make("label", { class: "fw-label" }, `${label} `, node));
      return node;
    },
    say(text) { if (words.textContent !== text) words.textContent = text; },
    setBadge(source) { badge.textContent = source.toUpperCase(); badge.className = `fw-badge fw-${source.includes(" ") ? "both" : source}`; },
    setGoal(text, state) {
      goal.textContent = `${state === "reached" ? "✓ Goal reached: " : state === "missed" ? "✗ Not yet. Goal: " : "Goal: "}${text}`;
      goal.className = `fw-goal fw-goal-${state}`;
    },
  };
}

// the scene travels as text, see widgets.py
const sceneOf = (model) => JSON.parse(model.get("scene"));

// Ask the kernel for a new scene. At most one question is open; while it is, only the latest wish is kept. The old picture turns pale
// when the answer is late, not at once: that would paint it again just when the kernel works.
function asker(model, ui, onscene) {
  let wish = null, open = 0, number = 0, last = -GAP, timer = null, silence = null, late = null;
  const busy = () => {
    ui.root.setAttribute("aria-busy", "true");
    late ??= setTimeout(() => ui.stage.classList.add("fw-late"), 300);
  };
  const free = () => {
    clearTimeout(late);
    late = null;
    ui.stage.classList.remove("fw-late");
    ui.root.removeAttribute("aria-busy");
  };
  const ask = () => {
    if (wish === null || open) return;
    open = ++number;
    last = performance.now();
    model.set("request", { ...wish, id: open });
    model.save_changes();
    wish = null;
    silence = setTimeout(() => {
      open = 0;
      free();
      ui.say("The kernel does not answer. What is shown still works; the pictures above show the rest.");
    }, 5000);
  };
  const soon = () => {
    clearTimeout(timer);
    const wait = last + GAP - performance.now();
    if (wait > 0) timer = setTimeout(ask, wait); else ask();
  };
  const answer = () => {
    const scene = sceneOf(model);
    if (open && scene.id !== open) return; // stale
    open = 0;
    clearTimeout(silence);
    if (wish !== null) return soon();
    free();
    onscene(scene);
  };
  model.on("change:scene", answer);
  return {
    want(what) { wish = what; busy(); soon(); },
    stop() { for (const one of [timer, silence, late]) clearTimeout(one); model.off("change:scene", answer); },
  };
}

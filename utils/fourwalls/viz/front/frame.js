// What all widgets share: title, badge, controls, a stage of fixed height, one line of words, a goal that turns green.
// Keys pressed inside never reach the notebook: JupyterLab looks for data-lm-suppress-shortcuts from the focused element upward and
// stops at the first selector that fits (one with :focus does), so the mark stands on everything that can have the focus.
// Asking the kernel is debounced: the latest wish wins.

const SVG = "http://www.w3.org/2000/svg";

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

// Ask the kernel for a new scene. At most one question is open; while it is, only the latest wish is kept.
function asker(model, onscene, onsilence) {
  let wish = null, open = 0, number = 0, timer = null, silence = null;
  const ask = () => {
    if (wish === null || open) return;
    open = ++number;
    model.set("request", { ...wish, id: open });
    model.save_changes();
    wish = null;
    silence = setTimeout(() => { open = 0; onsilence(); }, 5000);
  };
  const answer = () => {
    const scene = model.get("scene");
    if (open && scene.id !== open) return; // stale
    open = 0;
    clearTimeout(silence);
    if (wish === null) onscene(scene); else ask();
  };
  model.on("change:scene", answer);
  return {
    want(what) { wish = what; clearTimeout(timer); timer = setTimeout(ask, 60); },
    stop() { clearTimeout(timer); clearTimeout(silence); model.off("change:scene", answer); },
  };
}

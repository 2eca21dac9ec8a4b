"""JupyterLab as a reader has it, driven from outside: open a notebook, run it cell by cell, look at it, use its widgets."""

import json
import os
import re
import time
from pathlib import Path

__all__ = ["Lab", "errors_of", "guess_all", "widget_drivers"]

# What JupyterLab itself writes to the console and nobody can mend here. Each entry: (pattern, why it is not ours).
NOT_OURS = ()

NOTEBOOK = "window.jupyterapp.shell.currentWidget"

# Every widget that an output asks for stands in the page, with something in it: a view is drawn after its cell has ended.
DRAWN = f"""() => {{
    const asked = [...{NOTEBOOK}.content.model.cells].filter(cell => cell.type === 'code').flatMap(cell => cell.toJSON().outputs)
        .filter(output => output.data && 'application/vnd.jupyter.widget-view+json' in output.data).length;
    const panels = [...document.querySelectorAll('.jp-OutputArea-output.lm-Panel')];
    return panels.filter(panel => panel.childElementCount).length >= asked;
}}"""


class Lab:
    """One notebook in one tab. Every error on the console, or that a page throws, is collected in `console_errors`."""

    def __init__(self, browser, server, *, width=1280, height=1000):
        self.server = server
        self.context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.console_errors = []
        self.outside = []  # requests to anything but the server: all must work without a network
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.console_errors.append(f"page: {error}"))
        self.page.on("request", self._request)

    def open(self, name):
        """Show `name` and wait until its kernel is idle."""
        stem = re.sub(r"\W", "_", name)
        self.page.goto(f"{self.server.url}lab/workspaces/{stem}/tree/{name}?token={self.server.token}&reset", wait_until="load")
        self.page.wait_for_function("window.jupyterapp && window.jupyterapp.shell.currentWidget?.context?.isReady")
        self.page.wait_for_function(f"{NOTEBOOK}.context.sessionContext.session?.kernel?.status === 'idle'", timeout=90_000)
        return self

    def cells(self):
        """[(index, cell type)] of all cells."""
        kinds = self.page.evaluate(f"[...{NOTEBOOK}.content.model.cells].map(cell => cell.type)")
        return list(enumerate(kinds))

    def run_cell(self, index, seconds=240):
        """Run one cell and wait until it has ended."""
        run = f"""async (i) => {{ const book = {NOTEBOOK}.content; book.activeCellIndex = i; book.deselectAll();
                 await window.jupyterapp.commands.execute('notebook:run-cell'); }}"""
        self.page.set_default_timeout(seconds * 1000)
        self.page.evaluate(run, index)
        self.page.set_default_timeout(30_000)
        self.page.wait_for_function(DRAWN)

    def run_all(self, after=lambda lab: 0, seconds=600, only=None):
        """Run every cell (or those of index in `only`) in order, calling `after(lab)` behind each code cell. Returns the sum."""
        total = 0
        end = time.monotonic() + seconds
        for index, kind in self.cells():
            if only is not None and index not in only:
                continue
            self.run_cell(index)
            if kind == "code":
                total += after(self)
            if time.monotonic() > end:
                raise TimeoutError(f"cell {index}: the notebook is not through after {seconds} s")
        return total

    def outputs(self):
        """[(cell index, tags, outputs as nbformat has them)] of all code cells."""
        rows = self.page.evaluate(
            f"JSON.stringify([...{NOTEBOOK}.content.model.cells].map((cell, i) => [i, cell.type, cell.toJSON()])"
            ".filter(([i, type]) => type === 'code').map(([i, type, json]) => [i, json.metadata.tags || [], json.outputs]))"
        )
        return json.loads(rows)

    def sources(self):
        """The text of each cell, "" for prose."""
        return self.page.evaluate(
            f"[...{NOTEBOOK}.content.model.cells].map(cell => cell.type === 'code' ? cell.sharedModel.source : '')"
        )

    def restart(self):
        """A fresh kernel, as after Kernel > Restart."""
        self.page.evaluate(f"async () => {{ await {NOTEBOOK}.context.sessionContext.session.kernel.restart(); }}")
        self.page.wait_for_function(f"{NOTEBOOK}.context.sessionContext.session?.kernel?.status === 'idle'", timeout=90_000)

    def screenshot(self, name):
        """What is to be seen now, into $FOURWALLS_SHOTS; nowhere if that is not set."""
        folder = os.environ.get("FOURWALLS_SHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder, f"{name}.png")))

    def close(self):
        """End the kernel, then the tab."""
        if not self.page.is_closed():
            self.page.evaluate(f"async () => {{ await {NOTEBOOK}?.context?.sessionContext?.shutdown?.(); }}")
        self.context.close()

    def _console(self, message):
        if message.type == "error" and not any(re.search(pattern, message.text) for pattern, _ in NOT_OURS):
            self.console_errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _request(self, request):
        if request.url.startswith(("http:", "https:", "ws:", "wss:")) and not request.url.startswith(self.server.url):
            self.outside.append(request.url)


def errors_of(lab):
    """Every error that a cell shows without being tagged raises-exception, and every widget that did not load, in words."""
    said = [
        f"cell {index}: {output['ename']}: {output['evalue']}"
        for index, tags, outputs in lab.outputs()
        if "raises-exception" not in tags
        for output in outputs
        if output["output_type"] == "error"
    ]
    broken = lab.page.locator(".jp-OutputArea-output").filter(
        has_text=re.compile("Error displaying widget|Loading widget|model not found")
    )
    return said + [f"widget: {text}" for text in broken.all_inner_texts()]


def guess_all(lab):
    """Commit a guess in every open prediction. Returns how many; a prediction that takes none is an AssertionError."""
    made = 0
    for commit in lab.page.locator("button.fw-commit").all():
        box = commit.locator("xpath=ancestor::*[.//*[contains(@class, 'fw-guess')]][1]")
        control = box.locator(".fw-guess input").first
        if control.is_disabled():
            continue
        assert commit.is_disabled(), "Commit can be pressed before there is a guess"
        if control.get_attribute("type") == "radio":
            control.check()
        else:
            control.fill("1")
            control.press("Tab")
        lab.page.wait_for_function("button => !button.disabled", arg=commit.element_handle())
        commit.click()
        lab.page.wait_for_function("button => button.disabled", arg=commit.element_handle())
        line = box.locator(".fw-predict-line")  # a message of its own: it may come after the one that shuts the button
        wait_until(lab, lambda line=line: line.inner_text().strip(), "a committed guess is not shown")
        made += 1
    return made


def picture(widget):
    """What a widget shows, to be compared: its stage and its line of words."""
    return widget.locator(".fw-stage").inner_html() + widget.locator(".fw-words").inner_text()


def wait_until(lab, true, otherwise, seconds=10):
    """Look until `true()` holds; AssertionError with the words `otherwise` if it never does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        lab.page.wait_for_timeout(50)


def changed(lab, widget, act, what):
    """Do `act()` and wait until the widget shows something else. Returns what it shows; AssertionError if nothing changes."""
    before = picture(widget)
    act()
    wait_until(lab, lambda: picture(widget) != before, f"{what}: the picture did not change")
    return picture(widget)


def choose(select, index=None):
    """Choose an option of a <select> by its place; None: the one behind the present one."""
    if index is None:
        index = (select.evaluate("node => node.selectedIndex") + 1) % select.locator("option").count()
    select.select_option(index=index)


REDRAW = """
([control, stage, value]) => new Promise((resolve) => {
  const send = WebSocket.prototype.send, text = new TextDecoder();
  let sent = 0;
  WebSocket.prototype.send = function (data) {
    if (text.decode(data).includes("comm_msg")) sent += 1;
    send.call(this, data);
  };
  const begin = performance.now();
  const seen = new MutationObserver(() => {
    const ms = performance.now() - begin;
    seen.disconnect();
    setTimeout(() => { WebSocket.prototype.send = send; resolve([ms, at_once, sent]); }, 120);
  });
  seen.observe(stage, { childList: true, subtree: true });
  control.value = value;
  control.dispatchEvent(new Event("change", { bubbles: true }));
  const at_once = sent;
})
"""

# a hundred values in a second, as from a hand that drags: how often is the picture drawn anew, and when is the last one there?
DRAG = """
([control, stage, values]) => new Promise((resolve) => {
  let drawn = 0, ended = 0, last = 0, k = 0;
  const began = performance.now();
  const seen = new MutationObserver(() => { drawn += 1; last = performance.now(); });
  seen.observe(stage, { childList: true });
  const timer = setInterval(() => {
    if (k === 100) { clearInterval(timer); return; }
    control.value = values[k++ % values.length];
    control.dispatchEvent(new Event("change", { bubbles: true }));
    ended = performance.now();
  }, 10);
  const root = control.closest(".fw-widget");
  const look = setInterval(() => {
    if (k < 100 || root.hasAttribute("aria-busy")) return;
    clearInterval(look);
    seen.disconnect();
    resolve([drawn, ended - began, last - ended, control.value]);
  }, 20);
})
"""


def redraw_ms(control, widget, value):
    """Milliseconds from a control's change until the widget's picture is another one: to the kernel, and back into the page.

    The page must send the change at once, and nothing else until the picture is there.
    """
    handles = [control.element_handle(), widget.locator(".fw-stage").element_handle(), value]
    ms, at_once, sent = control.page.evaluate(REDRAW, handles)
    assert (at_once, sent) == (1, 1), f"{at_once} messages when the control changed, {sent} until the picture was there"
    return round(ms, 1)


def drive_theatre(lab, widget):
    """The message theatre: every control, by mouse and by key, and the guess that unlocks Run."""

    def part(name):
        return widget.get_by_test_id(name)

    def first_step():
        assert part("fw-run").is_disabled(), "Run is open before a guess"
        part("fw-cell-0-0").click()
        assert part("fw-cell-0-0").get_attribute("aria-selected") == "true"
        changed(lab, widget, part("fw-run").click, "Run after a guess")
        assert "Step 1" in part("fw-words").inner_text()

    def the_end():
        first_step()
        return changed(lab, widget, part("fw-end").click, "Run to the end")

    last = the_end()
    changed(lab, widget, part("fw-back").click, "Back")
    changed(lab, widget, part("fw-pin").click, "Pin")
    changed(lab, widget, part("fw-start").click, "Start again")
    goal = part("fw-goal").inner_text()
    part("fw-check").click()
    assert part("fw-goal").inner_text() != goal, "Check goal says nothing"
    broken = part("fw-algorithm").locator("option").count() - 1  # the last one; a reader's own ring and the library's look alike
    for name, option in (("fw-ranks", None), ("fw-slow", None), ("fw-algorithm", broken)):  # each asks the kernel for a new run
        choose(part(name), option)
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, f"{name}: no answer from the kernel")
        before, last = last, the_end()
        assert last != before, f"{name}: the run ends as before"
    assert widget.locator(".fw-main .fw-cell-wrong").count() > 0, "the broken ring shows no wrong cell"
    changed(lab, widget, lambda: part("fw-back").press("Home"), "the key Home")
    part("fw-cell-0-0").focus()
    changed(lab, widget, lambda: part("fw-cell-0-0").press("Space"), "the space bar on a cell")
    assert part("fw-cell-0-0").get_attribute("aria-selected") == "true"
    changed(lab, widget, lambda: part("fw-cell-0-0").press("Space"), "the space bar again")


def drive_explorer(lab, widget):
    """The alpha-beta explorer: a guess unlocks it, every control by mouse and by key, and the goal."""

    def part(name):
        return widget.get_by_test_id(name)

    def settled():
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, "no answer from the kernel")

    def act(do, what):
        changed(lab, widget, do, what)
        settled()

    assert all(part(name).is_disabled() for name in ("fw-size", "fw-alpha", "fw-pin", "fw-next")), "open before a guess"
    assert widget.locator(".fw-curve").count() == 0, "the curves are there before a guess"
    act(part("fw-name-ring").click, "a wrong answer")
    assert part("fw-words").inner_text().startswith("No: ring") and "Not yet" in part("fw-goal").inner_text()
    act(part("fw-pin").click, "Pin")
    for name in ("fw-n", "fw-wire"):
        act(lambda name=name: choose(part(name)), name)
    for name in ("fw-size", "fw-alpha", "fw-bandwidth"):
        act(lambda name=name: part(name).press("ArrowLeft"), f"{name} by key")
    assert widget.locator("[data-testid=fw-old]").count() > 0, "the pinned curves are gone"
    curves = widget.locator(".fw-curve").count()
    act(part("fw-on-star").click, "a switch")
    assert widget.locator(".fw-curve").count() == curves - 1
    for name in ("ring", "tree", "hierarchical"):
        act(lambda: part("fw-next").press("n"), "the key n")
        assert widget.locator(".fw-curve").count() == 0, "a hidden point is not hidden"
        act(part(f"fw-name-{name}").click, "an answer")
    assert "Goal reached" in part("fw-goal").inner_text()


def drive_buckets(lab, widget):
    """The bucket explorer: a guess unlocks it, every control by mouse and by key, the ghost, and the goal."""

    def part(name):
        return widget.get_by_test_id(name)

    def settled():
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, "no answer from the kernel")

    def act(do, what):
        changed(lab, widget, do, what)
        settled()

    locked = ("fw-case", "fw-bucket", "fw-bandwidth", "fw-backward", "fw-pin", "fw-next")
    assert all(part(name).is_disabled() for name in locked), "open before a guess"
    assert widget.locator(".fw-curve, .fw-block").count() == 0, "the curve or the buckets are there before a guess"
    act(part("fw-choice-4").click, "a wrong answer")
    assert part("fw-words").inner_text().startswith("No: one bucket") and "Not yet" in part("fw-goal").inner_text()
    assert widget.locator(".fw-curve").count() == 1 and widget.locator(".fw-exposed").count() > 0
    act(part("fw-pin").click, "Pin")
    for name in ("fw-bucket", "fw-bandwidth", "fw-backward"):
        act(lambda name=name: part(name).press("ArrowLeft"), f"{name} by key")
    act(lambda: choose(part("fw-case")), "another case")
    assert widget.locator("[data-testid=fw-old]").count() > 0, "the pinned curve is gone"
    assert widget.locator("[data-testid=fw-old-bar]").count() > 0, "the pinned buckets are gone"
    for key in ("a", "d", "b"):  # the points after the first
        act(lambda: part("fw-next").press("n"), "the key n")
        assert widget.locator(".fw-curve, .fw-block").count() == 0, "a hidden point is not hidden"
        act(lambda key=key: part("fw-choice-0").press(key), "an answer by key")
    assert "Goal reached" in part("fw-goal").inner_text()


def drive_bubble(lab, widget):
    """The bubble explorer: a guess unlocks it, every control by mouse and key, the scrubber, the three goals."""

    def part(name):
        return widget.get_by_test_id(name)

    def settled():
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, "no answer from the kernel")

    def act(do, what):
        changed(lab, widget, do, what)
        settled()

    def set_to(**values):
        for name, value in values.items():
            if part(f"fw-{name}").input_value() != value:
                act(lambda name=name, value=value: part(f"fw-{name}").select_option(value), name)

    names = ("schedule", "p", "m", "v", "cap", "F", "I", "W", "link", "slow", "factor")
    assert all(part(f"fw-{name}").is_disabled() for name in (*names, "pin", "next", "scrub")), "open before a guess"
    act(part("fw-answer-b").click, "a wrong answer")
    assert part("fw-words").inner_text().startswith("No, not") and "Not yet" in part("fw-goal").inner_text()
    assert part("fw-old").count() == 1, "the setting before is not kept as a ghost"
    act(part("fw-pin").click, "Pin")
    for key in ("d", "c"):
        act(lambda: part("fw-next").press("n"), "the key n")
        assert part("fw-question").count() == 1
        act(lambda key=key: part("fw-answer-a").press(key), "an answer by key")
        assert part("fw-words").inner_text().startswith("Right")
    for _ in range(3):
        changed(lab, widget, lambda: part("fw-scrub").press("ArrowRight"), "the scrubber by key")
    assert "t = " in part("fw-at").inner_text() and "0F" in part("fw-moment").inner_text()
    set_to(schedule="interleaved", v="3", p="3", F="0.5", cap="2", factor="1.5")
    assert widget.locator(".fw-cap").count() == 3, "the cap is not drawn"
    set_to(schedule="1f1b-doubled", slow="-1", cap="0", p="4", m="8", F="1", I="1", W="1", link="0.25")
    assert "34.5 long, holds 7" in part("fw-words").inner_text()
    set_to(link="0", schedule="fill", cap="4")
    assert "27 long, holds 4" in part("fw-words").inner_text()
    lab.screenshot("fw-bubble_filled")
    set_to(p="16", m="64")
    lab.screenshot("fw-bubble_16x64")
    assert widget.locator(".fw-stage *").count() < 300, "a node for each action of 3072 would be too many"
    for _ in range(3):  # 200 ms on a quiet machine; one that does something else for a moment is slower
        redraws = [redraw_ms(part("fw-link"), widget, f"{k / 20:g}") for k in (1, 2, 3, 4, 5, 0)]
        settled()
        print(
            f"bubble explorer, 16 x 64: from a control to the changed page {sorted(redraws)[3]:.0f} ms (median of 6), {redraws}"
        )
        if sorted(redraws)[3] < 500:
            break
    assert sorted(redraws)[3] < 500, redraws
    set_to(p="4", slow="2", schedule="1f1b")
    handles = [part("fw-link").element_handle(), widget.locator(".fw-main").element_handle()]
    drawn, took, late, value = lab.page.evaluate(DRAG, [*handles, [f"{k / 20:g}" for k in range(1, 21)]])
    print(f"bubble explorer, 100 values in {took:.0f} ms: drawn {drawn} times, the last {late:.0f} ms after the last value")
    assert 1 <= drawn <= 12 * max(1, took / 1000) and value == "1", (drawn, took, late, value)
    set_to(link="0")
    assert "Goal reached" in part("fw-goal").inner_text()


def drive_editor(lab, widget):
    """The schedule editor: a guess unlocks Check, an illegal cell is outlined, a known one is loaded, goals turn green."""

    def part(name):
        return widget.get_by_test_id(name)

    def settled():
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, "no answer from the kernel")

    def act(do, what):
        changed(lab, widget, do, what)
        settled()

    def write(text):
        part("fw-text").fill(text)

    assert part("fw-check").is_disabled() and part("fw-run").is_disabled(), "open before a guess"
    part("fw-guess").fill("33")
    act(part("fw-check").click, "Check")
    words = part("fw-words").inner_text()
    assert words.startswith("Legal.") and "You guessed 33" in words
    act(part("fw-pin").click, "Pin")
    changed(lab, widget, lambda: part("fw-scrub").press("ArrowRight"), "the scrubber by key")
    legal = part("fw-text").input_value()
    lines = legal.splitlines()
    cells = lines[1].split()
    back = next(k for k, cell in enumerate(cells) if cell.startswith("1B"))
    cells.insert(1, cells.pop(back))
    write("\n".join([lines[0], " ".join(cells), *lines[2:]]))
    act(lambda: part("fw-text").press("Control+Enter"), "Check by key")
    assert part("fw-bad").count() == 1 and "Rank 1, cell 2: B0 on stage 1 needs B0 from stage 2" in part("fw-words").inner_text()
    lab.screenshot("fw-editor_bad")
    write("nonsense")
    act(part("fw-check").click, "Check of nonsense")
    assert part("fw-error").count() == 1
    act(lambda: part("fw-load").select_option("1f1b"), "Load")
    assert part("fw-check").is_disabled(), "a loaded schedule wants a guess of its own"
    part("fw-guess").fill("30")
    act(part("fw-check").click, "Check of 1F1B")
    act(lambda: part("fw-F").select_option("2"), "F")
    act(lambda: part("fw-F").select_option("1"), "F back")
    if part("fw-run").is_enabled():
        act(part("fw-run").click, "Run on ranks")
        assert part("fw-words").inner_text().strip()
    rows = []
    for rank in range(4):  # ZB-H1, as the last goal wants it
        row = [f"{rank}F{m}" for m in range(4 - rank)]
        for m in range(8):
            row += [f"{rank}I{m}"] + [f"{rank}W{m - rank}"] * (m >= rank) + [f"{rank}F{m + 4 - rank}"] * (m + 4 - rank < 8)
        rows.append(" ".join(row + [f"{rank}W{m}" for m in range(8 - rank, 8)]))
    write("\n".join(rows))
    act(part("fw-check").click, "Check of ZB-H1")
    assert "27 slots" in part("fw-words").inner_text() and "Goal reached" in part("fw-goal").inner_text()


def drive_memory(lab, widget):
    """The memory explorer: a guess unlocks it, presets and switches by mouse and key, what cannot be is said, the four goals."""

    def part(name):
        return widget.get_by_test_id(name)

    def settled():
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, "no answer from the kernel")

    def act(do, what):
        changed(lab, widget, do, what)
        settled()

    def set_to(**values):
        for name, value in values.items():
            act(lambda name=name, value=value: part(f"fw-{name}").select_option(value), name)

    names = ("preset", "model", "card", "batch", "b", "s", "t", "p", "d", "zero", "sequence", "recompute", "precision")
    names += ("schedule", "v", "attention", "kv", "gated", "pin", "next")
    assert all(part(f"fw-{name}").is_disabled() for name in names), "open before a guess"
    assert widget.locator(".fw-part").count() >= 8 and widget.locator(".fw-limit").count() == 1
    act(part("fw-answer-a").click, "a wrong answer")
    assert part("fw-words").inner_text().startswith("No: sequence parallelism") and "Not yet" in part("fw-goal").inner_text()
    assert part("fw-old").count() == 8, "the bars before are not kept as outlines"
    for key, said in (("c", "Right: ZeRO 1"), ("c", "Right: micro-batch 2")):
        act(lambda: part("fw-next").press("n"), "the key n")
        assert part("fw-question").count() == 1 and part("fw-old").count() == 0
        act(lambda key=key: part(f"fw-answer-{key}").press(key), "an answer by key")
        assert part("fw-words").inner_text().startswith(said)
    act(lambda: part("fw-preset").select_option("GPT-3 on 64 A100s"), "a preset")
    act(lambda: part("fw-pin").press("p"), "the key p")
    set_to(recompute="selective", sequence="gather again")
    assert part("fw-old").count() == 8 and "2 of 4 goals" in part("fw-goal").inner_text()
    lab.screenshot("fw-memory_gpt3")
    set_to(schedule="interleaved")
    assert part("fw-v").is_enabled()
    set_to(v="3", sequence="keep", gated="true", precision="fp32", attention="tiled")
    set_to(model="22B", kv="8", t="2", p="16", d="2", zero="2", s="4096", batch="128", b="2", card="H100")
    lab.screenshot("fw-memory_many")
    set_to(t="16")
    assert "nearest legal" in part("fw-error").inner_text(), "kv_heads 8 cannot be shared by 16"
    act(lambda: part("fw-preset").select_option("1T on 512 A100s"), "a preset of 64 stages")
    lab.screenshot("fw-memory_64stages")
    act(lambda: part("fw-preset").select_option("BERT-Large on 16 GB"), "BERT")
    set_to(batch="16", b="16", attention="tiled")
    act(lambda: part("fw-preset").select_option("ZeRO's 7.5B on 64 ranks"), "ZeRO")
    set_to(attention="tiled", zero="2")
    assert "Goal reached" in part("fw-goal").inner_text()


def drive_rounding(lab, widget):
    """The rounding bench: a guess unlocks it, every control by mouse and key, the loss on release, the ghost, the goals."""

    def part(name):
        return widget.get_by_test_id(name)

    def settled():
        wait_until(lab, lambda: widget.get_attribute("aria-busy") is None, "no answer from the kernel")

    def act(do, what):
        changed(lab, widget, do, what)
        settled()

    def set_to(**values):
        for name, value in values.items():
            if part(f"fw-{name}").input_value() != value:
                act(lambda name=name, value=value: part(f"fw-{name}").select_option(value), name)

    def drag(power):
        """As a hand does: input events on the way, one change at the end."""
        events = "for (const kind of ['input', 'change']) node.dispatchEvent(new Event(kind))"
        steps = f"(node, value) => {{ node.value = value; {events} }}"
        act(lambda: part("fw-scale").evaluate(steps, str(round(4 * power))), f"scale 2^{power}")
        assert f"scale 2^{power:g}" in part("fw-words").inner_text()

    def goals():
        return int(part("fw-goal").inner_text().rpartition(" of 4 goals")[0].rpartition("(")[2])

    names = ("tensor", "format", "split", "scale", "pin", "next")
    assert all(part(f"fw-{name}").is_disabled() for name in names), "open before a guess"
    assert part("fw-ticks").count() == 0 and widget.locator(".fw-bin").count() > 10, "ticks before a guess, or no histogram"
    act(part("fw-answer-a").click, "a wrong answer")
    assert part("fw-words").inner_text().startswith("No, not") and "Not yet" in part("fw-goal").inner_text()
    assert part("fw-ticks").count() == 1
    for _ in range(2):
        act(lambda: part("fw-next").press("n"), "the key n")
        assert part("fw-question").count() == 1 and part("fw-ticks").count() == 0
        act(lambda: part("fw-answer-c").press("c"), "an answer by key")
        assert part("fw-words").inner_text().startswith("Right"), part("fw-words").inner_text()
    act(lambda: part("fw-pin").press("p"), "the key p")
    set_to(split="group", format="int4")
    lab.screenshot("fw-rounding_groups")
    set_to(tensor="gradient", format="fp8_e5m2", split="tensor")
    drag(0)
    act(lambda: part("fw-scale").press("ArrowRight"), "the scale by key")
    assert "scale 2^0.25" in part("fw-words").inner_text() and goals() == 1, "the outlier's goal alone"
    act(part("fw-pin").click, "Pin")
    drag(4)
    assert part("fw-old").count() == 1, "where zero began is not kept"
    for power in range(10, 30):
        if goals() < 2:
            drag(power)
    assert goals() == 2, "no scale fits the gradient into fp8"
    lab.screenshot("fw-rounding_scaled")
    set_to(tensor="weights", format="int4")
    for power in range(-4, 40):
        if "Goal reached" not in part("fw-goal").inner_text():
            drag(power / 4)
    assert "Loss of the model" in part("fw-words").inner_text()
    lab.screenshot("fw-rounding_int4")
    assert "Goal reached" in part("fw-goal").inner_text(), part("fw-goal").inner_text()


widget_drivers = {
    "fw-bubble": drive_bubble,
    "fw-buckets": drive_buckets,
    "fw-editor": drive_editor,
    "fw-explorer": drive_explorer,
    "fw-memory": drive_memory,
    "fw-rounding": drive_rounding,
    "fw-theatre": drive_theatre,
}

// The browser: list, filters, the open episode, one beside it, keys. What is open is in the address: #rollout=12&beside=40.

async function startBrowser(root) {
  const status = byId("status");
  if (typeof DecompressionStream === "undefined") {
    status.textContent = "This browser cannot unpack the rollouts: use Firefox 113, Chrome 111, Safari 16.4 or later.";
    return;
  }
  const began = performance.now();
  const data = await openData();
  const form = byId("filters");
  const view = byId("episode");
  const help = byId("help");
  const texts = searchTexts(data);
  const list = episodeList(byId("list"), data, (number) => open(number));
  let [opened, beside, asked, shownOnce] = [-1, -1, 0, false];
  offerChoices(form, data);

  function filter() {
    const found = selectEpisodes(data, texts, readFilter(form));
    list.set(found, opened);
    status.textContent = `${found.length.toLocaleString("en")} of ${data.count.toLocaleString("en")} episodes`;
    byId("clear").hidden = found.length === data.count;
    byId("nothing").hidden = found.length > 0;
  }

  function toolbar() {
    const others = partners(data, opened);
    const choice = others.length ? partnerChoice(data, opened, beside, putBeside) : element("span.dim", {}, "no other episode of this question");
    return element("div.toolbar", {},
      element("button.back", { type: "button", onclick: back }, "‹ list"), groupMarks(data, opened, (number) => open(number)), choice);
  }

  async function show() {
    const ticket = ++asked; // a later click wins over a block that is still being unpacked
    const wanted = [opened, beside].filter((number) => number >= 0);
    const views = await Promise.all(wanted.map((number) => episodeView(data, number)));
    if (ticket !== asked) return;
    view.replaceChildren(toolbar(), element(beside < 0 ? "div.sides" : "div.sides.two", {}, ...views));
    view.scrollTop = 0;
    root.classList.add("showing");
    list.mark(opened, beside);
    if (shownOnce) history.replaceState(null, "", `#rollout=${opened}${beside < 0 ? "" : `&beside=${beside}`}`);
    shownOnce = true; // the episode that is open at the start is nobody's choice
  }

  function open(number) {
    byId("lost").hidden = true;
    opened = number;
    if (beside >= 0 && (beside === number || !partners(data, number).includes(beside))) beside = bestPartner(data, number);
    return show().catch(tellFault);
  }

  function putBeside(number) {
    beside = number;
    return show().catch(tellFault);
  }

  function back() {
    root.classList.remove("showing");
    byId("list").focus();
  }

  // Along the episodes of the open question.
  function along(by) {
    const same = opened < 0 ? [] : data.sameQuestion(opened);
    const next = same[same.indexOf(opened) + by];
    if (next !== undefined) open(next);
  }

  function choose(outcome) {
    form.elements.outcome.value = outcome;
    filter();
  }

  const keys = {
    j: () => list.move(1),
    k: () => list.move(-1),
    g: () => list.to(0),
    G: () => list.to(-1),
    "]": () => along(1),
    "[": () => along(-1),
    c: () => opened >= 0 && putBeside(beside < 0 ? bestPartner(data, opened) : -1),
    r: () => choose("right"),
    w: () => choose("wrong"),
    a: () => choose(""),
    "/": () => form.elements.words.focus(),
    "?": () => (help.open ? help.close() : help.showModal()),
    Escape: back,
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) {
      if (event.key === "Escape" || (event.key === "Enter" && event.target.matches("input"))) byId("list").focus();
      return;
    }
    if (help.open && event.key !== "?") return;
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!move && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    if (move) list.move(move);
    else list.to(event.key === "Home" ? 0 : -1);
  });
  form.elements.words.addEventListener("input", filter);
  form.addEventListener("change", (event) => event.target.matches("select") && filter());
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", () => {
    form.reset();
    filter();
  });
  byId("help-button").addEventListener("click", () => help.showModal());
  byId("help-close").addEventListener("click", () => help.close());

  // Open what the address names; what of it is not there is said. Returns whether something is open now.
  async function follow() {
    const address = new URLSearchParams(location.hash.slice(1));
    const [first, second] = [address.get("rollout"), address.get("beside")];
    const missing = (text) => !/^\d+$/.test(text) || Number(text) >= data.count;
    const said = missing(second ?? "") ? "is not on this page" : Number(second) === Number(first) ? "is the same" : "is of another question";
    const lost = [];
    if (first !== null && missing(first)) lost.push(`rollout ${first.slice(0, 20)} is not on this page`);
    else if (second !== null && (first === null || !partners(data, Number(first)).includes(missing(second) ? -1 : Number(second)))) {
      lost.push(first === null ? "no rollout is named to put another one beside" : `rollout ${second.slice(0, 20)}, to be put beside it, ${said}`);
    }
    byId("lost").hidden = !lost.length;
    byId("lost").textContent = `The address does not fit: ${lost.join("; ")}. It has the rollouts 0 to ${data.count - 1}, which have other numbers when the report is written again: find it by its question.`;
    if (first === null || missing(first)) return false;
    opened = Number(first);
    beside = second !== null && !lost.length ? Number(second) : -1;
    await show();
    root.scrollIntoView();
    return true;
  }

  filter();
  addEventListener("hashchange", () => follow().catch(tellFault));
  if (await follow()) {
    // somebody's choice
  } else if (matchMedia("(min-width: 800px)").matches) {
    opened = 0;
    await show();
  }
  root.dataset.ready = Math.round(performance.now() - began);
}

// A file that was cut off on its way, for one.
function tellFault(error) {
  byId("status").textContent = `The packed rollouts cannot be read (${error.message}): write the report again.`;
}

if (byId("browser")) startBrowser(byId("browser")).catch(tellFault);

// The list of episodes: only the rows in view exist, however many there are.

const ROW = 60; // px; as in browser.css
const SPARE = 6; // rows above and below the view

function episodeList(box, data, onOpen) {
  const inner = element("div.rows", { role: "presentation" });
  box.append(inner);
  let shown = []; // numbers of episodes
  let current = -1; // place in `shown`
  let compared = -1; // number of the episode beside it
  let frame = 0;

  function row(place) {
    const head = data.head(shown[place]);
    const where = [
      data.runs.length > 1 ? head.runName : "",
      head.evaluation ? `evaluation, step ${head.step}` : `step ${head.step} #${head.sample}`,
      head.dataset,
    ];
    const made = element(
      "div.row",
      {
        id: `row-${place}`, role: "option", "aria-selected": place === current ? "true" : "false",
        "aria-setsize": shown.length, "aria-posinset": place + 1, "data-place": place,
      },
      element(head.right ? "span.verdict.right" : "span.verdict.wrong", { title: head.reason }, head.right ? "✓" : "✗"),
      element("span.hidden", {}, `${head.reason}: `),
      element("span.question", { dir: "auto" }, head.question),
      element("span.where", {}, foreign(where.filter(Boolean).join(" · "))),
      element("span.answer", {}, head.answer === null ? element("i", {}, head.reason) : foreign(head.answer)),
    );
    if (shown[place] === compared) made.classList.add("compared");
    made.style.top = `${place * ROW}px`;
    return made;
  }

  function draw() {
    frame = 0;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
    const last = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + SPARE);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(row(place));
    inner.style.height = `${shown.length * ROW}px`;
    inner.replaceChildren(...rows);
    if (current >= first && current < last) box.setAttribute("aria-activedescendant", `row-${current}`);
    else box.removeAttribute("aria-activedescendant");
  }

  function drawSoon() {
    frame ||= requestAnimationFrame(draw);
  }

  function reveal(place) {
    const top = place * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW - box.clientHeight;
  }

  function open(place) {
    if (place < 0 || place >= shown.length) return;
    current = place;
    reveal(place);
    draw();
    onOpen(shown[place]);
  }

  box.addEventListener("scroll", drawSoon, { passive: true });
  box.addEventListener("click", (event) => {
    const found = event.target.closest(".row");
    if (found) open(Number(found.dataset.place));
  });
  new ResizeObserver(drawSoon).observe(box);

  return {
    // Show these episodes; the one that is open stays marked where it is among them.
    set(numbers, opened) {
      shown = numbers;
      current = numbers.indexOf(opened);
      box.scrollTop = 0;
      if (current >= 0) reveal(current);
      draw();
    },
    // Mark an episode that was opened elsewhere, and the one beside it.
    mark(opened, beside) {
      current = shown.indexOf(opened);
      compared = beside;
      if (current >= 0) reveal(current);
      draw();
    },
    move: (by) => open(current < 0 ? 0 : clamp(current + by, 0, shown.length - 1)),
    to: (place) => open(clamp(place < 0 ? shown.length + place : place, 0, shown.length - 1)),
    numbers: () => shown,
  };
}

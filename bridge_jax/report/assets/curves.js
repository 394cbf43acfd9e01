// Values under the pointer, or step by step with the arrow keys, written below each chart.

function readableChart(figure) {
  const svg = figure.querySelector("svg");
  const output = figure.querySelector("output");
  const cursor = svg.querySelector(".cursor");
  const lines = [...svg.querySelectorAll("polyline")].map((line) => ({
    label: line.dataset.label,
    x: [...line.points].map((point) => point.x),
    values: line.dataset.values.split(" ").map((pair) => pair.split(":").map(Number)),
  }));
  const marks = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let at = marks.length - 1;

  function nearest(values, wanted) {
    let best = 0;
    values.forEach((value, n) => {
      if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = n;
    });
    return best;
  }

  function show(active) {
    const x = marks[at];
    const points = lines.map((line) => ({ line, n: active ? nearest(line.x, x) : line.x.length - 1 }));
    const found = points.filter(({ line, n }) => !active || Math.abs(line.x[n] - x) < 0.6);
    const when = active ? `step ${found[0].line.values[found[0].n][0]}` : "last";
    const read = ({ line, n }) => (lines.length > 1 ? `${line.label} ` : "") + line.values[n][1];
    output.textContent = `${when}: ${found.map(read).join(", ")}`;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    svg.classList.toggle("reading", active);
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    at = nearest(marks, ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width);
    show(true);
  });
  svg.addEventListener("pointerleave", () => {
    at = marks.length - 1;
    show(false);
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -marks.length, End: marks.length }[event.key];
    if (!move) return;
    event.preventDefault();
    at = clamp(at + move, 0, marks.length - 1);
    show(true);
    svg.setAttribute("aria-description", output.textContent);
  });
  svg.addEventListener("blur", () => show(false));
  show(false);
}

document.querySelectorAll("figure").forEach(readableChart);

// Which episodes the list shows. A filter is {run, kind, step, dataset, outcome, words}; "" lets everything through.

function distinct(values) {
  return [...new Set(values)];
}

function option(value, label) {
  return element("option", { value }, label);
}

// Fill the <select>s of the form with what occurs, and hide those that leave no choice.
function offerChoices(form, data) {
  const { index, runs } = data;
  const steps = distinct(index.step).sort((a, b) => a - b);
  const choices = {
    run: runs.map((run, number) => [number, run.method && runs.length > 1 ? `${run.name} (${run.method})` : run.name]),
    kind: distinct(index.source).map((source) => [source, source ? "evaluation" : "training"]),
    step: steps.map((step) => [step, `step ${step}`]),
    dataset: index.datasets.map((name, number) => [number, name || "(no name)"]),
    outcome: [["right", "right"], ["wrong", "wrong"], ...index.reasons.filter((r) => r !== "correct").map((r) => [`=${r}`, r])],
  };
  for (const [name, found] of Object.entries(choices)) {
    form.elements[name].append(...found.map(([value, label]) => option(value, label)));
    form.elements[name].closest("label").hidden = found.length < 2;
  }
}

function readFilter(form) {
  const value = (name) => form.elements[name].value;
  return {
    run: value("run"), kind: value("kind"), step: value("step"), dataset: value("dataset"), outcome: value("outcome"),
    words: value("words").toLowerCase().split(/\s+/).filter(Boolean),
  };
}

// One lower-case text an episode: question, id, gold answers, answer, queries.
function searchTexts(data) {
  const { index } = data;
  const ofQuestion = index.questions.map(([id, , question, golds]) => [id, question, ...golds].join("\n").toLowerCase());
  return index.question.map(
    (question, n) => `${ofQuestion[question]}\n${index.answer[n] ?? ""}\n${index.queries[n].join("\n")}`.toLowerCase(),
  );
}

function selectEpisodes(data, texts, filter) {
  const { index } = data;
  const is = (wanted, value) => wanted === "" || Number(wanted) === value;
  const outcome = (n) => {
    if (filter.outcome === "") return true;
    if (filter.outcome.startsWith("=")) return index.reasons[index.reason[n]] === filter.outcome.slice(1);
    return (index.reward[n] > 0) === (filter.outcome === "right");
  };
  const found = [];
  for (let n = 0; n < data.count; n++) {
    const kept =
      is(filter.run, index.run[n]) &&
      is(filter.kind, index.source[n]) &&
      is(filter.step, index.step[n]) &&
      (filter.dataset === "" || Number(filter.dataset) === index.questions[index.question[n]][1]) &&
      outcome(n) &&
      filter.words.every((word) => texts[n].includes(word));
    if (kept) found.push(n);
  }
  return found;
}

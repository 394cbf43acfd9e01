// The other episodes of a question: its group, other steps, other runs; and which one to put beside the open one.

function describe(head, several) {
  const when = head.evaluation ? `evaluation, step ${head.step}` : `step ${head.step}, sample ${head.sample}`;
  return `${head.right ? "✓" : "✗"} ${several ? `${head.runName}, ` : ""}${when}: ${head.answer ?? head.reason}`;
}

function partners(data, number) {
  return data.sameQuestion(number).filter((other) => other !== number);
}

// The most telling one: another run at the same step, else another step, else a sample with the other outcome.
function bestPartner(data, number) {
  const open = data.head(number);
  const value = (other) => {
    const head = data.head(other);
    const alike = (head.evaluation === open.evaluation) * 4;
    if (head.run !== open.run) return alike + 2 + (head.step === open.step) + (head.sample === open.sample);
    if (head.step !== open.step) return alike + 2 - 1 / (1 + Math.abs(head.step - open.step));
    return alike + (head.right !== open.right);
  };
  return partners(data, number).reduce((best, other) => (best < 0 || value(other) > value(best) ? other : best), -1);
}

// A <select> of the partners, in groups of run and kind.
function partnerChoice(data, number, beside, onChoose) {
  const several = data.runs.length > 1;
  const select = element("select", { id: "beside", onchange: () => onChoose(select.value === "" ? -1 : Number(select.value)) });
  select.append(element("option", { value: "" }, "nothing"));
  const groups = new Map();
  for (const other of partners(data, number)) {
    const head = data.head(other);
    const label = `${several ? `${head.runName}: ` : ""}${head.evaluation ? "evaluation" : "training"}`;
    if (!groups.has(label)) groups.set(label, element("optgroup", { label }));
    groups.get(label).append(element("option", { value: other }, describe(head, false)));
  }
  select.append(...groups.values());
  select.value = beside < 0 ? "" : String(beside);
  return element("label.beside", { for: "beside" }, "beside it", select);
}

// The same question's samples at the same step, as marks that open them.
function groupMarks(data, number, onOpen) {
  const open = data.head(number);
  const group = data.sameQuestion(number).filter((other) => {
    const head = data.head(other);
    return head.run === open.run && head.step === open.step && head.evaluation === open.evaluation;
  });
  if (group.length < 2) return "";
  const marks = group.map((other) => {
    const head = data.head(other);
    return element(head.right ? "button.verdict.right" : "button.verdict.wrong", {
      type: "button", "aria-pressed": other === number ? "true" : "false", title: describe(head, false),
      "aria-label": describe(head, false), onclick: () => onOpen(other),
    }, head.right ? "✓" : "✗");
  });
  return element("span.group", { role: "group", "aria-label": "the group's rollouts" }, "group ", ...marks);
}

// One episode: what was written, coloured by tag, and under each search its candidates.

const TAGS = /<(think|search|information|answer)>([\s\S]*?)(?:<\/\1>|$)/g;
const FIRST = 8; // candidates shown at once, beside gold ones and those with the largest responsibility

// [{tag, text}] of a generated text; tag "" is what stands outside of tags.
function splitTags(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(TAGS)) {
    parts.push({ tag: "", text: text.slice(end, match.index) }, { tag: match[1], text: match[2] });
    end = match.index + match[0].length;
  }
  parts.push({ tag: "", text: text.slice(end) });
  return parts.filter((part) => part.text.trim());
}

// Text nodes, with gold answers in <mark>.
function withMarks(text, golds) {
  const wanted = golds.map((gold) => gold.trim()).filter((gold) => gold.length > 1);
  if (!wanted.length) return [text];
  const pattern = new RegExp(`(${wanted.map((gold) => gold.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
  return text.split(pattern).map((part, n) => (n % 2 ? element("mark", { title: "gold answer" }, part) : part));
}

function block(kind, label, ...children) {
  return element(`section.block.${kind}`, {}, element("h4", {}, label), ...children);
}

function words(text, golds = []) {
  return element("p.words", { dir: "auto" }, ...withMarks(text.trim(), golds));
}

function generated(text) {
  return splitTags(text).map(({ tag, text: inside }) => block(tag || "untagged", tag || "outside of tags", words(inside)));
}

function information(text, golds) {
  const inside = text.trim().replace(/^<information>/, "").replace(/<\/information>$/, "");
  return block("information", "information", words(inside, golds));
}

function bar(kind, share, text) {
  const fill = element("span.fill");
  fill.style.width = `${100 * clamp(share, 0, 1)}%`;
  return element(`td.bar.${kind}`, {}, element("span.track", {}, fill), element("span.number", {}, text));
}

function probability(value) {
  return value === null ? "-" : value.toFixed(3);
}

const COLUMNS = [
  ["rank", "#", "rank: order of the retriever's scores"],
  ["p", "p", "p: the retriever's probability of the passage, softmax(score / tau) over the candidates"],
  ["l", "l", "l: log-likelihood of the credited text after reading the passage; its bar goes from the lowest to the highest of this search"],
  ["w", "w", "w: responsibility, softmax(log p + l): what the retriever is pulled towards"],
];

function candidateRow(found, scored, lowest, highest) {
  const name = element("td.passage", {},
    element("span.title", { dir: "auto" }, found.title || found.id),
    found.shown ? element("span.badge.shown", { title: "read by the policy" }, "shown") : "",
    found.gold ? element("span.badge.gold", { title: "a gold passage of the question" }, "gold") : "",
    found.title ? element("span.id", {}, foreign(found.id)) : "",
  );
  const cells = [element("td.rank", {}, String(found.rank + 1)), name, bar("p", found.p ?? 0, probability(found.p))];
  if (scored) {
    const share = found.l === null ? 0 : highest > lowest ? (found.l - lowest) / (highest - lowest) : 1;
    cells.push(bar("l", share, found.l === null ? "-" : found.l.toFixed(1).replace("-0.0", "0.0")), bar("w", found.w ?? 0, probability(found.w)));
  }
  const kinds = `${found.shown ? ".is-shown" : ""}${found.gold ? ".is-gold" : ""}`;
  return element(`tr${kinds}`, { title: found.score === null ? null : `score ${found.score}` }, ...cells);
}

function candidates(search) {
  const { documents, scored } = search;
  if (!documents.length) return element("p.dim", {}, "no candidates");
  const likelihoods = documents.map((found) => found.l).filter((l) => l !== null);
  const [lowest, highest] = [Math.min(...likelihoods), Math.max(...likelihoods)];
  const byWeight = [...documents].sort((a, b) => (b.w ?? 0) - (a.w ?? 0)).slice(0, scored ? 3 : 0);
  let [sorted, everything] = ["rank", false];
  const body = element("tbody");
  const columns = scored ? COLUMNS : COLUMNS.slice(0, 2);
  const heads = columns.map(([name, label, title]) => {
    const button = element("button", { type: "button", title, "aria-label": `sort by ${name}`, onclick: () => sort(name) }, label);
    return element(name === "rank" ? "th.rank" : "th.bar", { scope: "col" }, button);
  });
  const more = element("button.more", { type: "button", onclick: () => { everything = !everything; draw(); } });

  function sort(name) {
    sorted = name;
    draw();
  }

  function draw() {
    const value = (found) => (sorted === "rank" ? -found.rank : found[sorted] ?? -Infinity);
    const order = [...documents].sort((a, b) => value(b) - value(a));
    const kept = order.filter((found, n) => everything || n < FIRST || found.gold || byWeight.includes(found));
    body.replaceChildren(...kept.map((found) => candidateRow(found, scored, lowest, highest)));
    columns.forEach(([name], n) => heads[n].setAttribute("aria-sort", name !== sorted ? "none" : name === "rank" ? "ascending" : "descending"));
    more.hidden = !everything && kept.length === documents.length;
    more.textContent = everything ? "show fewer" : `show all ${documents.length}`;
  }

  draw();
  const [rank, ...bars] = heads;
  const head = element("thead", {}, element("tr", {}, rank, element("th", { scope: "col" }, "passage"), ...bars));
  const caption = element("caption.hidden", {}, "candidates of this search");
  return element("div", {}, element("div.scroll", {}, element("table.candidates", {}, caption, head, body)), more);
}

function facts(search) {
  const on = (name) => search.documents.filter((found) => found.gold).reduce((sum, found) => sum + (found[name] ?? 0), 0);
  const anyGold = search.documents.some((found) => found.gold);
  const parts = [];
  if (!search.scored) parts.push("not scored: no l and w");
  else if (search.credit === "next_action") parts.push(`credit: the next action of sample ${search.span ?? "?"}`);
  if (!anyGold) parts.push("no gold passage among the candidates");
  else parts.push(`on gold passages: p ${probability(on("p"))}` + (search.scored ? ` → w ${probability(on("w"))}` : ""));
  return element("p.facts", {}, parts.join(" · "));
}

function searchBlock(search, number) {
  const parts = [facts(search), candidates(search)];
  if (search.error) parts.unshift(element("p.fault", { dir: "auto" }, search.error));
  return element("section.block.candidates-of", { "aria-label": `candidates of search ${number}` },
    element("h4", {}, `search ${number}: candidates`), ...parts);
}

// The trace with a table behind each search. A search whose passages did not fit into the context has no information part.
function traceOf(detail, golds) {
  const parts = [];
  let number = 0;
  for (const { kind, text } of detail.trace) {
    if (kind === "generated") parts.push(...generated(text));
    else if (kind === "information") {
      const search = detail.searches[number++];
      if (search) parts.push(searchBlock(search, number));
      parts.push(information(text, golds));
    } else parts.push(block(kind, { tool: "the tool's reply", corrective: "correction" }[kind] ?? kind, words(text.replace(/<\/?information>/g, ""))));
  }
  while (number < detail.searches.length) {
    const search = detail.searches[number++];
    if (!detail.trace.length) parts.push(block("search", "search", words(search.query)));
    parts.push(searchBlock(search, number));
  }
  return parts;
}

function episodeHead(head, several) {
  const where = [several ? head.runName : "", several ? head.method : "", head.evaluation ? "evaluation" : "training", `step ${head.step}`];
  if (!head.evaluation) where.push(`sample ${head.sample}`);
  where.push(head.dataset, head.id);
  const numbers = [`${head.queries.length} ${head.queries.length === 1 ? "search" : "searches"}`];
  if (head.advantage !== null) numbers.push(`advantage ${head.advantage > 0 ? "+" : ""}${head.advantage.toFixed(2)}`);
  return element("header.episode-head", {},
    element("p.where", {}, foreign(where.filter(Boolean).join(" · "))),
    element("h3", { dir: "auto" }, head.question),
    element("dl.outcome", {},
      element("div", {}, element("dt", {}, "gold"), element("dd", {}, foreign(head.golds.join(" / ") || "-"))),
      element("div", {}, element("dt", {}, "answer"), element("dd", {}, head.answer === null ? "none" : foreign(head.answer))),
      element("div", {}, element("dt", {}, "outcome"),
        element("dd", {}, element(head.right ? "span.verdict.right" : "span.verdict.wrong", {}, head.right ? "✓" : "✗"), ` ${head.reason}`)),
    ),
    element("p.facts", {}, numbers.join(" · ")),
  );
}

async function episodeView(data, number) {
  const head = data.head(number);
  const detail = await data.detail(number);
  return element("article.episode", { "data-number": number, "aria-label": `${head.right ? "right" : "wrong"}: ${head.question}` },
    episodeHead(head, data.runs.length > 1), ...traceOf(detail, head.golds));
}

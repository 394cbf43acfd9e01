// The packed data (see layout.py): the index at once, a block of details when one of its episodes is looked at.

const KEPT_BLOCKS = 24;

async function unpack(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let n = 0; n < binary.length; n++) bytes[n] = binary.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function stored(part) {
  return [...document.querySelectorAll(`script[data-part="${part}"]`)];
}

async function openData() {
  const [runs, index] = await Promise.all([unpack(stored("runs")[0].textContent), unpack(stored("index")[0].textContent)]);
  const blocks = stored("block");
  const opened = new Map(); // number -> promise; the one used last is last
  const sameQuestion = new Map();

  function block(number) {
    const found = opened.get(number) ?? unpack(blocks[number].textContent);
    opened.delete(number);
    opened.set(number, found);
    if (opened.size > KEPT_BLOCKS) opened.delete(opened.keys().next().value);
    return found;
  }

  // What the list and the filters need of an episode.
  function head(number) {
    const [id, dataset, question, golds] = index.questions[index.question[number]];
    return {
      number, id, question, golds,
      dataset: index.datasets[dataset],
      run: index.run[number],
      runName: runs[index.run[number]].name,
      method: runs[index.run[number]].method,
      evaluation: index.source[number] === 1,
      step: index.step[number],
      sample: index.sample[number],
      reason: index.reasons[index.reason[number]],
      right: index.reward[number] > 0,
      advantage: index.advantage[number],
      answer: index.answer[number],
      queries: index.queries[number],
    };
  }

  async function detail(number) {
    const { documents, texts, episodes } = await block(Math.floor(number / index.block));
    const { trace, searches } = episodes[number % index.block];
    return {
      trace: trace.map(([kind, text]) => ({ kind: ["generated", "information", "corrective", "fault", "tool"][kind], text: texts[text] })),
      searches: searches.map(([query, error, credit, span, shown, found, gold, score, p, l, w]) => ({
        query, error, credit, span, scored: w !== null,
        documents: found.map((place, rank) => ({
          rank,
          id: documents[place][0],
          title: documents[place][1],
          shown: rank < shown,
          gold: gold.includes(rank),
          score: score[rank],
          p: p[rank],
          l: l === null ? null : l[rank],
          w: w === null ? null : w[rank],
        })),
      })),
    };
  }

  // Questions are the same across runs and steps when id, data set and text are; gold answers may be written otherwise.
  const keys = index.questions.map(([id, dataset, question]) => JSON.stringify([id, dataset, question]));
  index.question.forEach((question, number) => {
    const key = keys[question];
    if (!sameQuestion.has(key)) sameQuestion.set(key, []);
    sameQuestion.get(key).push(number);
  });

  return {
    runs, index, head, detail,
    count: index.run.length,
    sameQuestion: (number) => sameQuestion.get(keys[index.question[number]]),
  };
}

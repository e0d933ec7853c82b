// The rollout browser. Text that a model wrote is only ever put into text nodes: nothing here parses markup.
//
// The block `rollout-index` has the columns for filtering, sorting and listing, each as {codes, values}. The other columns
// are in compressed blocks, `texts-N` and `tokens-N`, which are unpacked when one of their rollouts is shown or searched.
"use strict";
(() => {
  const PAGE_ROWS = 25;
  const GROUP_CARDS = 16; // samples of a group shown before "the other ... samples" is clicked
  const KEPT_BLOCKS = 24; // unpacked blocks kept in memory, of each kind
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/u; // characters that `text.printable` escapes, plus newline and tab
  const SURPRISE = [0.9, 0.5, 0.2, 0.05, 0.01]; // probabilities below which a token is shaded one level darker

  const index = JSON.parse(document.getElementById("rollout-index").textContent);
  const root = document.getElementById("browser");

  // Data

  const value = (name, row) => index.columns[name].values[index.columns[name].codes[row]];

  function blockOf(row) {
    let low = 0, high = index.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (index.starts[middle] <= row) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  async function unpack(id) {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  const unpacked = new Map(); // block id -> promise of its data, the least recently used first

  function block(kind, number) {
    const id = `${kind}-${number}`;
    const data = unpacked.get(id) ?? unpack(id);
    unpacked.delete(id);
    unpacked.set(id, data);
    if (unpacked.size > 2 * KEPT_BLOCKS) unpacked.delete(unpacked.keys().next().value);
    return data;
  }

  async function rollout(row) {
    const number = blockOf(row), i = row - index.starts[number];
    const [texts, tokens] = await Promise.all([block("texts", number), block("tokens", number)]);
    const all = { centinats: tokens.centinats[i], lengths: tokens.lengths[i] };
    for (const name in texts) all[name] = name === "prompt" ? texts.prompt.values[texts.prompt.codes[i]] : texts[name][i];
    return all;
  }

  // Elements

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, setting] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), setting);
      else if (setting !== null) made.setAttribute(key, setting);
    }
    made.append(...children);
    return made;
  }

  function escaped(character) {
    const code = character.codePointAt(0), hex = code.toString(16);
    return code <= 0xff ? `\\x${hex.padStart(2, "0")}` : code <= 0xffff ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
  }

  // Nodes that show a text with its hidden characters escaped.
  function visible(text) {
    const nodes = [];
    let plain = "";
    for (const character of HIDDEN.test(text) ? text : [text]) {
      if (character === "\n" || character === "\t" || !HIDDEN.test(character)) plain += character;
      else {
        nodes.push(plain, element("span", { class: "escape" }, escaped(character)));
        plain = "";
      }
    }
    return [...nodes, plain];
  }

  function shown(data) {
    if (data === null || data === undefined) return "–";
    return typeof data === "number" && !Number.isInteger(data) ? String(Number(data.toPrecision(4))) : String(data);
  }

  // Filters

  const rewardKinds = {
    "above 0.5": (reward) => reward > 0.5,
    "0.5 or less": (reward) => reward !== null && !(reward > 0.5),
    "none: the grade failed": (reward) => reward === null,
  };
  const filters = {};

  function choice(name, label, options) {
    const select = element("select", { id: `filter-${name}`, onchange: () => refresh() }, element("option", { value: "" }, "all"));
    options.forEach((text, i) => select.append(element("option", { value: String(i + 1) }, ...visible(text))));
    filters[name] = select;
    return element("label", {}, element("span", {}, label), select);
  }

  const sortedValues = (name) =>
    [...index.columns[name].values.keys()].sort((a, b) => compare(index.columns[name].values[a], index.columns[name].values[b]));
  const orders = {};

  function columnChoice(name, label) {
    orders[name] = sortedValues(name);
    return choice(name, label, orders[name].map((code) => shown(index.columns[name].values[code])));
  }

  function compare(a, b) {
    if (a === b) return 0;
    if (a === null || b === null) return a === null ? 1 : -1;
    return a < b ? -1 : 1;
  }

  function filtered() {
    const wanted = Object.keys(orders).filter((name) => filters[name].value)
      .map((name) => [index.columns[name].codes, orders[name][filters[name].value - 1]]);
    const kind = Object.values(rewardKinds)[filters.reward.value - 1];
    const rows = [];
    for (let row = 0; row < index.rows; row++) {
      if (wanted.every(([codes, code]) => codes[row] === code) && (!kind || kind(value("reward", row)))) rows.push(row);
    }
    return rows;
  }

  // The rows whose texts contain the query. Yields to the browser after each block; null if a newer request has started.
  async function searched(rows, query, request) {
    const needle = query.toLowerCase(), found = [];
    const holds = (text) => text !== null && text.toLowerCase().includes(needle);
    let texts = null, number = -1, prompts = [];
    for (const [place, row] of rows.entries()) {
      if (blockOf(row) !== number) {
        number = blockOf(row);
        texts = await block("texts", number);
        if (request !== requests) return null;
        prompts = texts.prompt.values.map(holds);
        say(`Searching: ${Math.round((100 * place) / rows.length)} %, ${found.length.toLocaleString("en")} found.`);
        await new Promise((done) => setTimeout(done));
      }
      const i = row - index.starts[number];
      const hit = prompts[texts.prompt.codes[i]] || holds(texts.response[i]) || holds(texts.ground_truth[i]) ||
        holds(texts.extracted_answer[i]) || holds(value("example_id", row));
      if (hit) found.push(row);
    }
    return found;
  }

  // The list

  const COLUMNS = [
    ["example_id", "question"], ["sample_index", "sample"], ["run_id", "run"], ["phase", "phase"], ["step", "step"],
    ["reward", "reward"], ["advantage", "advantage"], ["category", "category"], ["failure_kind", "failure kind"],
    ["extracted_answer", "answer"], ["ground_truth", "truth"], ["num_response_tokens", "tokens"],
  ].filter(([name]) => name !== "run_id" || index.columns.run_id.values.length > 1);
  const NUMBERS = new Set(["sample_index", "step", "reward", "advantage", "num_response_tokens"]);

  let requests = 0; // number of the latest request for a list; older ones stop
  let rows = [], first = 0, selected = -1;
  let order = { name: null, down: false };

  const status = element("p", { role: "status", class: "status" });
  const body = element("tbody");
  const headings = new Map();
  const detail = element("article", { id: "rollout", "aria-label": "Rollout" });
  const search = element("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", oninput: () => later() });
  const pager = Object.fromEntries([["first", "«"], ["previous", "‹"], ["next", "›"], ["last", "»"]].map(([name, sign]) =>
    [name, element("button", { type: "button", "aria-label": `${name} page`, id: `page-${name}`, onclick: () => turn(name) }, sign)]));

  function say(text) {
    status.textContent = text;
  }

  let timer = 0;
  function later() {
    clearTimeout(timer);
    timer = setTimeout(refresh, 250);
  }

  async function refresh() {
    clearTimeout(timer);
    const request = ++requests;
    let found = filtered();
    if (search.value) found = await searched(found, search.value, request);
    if (found === null) return;
    rows = found;
    sort();
    first = 0;
    list();
  }

  function sort() {
    const { name, down } = order;
    if (name === null) rows.sort((a, b) => a - b);
    else rows.sort((a, b) => {
      const x = value(name, a), y = value(name, b);
      const missing = x === null || y === null; // missing values come last in both directions
      return (down && !missing ? -compare(x, y) : compare(x, y)) || a - b;
    });
    for (const [key, heading] of headings) {
      heading.setAttribute("aria-sort", key !== name ? "none" : down ? "descending" : "ascending");
    }
  }

  function sortBy(name) {
    if (order.name !== name) order = { name, down: NUMBERS.has(name) };
    else if (order.down === NUMBERS.has(name)) order = { name, down: !order.down };
    else order = { name: null, down: false };
    sort();
    first = 0;
    list();
  }

  function turn(where) {
    const last = Math.max(0, Math.ceil(rows.length / PAGE_ROWS) - 1) * PAGE_ROWS;
    first = { first: 0, previous: Math.max(0, first - PAGE_ROWS), next: Math.min(last, first + PAGE_ROWS), last }[where];
    list();
  }

  function list() {
    const page = rows.slice(first, first + PAGE_ROWS);
    body.replaceChildren(...page.map((row) => {
      const cells = COLUMNS.map(([name], i) => {
        const text = visible(shown(value(name, row)));
        const inside = i ? element("span", { class: "clip" }, ...text) : element("button", { type: "button", class: "open clip" }, ...text);
        return element("td", { class: NUMBERS.has(name) ? "number" : null }, inside);
      });
      return element("tr", { "data-row": row, "aria-current": row === selected ? "true" : null }, ...cells);
    }));
    const all = rows.length === index.rows ? "" : ` of ${index.rows.toLocaleString("en")}`;
    const range = rows.length ? `${(first + 1).toLocaleString("en")} to ${(first + page.length).toLocaleString("en")} of ` : "";
    say(`${range}${rows.length.toLocaleString("en")} rollouts${all && ` (${all.trim()} in this page)`}`);
    pager.first.disabled = pager.previous.disabled = first === 0;
    pager.next.disabled = pager.last.disabled = first + PAGE_ROWS >= rows.length;
  }

  function keys(event) {
    const line = event.target.closest("tr");
    const beside = { ArrowDown: line?.nextElementSibling, ArrowUp: line?.previousElementSibling }[event.key];
    if (!beside) return;
    event.preventDefault();
    beside.querySelector("button").focus();
  }

  // One rollout

  async function open(row, { focus = true } = {}) {
    selected = row;
    for (const line of body.children) {
      if (Number(line.dataset.row) === row) line.setAttribute("aria-current", "true");
      else line.removeAttribute("aria-current");
    }
    const all = await rollout(row);
    if (selected !== row) return;
    const place = rows.indexOf(row);
    const step = (label, to) =>
      element("button", { type: "button", disabled: to === undefined ? "" : null, onclick: () => open(to) }, label);
    const title = element("h3", { tabindex: "-1" }, ...visible(value("example_id", row)), ` · sample ${value("sample_index", row)}`);
    const moves = element("p", { class: "moves" }, step("‹ previous", rows[place - 1]), step("next ›", place < 0 ? undefined : rows[place + 1]),
      element("a", { href: "#rollouts" }, "back to the list"));
    const facts = {
      run: value("run_id", row), phase: value("phase", row), step: value("step", row), category: value("category", row),
      "failure kind": value("failure_kind", row), reward: value("reward", row), "format reward": all.format_reward,
      "answer reward": all.answer_reward, advantage: value("advantage", row), "ground truth": all.ground_truth,
      "extracted answer": all.extracted_answer, grader: all.grader, "grade error": all.grade_error,
      "what it says": all.grade_error_detail, finish: all.finish_reason, "stopped by": all.stop_reason, tokens: value("num_response_tokens", row), "mean log-probability": all.mean_logprob,
      "mean entropy": all.mean_entropy, "policy version": all.policy_version, seed: all.seed, "sampled at": all.sampled_at,
    };
    const entries = Object.entries(facts).filter(([name, data]) => data !== null || name === "extracted answer" || name === "reward")
      .map(([name, data]) => element("div", {}, element("dt", {}, name), element("dd", {}, ...visible(shown(data)))));
    detail.replaceChildren(title, moves, element("dl", { class: "facts" }, ...entries),
      element("h4", {}, "Prompt"), element("pre", { class: "prompt", tabindex: "0", "aria-label": "prompt" }, ...visible(all.prompt)),
      element("h4", {}, "Response"), ...response(row, all), ...(await group(row)));
    if (focus) {
      title.focus({ preventScroll: true });
      detail.scrollIntoView({ block: "start" });
    }
  }

  function response(row, all) {
    const why = unshaded(row, all);
    if (why) return [element("pre", { class: "response", tabindex: "0", "aria-label": "response" }, ...visible(all.response)), element("p", { class: "note" }, why)];
    const spans = shaded(all);
    const tokens = spans.filter((span) => span.dataset?.token);
    const readout = element("output", { class: "note" }, "To see a token's probability, point at it, or use ← and → in the response.");
    let at = -1;
    const tell = (to) => {
      tokens[at]?.classList.remove("at");
      at = Math.max(0, Math.min(tokens.length - 1, to));
      tokens[at].classList.add("at");
      const number = Number(tokens[at].dataset.token), cents = all.centinats[number];
      const chance = cents === null ? "unknown" : `${shown(Math.exp(-cents / 100))} (log-probability ${(-cents / 100).toFixed(2)})`;
      readout.replaceChildren(`Token ${number + 1} of ${all.centinats.length} `, element("code", {}, JSON.stringify(tokens[at].dataset.text)), `: probability ${chance}`);
    };
    const text = element("pre", {
      class: "response", tabindex: "0", "aria-label": "response, shaded by probability",
      onpointerover: (event) => {
        const span = event.target.closest("[data-token]");
        if (span) tell(tokens.indexOf(span));
      },
      onkeydown: (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by || !tokens.length) return;
        event.preventDefault();
        tell(at + by);
        tokens[at].scrollIntoView({ block: "nearest" });
      },
    }, ...spans);
    return [text, readout, legend()];
  }

  function unshaded(row, all) {
    if (!all.centinats.length) return "Not shaded: the engine returned no log-probabilities.";
    if (all.lengths) return "";
    if (!index.tokenizers.includes(value("run_id", row))) return "Not shaded: the tokenizer was not available when this page was made.";
    return "Not shaded: the tokens do not decode to this text.";
  }

  function level(cents) {
    return cents === null ? 0 : SURPRISE.filter((bound) => Math.exp(-cents / 100) < bound).length;
  }

  // The response as one element per token; a last token without text (the end of the sequence) is shown as a mark.
  function shaded(all) {
    let from = 0;
    return all.lengths.map((length, number) => {
      const text = all.response.slice(from, from + length);
      from += length;
      const isEnd = !length && number === all.lengths.length - 1;
      if (!length && !isEnd) return "";
      const attributes = { class: `p${level(all.centinats[number])}${isEnd ? " end" : ""}`, "data-token": number, "data-text": isEnd ? "end" : text };
      return element("span", attributes, ...(isEnd ? ["∎"] : visible(text)));
    });
  }

  function legend() {
    const bounds = [1, ...SURPRISE, 0];
    const keys = SURPRISE.map((_, i) => i + 1).map((i) =>
      element("span", { class: `p${i}` }, bounds[i + 1] ? `${bounds[i + 1]} to ${bounds[i]}` : `below ${bounds[i]}`));
    return element("p", { class: "note shades" }, "Probability of a token: ", element("span", { class: "p0" }, `above ${SURPRISE[0]}`), ...keys.flatMap((key) => [" ", key]));
  }

  // The samples of the same question at the same step, side by side.
  async function group(row) {
    const same = ["run_id", "phase", "step", "example_id"].map((name) => [index.columns[name].codes, index.columns[name].codes[row]]);
    const members = [];
    for (let other = 0; other < index.rows; other++) {
      if (same.every(([codes, code]) => codes[other] === code)) members.push(other);
    }
    if (members.length < 2) return [];
    const cards = element("div", { class: "group" });
    const show = async (from, to) => cards.append(...(await Promise.all(members.slice(from, to).map((other) => card(other, other === row)))));
    await show(0, GROUP_CARDS);
    const more = element("button", { type: "button", onclick: async () => { more.remove(); await show(GROUP_CARDS); } },
      `the other ${members.length - GROUP_CARDS} samples`);
    const rewarded = members.filter((other) => value("reward", other) > 0.5).length;
    const head = element("h4", {}, `The group: ${members.length} samples, ${rewarded} with a reward above 0.5`);
    return [head, cards, ...(members.length > GROUP_CARDS ? [more] : [])];
  }

  async function card(row, isOpen) {
    const all = await rollout(row);
    const facts = [["reward", "reward"], ["advantage", "advantage"], ["num_response_tokens", "tokens"]]
      .map(([name, label]) => `${label} ${shown(value(name, row))}`).join(", ");
    const name = `sample ${value("sample_index", row)}`;
    const head = isOpen ? element("strong", {}, `${name} (above)`) : element("button", { type: "button", onclick: () => open(row) }, name);
    const text = unshaded(row, all) ? visible(all.response) : shaded(all);
    return element("section", { class: "card", "data-row": row, "aria-label": name }, element("p", {}, head, ` ${facts}`),
      element("p", {}, ...visible(shown(value("failure_kind", row) ?? value("category", row))), ", answer ",
        element("code", {}, ...visible(shown(value("extracted_answer", row))))),
      element("pre", { tabindex: "0", "aria-label": `response of ${name}` }, ...text));
  }

  // The page

  function build() {
    if (!index.rows) return root.append(element("p", {}, "There are no rollouts."));
    const several = (name) => index.columns[name].values.length > 1;
    const controls = element("div", { class: "filters", role: "search", "aria-label": "Filter rollouts" });
    for (const [name, label] of [["run_id", "run"], ["phase", "phase"], ["step", "step"], ["category", "category"], ["failure_kind", "failure kind"]]) {
      if (several(name) || name !== "run_id") controls.append(columnChoice(name, label));
    }
    controls.append(choice("reward", "reward", Object.keys(rewardKinds)));
    controls.append(element("label", { class: "search" }, element("span", {}, "search in prompts, responses, answers and ids"), search));
    controls.append(element("button", { type: "button", id: "reset", onclick: () => {
      for (const select of Object.values(filters)) select.value = "";
      search.value = "";
      refresh();
    } }, "show all"));
    const head = element("tr");
    for (const [name, label] of COLUMNS) {
      const heading = element("th", { scope: "col", class: NUMBERS.has(name) ? "number" : null },
        element("button", { type: "button", "data-sort": name, onclick: () => sortBy(name) }, label));
      headings.set(name, heading);
      head.append(heading);
    }
    body.addEventListener("click", (event) => {
      const line = event.target.closest("tr");
      if (line && !String(getSelection())) open(Number(line.dataset.row));
    });
    body.addEventListener("keydown", keys);
    const table = element("table", { class: "list" }, element("thead", {}, head), body);
    root.append(controls, element("div", { class: "pager" }, status, ...Object.values(pager)),
      element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "list of rollouts" }, table), detail);
    refresh();
  }

  build();
})();

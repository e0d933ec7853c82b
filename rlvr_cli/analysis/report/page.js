// The rollout browser. Text that a model wrote is only ever put into text nodes: nothing here parses markup.
//
// A source answers what the list and the open rollout ask: of a report, from the blocks in the page (`embedded`), or of a
// running `rlvr view`, from its server (`remote`). A row is an object with the columns of the list and its `key`. A group is
// {rows, samples, right}: its rows, or the first of them and the open one; how many there are; how many of these were rewarded.
"use strict";
(() => {
  const PAGE_ROWS = 25;
  const MOST_OF_NAME = 16; // characters of a run's name in the list
  const GROUP_CARDS = 16; // samples of a group shown, besides the open one, before "the other ... samples" is clicked
  const KEPT_BLOCKS = 24; // unpacked blocks kept in memory, of each kind
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/u; // characters that `text.printable` escapes, plus newline and tab
  const LONG_TURN = 400; // characters of what an environment said that are shown unfolded
  const SURPRISE = [0.9, 0.5, 0.2, 0.05, 0.01]; // probabilities below which a token is shaded one level darker
  const GROUP = ["run_id", "phase", "step", "example_id"]; // what the samples of a question at one step share
  const FACETS = [["run_id", "run"], ["phase", "phase"], ["step", "step"], ["category", "category"], ["failure_kind", "failure kind"]];
  const REWARDS = {
    "above 0.5": (reward) => reward > 0.5,
    "0.5 or less": (reward) => reward !== null && !(reward > 0.5),
    "none: the grade failed": (reward) => reward === null,
  };

  const root = document.getElementById("browser");
  if (!root) return;

  const outcome = (row) => row.failure_kind ?? row.category;
  const keyOf = (row) => JSON.stringify([...GROUP, "sample_index"].map((name) => row[name]));

  function compare(a, b) {
    if (a === b) return 0;
    if (a === null || b === null) return a === null ? 1 : -1;
    return a < b ? -1 : 1;
  }

  // The rollouts of a report. The block `rollout-index` has the columns for filtering, sorting and listing, each as
  // {codes, values}. The other columns are in compressed blocks, `texts-N` and `tokens-N`, which are unpacked when one of
  // their rollouts is shown or searched.
  function embedded(index) {
    const value = (name, row) => index.columns[name].values[index.columns[name].codes[row]];

    function listed(row) {
      const made = { row };
      for (const name in index.columns) made[name] = value(name, row);
      made.key = keyOf(made);
      return made;
    }

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

    async function whole(row) {
      const number = blockOf(row), i = row - index.starts[number];
      const [texts, tokens] = await Promise.all([block("texts", number), block("tokens", number)]);
      const all = { ...listed(row), centinats: tokens.centinats[i], lengths: tokens.lengths[i] };
      for (const name in texts) all[name] = name === "prompt" ? texts.prompt.values[texts.prompt.codes[i]] : texts[name][i];
      return all;
    }

    // The rows in which these columns have these values.
    function matching(wanted) {
      const codes = Object.entries(wanted).map(([name, data]) => [index.columns[name].codes, index.columns[name].values.indexOf(data)]);
      const rows = [];
      for (let row = 0; row < index.rows; row++) if (codes.every(([column, code]) => column[row] === code)) rows.push(row);
      return rows;
    }

    // The rows whose texts contain the words. Yields to the browser after each block; null if another list is wanted.
    async function searched(rows, words, { say, isCurrent }) {
      const needle = words.toLowerCase(), found = [];
      const holds = (text) => text !== null && text.toLowerCase().includes(needle);
      let texts = null, number = -1, prompts = [];
      for (const [place, row] of rows.entries()) {
        if (blockOf(row) !== number) {
          number = blockOf(row);
          texts = await block("texts", number);
          if (!isCurrent()) return null;
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

    function sorted(rows, { name, down }) {
      const of = name === "outcome" ? (row) => value("failure_kind", row) ?? value("category", row) : (row) => value(name, row);
      return rows.sort((a, b) => {
        if (name === null) return a - b;
        const x = of(a), y = of(b);
        const missing = x === null || y === null; // missing values come last in both directions
        return (down && !missing ? -compare(x, y) : compare(x, y)) || a - b;
      });
    }

    let found = [], asked = ""; // the rows of the last filters and search

    return {
      place: "in this page",
      unshaded: "Not shaded: the tokenizer was not available when this page was made.",
      facets: async () => Object.fromEntries(FACETS.map(([name]) => [name, [...index.columns[name].values].sort(compare)])),
      async list({ filters, reward, words, order, first }, request) {
        const asks = JSON.stringify([filters, reward, words]);
        if (asks !== asked) {
          let rows = matching(filters);
          if (reward) rows = rows.filter((row) => REWARDS[reward](value("reward", row)));
          if (words) rows = await searched(rows, words, request);
          if (rows === null) return null;
          [found, asked] = [rows, asks];
        }
        sorted(found, order);
        return { rows: found.slice(first, first + PAGE_ROWS).map(listed), found: found.length, total: index.rows };
      },
      async group(row) {
        const rows = await Promise.all(matching(Object.fromEntries(GROUP.map((name) => [name, row[name]]))).map(whole));
        return { rows, samples: rows.length, right: rows.filter((other) => other.reward > 0.5).length };
      },
      async places(row) {
        const places = new Map();
        for (const other of matching({ example_id: row.example_id }).map(listed)) {
          const key = JSON.stringify([other.run_id, other.phase, other.step]);
          if (!places.has(key)) places.set(key, { ...other, samples: 0, right: 0 });
          places.get(key).samples += 1;
          places.get(key).right += other.reward > 0.5;
        }
        return [...places.values()];
      },
      tokenizers: index.tokenizers,
    };
  }

  // The rollouts that a server has: it filters, sorts and pages.
  function remote({ runs }) {
    async function ask(what, parameters, stopped = null) {
      const query = new URLSearchParams(runs.map((run) => ["run", run]));
      for (const [name, data] of Object.entries(parameters)) query.set(name, data);
      const late = AbortSignal.timeout(60000);
      const signal = (stopped && AbortSignal.any?.([late, stopped])) ?? late;
      const answer = await fetch(`${what}?${query}`, { cache: "no-store", signal });
      const body = await answer.json().catch((error) => {
        if (answer.ok) throw error; // it was cut off
        return {};
      });
      if (!answer.ok) throw Object.assign(new Error(body.error ?? `The server answered ${answer.status}.`), { status: answer.status });
      return body;
    }
    const keyed = (row) => ({ ...row, key: keyOf(row) });
    const columns = (row) => Object.fromEntries([...GROUP, "sample_index"].map((name) => [name, JSON.stringify(row[name])]));
    return {
      place: "in all",
      unshaded: "Not shaded: the tokenizer is not available.",
      facets: () => ask("facets", {}),
      async list({ filters, reward, words, order, first }, { stopped }) {
        const wanted = Object.fromEntries(Object.entries(filters).map(([name, data]) => [name, JSON.stringify(data)]));
        const sort = order.name === null ? {} : { sort: order.name, down: Number(order.down) };
        const answer = await ask("rollouts", { ...wanted, ...(reward && { reward }), ...(words && { words }), ...sort, first }, stopped);
        return { ...answer, rows: answer.rows.map(keyed) };
      },
      async group(row) {
        const answer = await ask("group", columns(row));
        return { ...answer, rows: answer.rows.map(keyed) };
      },
      places: async (row) => (await ask("places", { example_id: JSON.stringify(row.example_id) })).places,
      tokenizers: null,
    };
  }

  // Elements

  // A child may be an array of children: as arguments, those of a long text would be too many.
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, setting] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), setting);
      else if (setting !== null) made.setAttribute(key, setting);
    }
    append(made, children);
    return made;
  }

  function append(made, children) {
    for (const child of children.flat(Infinity)) made.append(child);
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

  // The same as a text, for an attribute.
  function spelled(text) {
    return visible(text).map((part) => part.textContent ?? part).join("");
  }

  function shown(data) {
    if (data === null || data === undefined) return "–";
    return typeof data === "number" && !Number.isInteger(data) ? String(Number(data.toPrecision(4))) : String(data);
  }

  // Filters

  const filters = {};
  const unoffered = element("p", { class: "note", role: "status" });

  function choice(name, label) {
    const select = element("select", { id: `filter-${name}`, onchange: () => refresh() });
    filters[name] = select;
    return element("label", {}, element("span", {}, label), select);
  }

  // Offer these values and "all". The options that stay are not touched: somebody may be choosing one.
  function offer(name, values) {
    const select = filters[name], wanted = ["", ...values.map((data) => JSON.stringify(data))];
    for (const option of [...select.options]) if (!wanted.includes(option.value)) option.remove();
    wanted.forEach((value, i) => {
      if (select.options[i]?.value === value) return;
      const made = element("option", { value }, i ? visible(shown(values[i - 1])) : "all");
      select.insertBefore(made, select.options[i] ?? null);
    });
  }

  // Name of a run -> what the list shows of it: if it is long, without what all names begin and end with, then cut in the middle.
  function brief(names) {
    const whole = names.map((name) => [...String(name)]);
    const alike = (parts) => {
      let count = 0;
      while (parts.every((part) => count < part.length && part[count] === parts[0][count])) count += 1;
      while (count && !"-_.".includes(parts[0][count - 1])) count -= 1; // at the end of a word
      return count;
    };
    const cut = (text) => (text.length <= MOST_OF_NAME ? text : [...text.slice(0, MOST_OF_NAME / 2 - 1), "…", ...text.slice(-MOST_OF_NAME / 2)]);
    const isLong = (parts) => parts.length > 1 && parts.some((part) => part.length > MOST_OF_NAME);
    const start = isLong(whole) ? alike(whole) : 0;
    const rest = whole.map((name) => name.slice(start));
    const end = isLong(rest) ? alike(rest.map((name) => [...name].reverse())) : 0;
    const short = rest.map((name) => cut([...(start ? "…" : ""), ...name.slice(0, name.length - end), ...(end ? "…" : "")]).join(""));
    return new Map(names.map((name, i) => [name, new Set(short).size === names.length ? short[i] : name]));
  }

  // There is one request at a time, as for the list.
  let offered = "", briefs = new Map(), requested = null, upcoming = null;
  function offerFacets() {
    return upcoming ??= offerFacetsNow();
  }

  async function offerFacetsNow() {
    await requested?.catch(() => {});
    upcoming = null;
    const facets = await (requested = source.facets());
    if (JSON.stringify(facets) === offered) return;
    offered = JSON.stringify(facets);
    const before = JSON.stringify(asked());
    for (const [name] of FACETS) offer(name, facets[name]);
    if (JSON.stringify(asked()) !== before) first = 0; // a value is gone that was chosen
    briefs = brief(facets.run_id);
    listed = "";
    filters.run_id.parentNode.hidden = facets.run_id.length < 2;
    listing.classList.toggle("one-run", facets.run_id.length < 2);
    listing.classList.toggle("one-phase", facets.phase.length < 2);
  }

  // The list

  const COLUMNS = [ // name, heading, text of a cell
    ["example_id", "question", (row) => row.question || row.example_id], ["extracted_answer", "answer"], ["ground_truth", "truth"],
    ["reward", "reward"], ["run_id", "run", (row) => briefs.get(row.run_id) ?? row.run_id], ["phase", "phase"], ["step", "step"], ["sample_index", "sample"],
    ["advantage", "advantage"], ["outcome", "outcome", outcome], ["num_response_tokens", "tokens"],
  ];
  const NUMBERS = new Set(["sample_index", "step", "reward", "advantage", "num_response_tokens"]);

  let page = [], found = 0, total = 0, first = 0;
  let opened = null, unfolded = null, beside = null; // the row that was chosen last, and the one whose rollout is shown
  let scope = "", seen = null; // what the list is of; the open rollout's last place in such a list: {key, scope, place, found}
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

  // Whether another list is on its way: what is shown is of the one before. A server that takes long over another question is waited for.
  let asking = 0, answered = "";
  function markBusy(whether) {
    listing.setAttribute("aria-busy", String(whether));
    clearTimeout(asking);
    const wait = () => JSON.stringify(asked()) !== answered && say("Asking …");
    if (whether && source.place === "in all") asking = setTimeout(wait, 300);
  }

  // What could not be had is asked for again when the server's page comes next (`live.js`), but not what is refused or took too long.
  function retry({ status }) {
    if (![400, 504].includes(status)) delete document.documentElement.dataset.committed;
  }

  let timer = 0;
  function later() {
    clearTimeout(timer);
    markBusy(true);
    timer = setTimeout(list, 250);
  }

  async function refresh() {
    first = 0;
    return list();
  }

  function asked() {
    const chosen = Object.entries(filters).filter(([, select]) => select.value).map(([name, select]) => [name, JSON.parse(select.value)]);
    const { reward = "", ...wanted } = Object.fromEntries(chosen);
    return { filters: wanted, reward, words: search.value, order, first };
  }

  // Whether the list could be had, or the newer one that was asked for meanwhile: a move between rollouts goes on with that.
  // There is one request at a time. Of what is asked for until it is answered, the last is the next request; another question ends it.
  let request = null, newer = null, asker = null;
  function list() {
    if (timer) first = 0; // the words are others now
    clearTimeout(timer);
    timer = 0;
    markBusy(true);
    if (asker && asker.question !== JSON.stringify(asked())) asker.abort();
    return newer ??= listNow();
  }

  async function listNow() {
    await request?.catch(() => {});
    newer = null;
    const wanted = asked(), question = JSON.stringify(wanted);
    const isCurrent = () => !newer || JSON.stringify(asked()) === question;
    const own = asker = Object.assign(new AbortController(), { question });
    try {
      request = source.list(wanted, { say, isCurrent, stopped: own.signal });
      const answer = await request;
      if (!isCurrent()) return newer;
      ({ rows: page, found, total } = answer);
      scope = JSON.stringify({ ...wanted, first: null });
      answered = question;
    } catch (error) {
      if (!isCurrent() || own.signal.aborted) return newer;
      answered = "";
      retry(error);
      say(error.message);
      return false;
    } finally {
      markBusy(Boolean(newer || timer));
    }
    show();
    return true;
  }

  function sortBy(name) {
    if (order.name !== name) order = { name, down: NUMBERS.has(name) };
    else if (order.down === NUMBERS.has(name)) order = { name, down: !order.down };
    else order = { name: null, down: false };
    for (const [key, heading] of headings) {
      heading.setAttribute("aria-sort", key !== order.name ? "none" : order.down ? "descending" : "ascending");
    }
    return refresh();
  }

  function turn(where) {
    const last = Math.max(0, Math.ceil(found / PAGE_ROWS) - 1) * PAGE_ROWS;
    first = { first: 0, previous: Math.max(0, first - PAGE_ROWS), next: Math.min(last, first + PAGE_ROWS), last }[where];
    return list();
  }

  let listed = "";
  function show() {
    if (JSON.stringify(page) !== listed) fill(); // a list that stays keeps the focus, and the click that has begun
    listed = JSON.stringify(page);
    offerMoves();
    pager.first.disabled = pager.previous.disabled = first === 0;
    pager.next.disabled = pager.last.disabled = first + PAGE_ROWS >= found;
    if (!total) return say("There are no rollouts.");
    const range = page.length ? `${(first + 1).toLocaleString("en")} to ${(first + page.length).toLocaleString("en")} of ` : "";
    say(`${range}${found.toLocaleString("en")} rollouts${found === total ? "" : ` (of ${total.toLocaleString("en")} ${source.place})`}`);
  }

  function fill() {
    const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.key : null;
    body.replaceChildren(...page.map((row) => {
      const cells = COLUMNS.map(([name, , text = (r) => r[name]], i) => {
        const content = visible(shown(text(row)));
        const inside = i ? element("span", { class: "clip" }, content) : element("button", { type: "button", class: "open clip" }, content);
        const title = name === "run_id" ? spelled(shown(row.run_id)) : null;
        return element("td", { class: `col-${name}${NUMBERS.has(name) ? " number" : ""}`, title }, inside);
      });
      const kind = row.reward === null ? "ungraded" : row.reward > 0.5 ? "right" : "wrong";
      return element("tr", { class: kind, "data-key": row.key, "aria-current": row.key === opened?.key ? "true" : null }, cells);
    }));
    if (focused) [...body.children].find((line) => line.dataset.key === focused)?.querySelector("button").focus();
  }

  function keys(event) {
    const line = event.target.closest("tr");
    const next = { ArrowDown: line?.nextElementSibling, ArrowUp: line?.previousElementSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    next.querySelector("button").focus();
  }

  // One rollout

  function mark(row) {
    opened = row;
    for (const line of body.children) {
      if (line.dataset.key === row?.key) line.setAttribute("aria-current", "true");
      else line.removeAttribute("aria-current");
    }
  }

  async function open(row) {
    mark(row);
    let ours, places;
    try {
      [ours, places] = await Promise.all([source.group(row), source.places(row)]);
    } catch (error) {
      return opened === row && stay(`${row.example_id} · sample ${row.sample_index} could not be opened: ${error.message}`);
    }
    if (opened !== row) return;
    unfolded = row;
    beside = null;
    const all = ours.rows.find((member) => member.key === row.key);
    const title = element("h3", { tabindex: "-1" }, visible(row.example_id), ` · sample ${row.sample_index}`);
    const facts = {
      run: row.run_id, phase: row.phase, step: row.step, category: row.category,
      "failure kind": row.failure_kind, reward: row.reward, "format reward": all.format_reward,
      "answer reward": all.answer_reward, advantage: row.advantage, "ground truth": all.ground_truth,
      "extracted answer": all.extracted_answer, grader: all.grader, "grade error": all.grade_error,
      "what it says": all.grade_error_detail, finish: all.finish_reason,
      "stopped by": all.stop_reason, tokens: row.num_response_tokens, "mean log-probability": all.mean_logprob,
      "mean entropy": all.mean_entropy, "policy version": all.policy_version, seed: all.seed, "sampled at": all.sampled_at,
      ...(all.judgement && {
        judge: all.judgement.model, "judge's score": all.judgement.score ?? "none", "judge's tokens": judgedTokens(all.judgement),
      }),
      ...(all.episode && {
        "tokens with the environment's": all.episode.tokens, "episode ended by": all.episode.ended_by, "tool calls": all.episode.tool_calls, "failed calls": all.episode.tool_errors,
        "forged answers": all.episode.forged, "environment's seconds": all.episode.environment_seconds,
        ...Object.fromEntries(all.episode.measured.map(([name, value]) => [`measured ${spelled(name)}`, value])),
      }),
    };
    const entries = Object.entries(facts).filter(([name, data]) => data !== null || name === "extracted answer" || name === "reward")
      .map(([name, data]) => element("div", {}, element("dt", {}, name), element("dd", {}, visible(shown(data)))));
    const samples = element("div", { id: "samples" });
    detail.dataset.key = row.key;
    detail.replaceChildren(title, moves(), element("h4", {}, "Prompt"),
      element("pre", { class: "prompt", tabindex: "0", "aria-label": "prompt" }, visible(all.prompt)),
      element("h4", {}, "Response"), ...response(all), ...judged(all), element("dl", { class: "facts" }, entries),
      ...elsewhere(row, ours, places, samples), samples);
    group(ours, samples);
    title.focus({ preventScroll: true });
    reveal();
  }

  function reveal() {
    layout.classList.add("open");
    detail.scrollTop = 0;
    if (getComputedStyle(layout).gridTemplateColumns.split(" ").length < 2) detail.scrollIntoView({ block: "start" });
  }

  // The rollout that is shown is the open one again, below the reason why another is not.
  function stay(reason) {
    const alert = element("p", { class: "note", role: "alert" }, visible(reason));
    mark(unfolded);
    if (unfolded) {
      offerMoves();
      detail.querySelector("[role=alert]")?.remove();
      detail.prepend(alert);
    } else detail.replaceChildren(alert, element("p", { class: "moves" }, close));
    reveal();
  }

  const moving = [["‹ previous", -1], ["next ›", 1]].map(([label, by]) =>
    ({ by, button: element("button", { type: "button", onclick: () => go(by) }, label) }));

  const close = element("button", { type: "button", id: "close", onclick: () => shut() }, "close");

  const astray = element("span", { class: "note", role: "status" });

  function moves() {
    offerMoves();
    return element("p", { class: "moves" }, moving.map(({ button }) => button), close, astray, element("a", { href: "#rollouts" }, "back to the list"));
  }

  // The place of the open rollout in the page of the list; -1 if it is not there.
  function placeOfOpen() {
    return page.findIndex((row) => row.key === opened?.key);
  }

  function offerMoves() {
    const place = placeOfOpen();
    if (place >= 0) seen = { key: opened.key, scope, place: first + place, found };
    else if (seen?.key !== opened?.key || seen?.scope !== scope) seen = null;
    const places = seen ? [seen.place, seen.place + found - seen.found] : []; // what came since is behind it or before it
    for (const { by, button } of moving) button.disabled = !places.some((now) => now + by >= 0 && now + by < found);
    astray.textContent = seen ? "" : "The list has changed: this rollout has another place in it, or none.";
  }

  // Whether the page of the list that has the open rollout is shown: with what came since before it, as the newest is, or behind it.
  async function reach() {
    for (const share of [1, 1, 0]) { // twice, as more may have come with the first answer
      if (placeOfOpen() >= 0) return true;
      if (!seen) return false;
      const place = seen.place + share * (found - seen.found);
      first = place - (place % PAGE_ROWS);
      if (!(await list())) return false;
    }
    if (placeOfOpen() >= 0) return true;
    seen = null;
    offerMoves();
    return false;
  }

  async function go(by) {
    if (!(await reach())) return;
    let place = placeOfOpen() + by;
    if (first + place < 0 || first + place >= found) return offerMoves();
    if (place < 0 || place >= page.length) {
      const before = found;
      if (!(await turn(by < 0 ? "previous" : "next"))) return;
      if (found !== before) return go(by); // what has come moved the pages
      place = by < 0 ? page.length - 1 : 0;
    }
    if (page[place]) await open(page[place]);
  }

  function shut() {
    const line = [...body.children].find((other) => other.dataset.key === opened?.key);
    opened = unfolded = null;
    detail.replaceChildren();
    layout.classList.remove("open");
    line?.removeAttribute("aria-current");
    line?.querySelector("button").focus();
  }

  function response(all) {
    const why = unshaded(all);
    if (why) return [written(all, "response"), element("p", { class: "note" }, why)];
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
    const text = written(all, "response, shaded by probability", {
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
    });
    const tokens = [...text.querySelectorAll("[data-token]")];
    return [text, readout, legend()];
  }

  // What a judge said about the response, whole.
  function judged({ judgement }) {
    if (!judgement) return [];
    return [element("h4", {}, "Judge's reply"), element("pre", { class: "judgement", tabindex: "0", "aria-label": "judge's reply" }, visible(judgement.reply))];
  }

  function judgedTokens({ prompt_tokens: asked, reply_tokens: replied, cached }) {
    return `${asked} asked, ${replied} in the reply${cached ? "; known, not asked again" : ""}`;
  }

  // The text of a response: of one turn, or turn by turn as a conversation.
  function written(all, label, handlers = {}) {
    const parts = pieces(all);
    if (!all.turns) return element("pre", { class: "response", tabindex: "0", "aria-label": label, ...handlers }, parts[0].nodes);
    const roles = [...new Set(["policy", ...all.turns.map((turn) => turn.role)])];
    const blocks = parts.map(({ turn, text, nodes }, number) => {
      const facts = [`turn ${number + 1}`, `${turn.tokens.toLocaleString("en")} token${turn.tokens === 1 ? "" : "s"}`];
      if (turn.reward !== null) facts.push(`reward ${shown(turn.reward)}`);
      const head = [element("strong", {}, visible(turn.role)), ` ${facts.join(", ")}`,
        turn.marks.map((mark) => [" ", element("span", { class: "mark" }, mark)])];
      const look = { class: `turn c${roles.indexOf(turn.role) % 7}`, "data-role": turn.role };
      const body = element("pre", { tabindex: "0", "aria-label": `turn ${number + 1}, ${spelled(turn.role)}` }, nodes);
      if (turn.role === "policy" || text.length <= LONG_TURN) return element("section", look, element("p", {}, head), body);
      return element("details", look, element("summary", {}, head), body);
    });
    return element("div", { class: "conversation", role: "group", "aria-label": label, ...handlers }, blocks);
  }

  // Each turn of a response with its text and the nodes that show it: tokens where their probabilities are known. What an environment
  // said has none.
  function pieces(all, spans = unshaded(all) ? null : shaded(all)) {
    if (!all.turns) return [{ turn: null, text: all.response, nodes: spans ?? visible(all.response) }];
    let from = 0, token = 0;
    return all.turns.map((turn) => {
      const text = all.response.slice(from, from + turn.length);
      const nodes = spans && turn.role === "policy" ? spans.slice(token, token + turn.tokens) : visible(text);
      from += turn.length;
      token += turn.tokens;
      return { turn, text, nodes };
    });
  }

  function unshaded(all) {
    if (!all.centinats.length) return "Not shaded: the engine returned no log-probabilities.";
    if (all.lengths) return "";
    if (!(all.has_tokenizer ?? source.tokenizers.includes(all.run_id))) return source.unshaded;
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
      return element("span", attributes, isEnd ? "∎" : visible(text));
    });
  }

  function legend() {
    const bounds = [1, ...SURPRISE, 0];
    const keys = SURPRISE.map((_, i) => i + 1).map((i) =>
      element("span", { class: `p${i}` }, bounds[i + 1] ? `${bounds[i + 1]} to ${bounds[i]}` : `below ${bounds[i]}`));
    return element("p", { class: "note shades" }, "Probability of a token: ", element("span", { class: "p0" }, `above ${SURPRISE[0]}`), keys.map((key) => [" ", key]));
  }

  // The same question at other steps and in other runs: one button each, which puts its samples beside those of this step.
  function elsewhere(row, ours, places, samples) {
    if (places.length < 2) return [];
    const lines = new Map(); // run and phase -> its buttons
    for (const place of places) {
      const isHere = GROUP.every((name) => place[name] === undefined || place[name] === row[name]);
      const name = `${place.run_id}, ${place.phase}`;
      if (!lines.has(name)) lines.set(name, []);
      const share = element("span", { class: place.right ? "right" : "wrong" }, `${place.right}/${place.samples}`);
      lines.get(name).push(element("button", {
        type: "button", class: "place", "aria-pressed": String(isHere), "data-place": `${place.run_id} ${place.phase} ${place.step}`,
        onclick: async (event) => {
          for (const button of event.currentTarget.closest(".places").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
          event.currentTarget.setAttribute("aria-pressed", "true");
          beside = place;
          if (isHere) return group(ours, samples);
          try {
            const theirs = await source.group({ sample_index: row.sample_index, ...place, example_id: row.example_id });
            if (opened === row && beside === place) pairs(ours, theirs, samples);
          } catch (error) {
            samples.replaceChildren(element("p", { class: "note" }, error.message));
          }
        },
      }, `${place.step} `, share));
    }
    const list = [...lines].map(([name, buttons]) => element("div", {}, element("dt", {}, visible(name)), element("dd", {}, buttons)));
    return [element("h4", {}, "The same question: step, and rewarded of all samples"), element("dl", { class: "places" }, list)];
  }

  // The samples of this question at this step.
  function group(ours, samples) {
    samples.replaceChildren();
    if (ours.samples > 1) samples.append(element("h4", {}, `The group: ${counted(ours)}`), ...cards([ours], []));
  }

  // Two groups side by side, sample by sample.
  function pairs(ours, theirs, samples) {
    const heading = (of) => element("h4", {}, visible(`${of.rows[0].run_id}, ${of.rows[0].phase}, step ${of.rows[0].step}: ${counted(of)}`));
    samples.replaceChildren(...cards([ours, theirs], [heading(ours), heading(theirs)]));
  }

  function counted({ samples, right }) {
    return `${samples} sample${samples === 1 ? "" : "s"}, ${right} with a reward above 0.5`;
  }

  // The cards of some groups, beside each other below their headings: at first those of the first samples and of the open one.
  function cards(groups, headings) {
    const cell = (row) => (row ? card(row, row.key === opened.key) : element("span"));
    const every = [...Array(Math.max(...groups.map(({ rows }) => rows.length))).keys()];
    const some = every.filter((i) => i < GROUP_CARDS || groups[0].rows[i]?.key === opened.key);
    const shown = element("div", { class: groups.length > 1 ? "group pairs" : "group" });
    shading.disconnect(); // from the cards of before
    const show = (which) => shown.replaceChildren(...headings, ...which.flatMap((i) => groups.map(({ rows }) => cell(rows[i]))));
    show(some);
    const others = every.length - some.length;
    const more = element("button", { type: "button", onclick: () => { more.remove(); show(every); } },
      `the other ${others} sample${others === 1 ? "" : "s"}`);
    const missing = Math.max(...groups.map(({ rows, samples }) => samples - rows.length));
    const note = element("p", { class: "note" }, `${missing} more sample${missing === 1 ? " is" : "s are"} in the list alone.`);
    return [shown, ...(others ? [more] : []), ...(missing ? [note] : [])];
  }

  // Shading takes most of the time: that of a card waits until the card is seen.
  const shading = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter(({ isIntersecting }) => isIntersecting)) {
      shading.unobserve(target);
      target.dispatchEvent(new Event("seen"));
    }
  });

  function card(row, isOpen) {
    const facts = [["reward", "reward"], ["advantage", "advantage"], ["num_response_tokens", "tokens"]]
      .map(([name, label]) => `${label} ${shown(row[name])}`).join(", ");
    const name = `sample ${row.sample_index}`;
    const head = isOpen ? element("strong", {}, `${name} (above)`) : element("button", { type: "button", onclick: () => open(row) }, name);
    const content = (spans) => pieces(row, spans).map(({ turn, nodes }) =>
      (turn && turn.role !== "policy" ? element("span", { class: "said", title: spelled(turn.role) }, nodes) : nodes));
    const shade = () => {
      text.replaceChildren();
      append(text, content());
    };
    const text = element("pre", { tabindex: "0", "aria-label": `response of ${name}`, onseen: shade }, content(null));
    if (!unshaded(row)) shading.observe(text);
    return element("section", { class: "card", "aria-label": name }, element("p", {}, head, ` ${facts}`),
      element("p", {}, visible(shown(outcome(row))), ", answer ", element("code", {}, visible(shown(row.extracted_answer)))), text);
  }

  // The page

  const listing = element("div", { class: "listing" });
  const layout = element("div", { class: "layout" }, listing, detail);

  async function build() {
    const controls = element("div", { class: "filters", role: "search", "aria-label": "Filter rollouts" });
    for (const [name, label] of FACETS) controls.append(choice(name, label));
    controls.append(choice("reward", "reward"));
    offer("reward", Object.keys(REWARDS));
    controls.append(element("label", { class: "search" }, element("span", {}, "search in prompts, responses, answers and ids"), search));
    controls.append(element("button", { type: "button", id: "reset", onclick: () => {
      for (const select of Object.values(filters)) select.value = "";
      search.value = "";
      refresh();
    } }, "show all"));
    const head = element("tr");
    for (const [name, label] of COLUMNS) {
      const heading = element("th", { scope: "col", class: `col-${name}${NUMBERS.has(name) ? " number" : ""}` },
        element("button", { type: "button", "data-sort": name, onclick: () => sortBy(name) }, label));
      headings.set(name, heading);
      head.append(heading);
    }
    body.addEventListener("click", (event) => {
      const line = event.target.closest("tr"), selection = getSelection();
      if (!line) return;
      const isSelecting = !event.target.closest("button") && !selection.isCollapsed && selection.containsNode(line, true);
      if (!isSelecting) open(page.find((row) => row.key === line.dataset.key));
    });
    body.addEventListener("keydown", keys);
    const table = element("table", { class: "list" }, element("thead", {}, head), body);
    listing.append(element("div", { class: "pager" }, status, Object.values(pager)), table);
    root.append(controls, unoffered, layout);
    await update();
  }

  // Show what is there now: at the start, and when a server has more. The open rollout stays.
  async function update() {
    try {
      await offerFacets();
      unoffered.textContent = "";
    } catch (error) {
      retry(error);
      unoffered.textContent = `These choices are missing or out of date: ${error.message}`;
    }
    await list();
  }

  const block = document.getElementById("rollout-index");
  const source = block ? embedded(JSON.parse(block.textContent)) : remote(JSON.parse(document.getElementById("rollout-source").textContent));
  document.addEventListener("rlvr-changed", update);
  build();
})();

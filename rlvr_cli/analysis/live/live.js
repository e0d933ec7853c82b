// What makes a page of `rlvr view` live: it asks for itself again every few seconds, and replaces the sections that changed.
// XMLHttpRequest parses the answer into a document in which nothing runs, so that no text becomes markup here.
(() => {
  const EVERY = 3000; // milliseconds
  const KEPT = { input: "checked", details: "open", div: "scrollLeft" }; // what a section that is replaced keeps, besides the focus
  const liveness = () => document.getElementById("liveness");
  if (!liveness()) return;
  let state = `"${document.documentElement.dataset.state}"`;
  const address = () => location.href.split("#")[0];
  const sections = (of) => [...of.querySelectorAll("section[id]:not(#rollouts), nav[id]")];
  const shown = new Map(sections(document).map((section) => [section.id, section.innerHTML])); // as the server sent them

  function ages() {
    for (const time of document.querySelectorAll("time[datetime]")) {
      const seconds = Math.max(0, (Date.now() - new Date(time.dateTime)) / 1000);
      const [unit, length] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, size]) => seconds >= size) ?? ["s", 1];
      const text = `${Math.floor(seconds / length)} ${unit} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  }

  function ask() {
    return new Promise((resolve) => {
      const request = new XMLHttpRequest();
      request.responseType = "document";
      request.timeout = 60000;
      request.onloadend = () => resolve(request);
      request.open("GET", address());
      if (state && document.documentElement.dataset.committed) request.setRequestHeader("If-None-Match", state); // or else a list failed
      request.send();
    });
  }

  // Name -> element, for what a reader can focus, unfold, choose or scroll in a section. Equal ones are numbered.
  function named(section) {
    const found = new Map(), counts = new Map();
    for (const one of section.querySelectorAll("a, input, details, summary, .wide")) {
      const folded = one.closest("details");
      const texts = folded && [...folded.querySelectorAll(":scope > summary, :scope > pre")].map((part) => part.textContent);
      const name = JSON.stringify([one.localName, one.getAttribute("href") ?? one.value ?? one.getAttribute("aria-label"), texts]);
      counts.set(name, (counts.get(name) ?? 0) + 1);
      found.set(`${name} ${counts.get(name)}`, one);
    }
    return found;
  }

  function replace(fresh) {
    for (const section of sections(fresh)) {
      const old = document.getElementById(section.id);
      if (!old || shown.get(section.id) === section.innerHTML) continue;
      shown.set(section.id, section.innerHTML);
      const before = new Map([...named(old)].map(([name, one]) =>
        [name, { value: one[KEPT[one.localName]], isFocused: one === document.activeElement }]));
      old.replaceChildren(...document.importNode(section, true).childNodes);
      for (const [name, one] of named(old)) {
        const was = before.get(name);
        if (was?.value !== undefined) one[KEPT[one.localName]] = was.value;
        if (was?.isFocused) one.focus({ preventScroll: true });
      }
    }
    ages();
    const { committed } = fresh.documentElement.dataset;
    if (document.documentElement.dataset.committed === committed) return;
    document.documentElement.dataset.committed = committed;
    document.dispatchEvent(new Event("rlvr-changed"));
  }

  // What the server's page says that is wrong.
  function problemOf({ response, status }) {
    const parts = [...(response?.querySelectorAll("#problem p") ?? [])];
    return parts.map((part) => part.textContent).join(" ") || `The server answered ${status}.`;
  }

  async function look() {
    const asked = address(), request = await ask();
    if (asked !== address()) return; // the list has another order now
    if (request.status === 200 && request.response) {
      state = request.getResponseHeader("ETag");
      replace(request.response);
    }
    const lost = { 0: "The server does not answer.", 403: "The server has another token now: open the address that it printed." };
    const text = lost[request.status] ?? (request.status >= 400 ? problemOf(request) : "");
    if (liveness().textContent !== text) liveness().textContent = text;
  }

  async function poll() {
    if (!document.hidden) await look();
    setTimeout(poll, EVERY);
  }

  // Another order of the list, in which the chosen runs stay chosen.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("#orders a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.replaceState(null, "", link.href);
    state = "";
    look();
  });

  ages();
  setTimeout(poll, EVERY);
  setInterval(ages, 10000);
})();

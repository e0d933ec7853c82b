// What makes a page of `rlvr view` live: it asks for itself again every few seconds, and replaces the sections that changed.
// XMLHttpRequest parses the answer into a document in which nothing runs, so that no text becomes markup here.
(() => {
  const EVERY = 3000; // milliseconds
  const liveness = () => document.getElementById("liveness");
  if (!liveness()) return;
  let state = `"${document.documentElement.dataset.state}"`;
  const sections = (of) => [...of.querySelectorAll("section[id]:not(#rollouts)")];
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
      request.open("GET", location.href.split("#")[0]);
      request.setRequestHeader("If-None-Match", state);
      request.send();
    });
  }

  function replace(fresh) {
    const chosen = new Set([...document.querySelectorAll(".runs :checked")].map((box) => box.value));
    const unfolded = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    for (const section of sections(fresh)) {
      const old = document.getElementById(section.id);
      if (!old || shown.get(section.id) === section.innerHTML) continue;
      shown.set(section.id, section.innerHTML);
      const made = document.importNode(section, true);
      for (const box of made.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
      for (const summary of made.querySelectorAll("details > summary")) summary.parentNode.open = unfolded.has(summary.textContent);
      old.replaceChildren(...made.childNodes);
    }
    ages();
    document.dispatchEvent(new Event("rlvr-changed"));
  }

  async function poll() {
    if (!document.hidden) {
      const request = await ask();
      if (request.status === 200 && request.response) {
        state = request.getResponseHeader("ETag");
        replace(request.response);
      }
      const lost = { 0: "The server does not answer.", 403: "The server has another token now: open the address that it printed." };
      const text = lost[request.status] ?? (request.status >= 400 ? `The server answered ${request.status}.` : "");
      if (liveness().textContent !== text) liveness().textContent = text;
    }
    setTimeout(poll, EVERY);
  }

  ages();
  setTimeout(poll, EVERY);
  setInterval(ages, 10000);
})();

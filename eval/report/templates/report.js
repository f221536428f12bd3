(() => {
  "use strict";

  const button = (text, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", act);
    return made;
  };

  /* Tables: a button in the head of every column sorts by it: numbers from the largest, words from A, then the other way
     round, then as they came. What is not measured stays last. */
  const figure = (text) => {
    const found = text.replaceAll(",", "").match(/^(?:best: )?([-+]?\d+(?:\.\d+)?)/);
    return found ? Number(found[1]) : null;
  };
  const sortable = (table) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const sort = (column) => {
      const cells = rows.map((row) => row.cells[column].textContent.trim());
      const known = cells.filter((cell) => cell !== "–" && cell !== "none");
      const numeric = known.length > 0 && known.every((cell) => figure(cell) !== null);
      const orders = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const next = orders[orders.indexOf(heads[column].getAttribute("aria-sort")) + 1];
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      table.classList.toggle("sorted", next !== undefined);
      if (next === undefined) return body.append(...rows);
      heads[column].setAttribute("aria-sort", next);
      const way = next === "ascending" ? 1 : -1;
      const missing = (i) => (numeric ? figure(cells[i]) === null : cells[i] === "–");
      const order = rows.map((_, i) => i).sort((a, b) => {
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        return way * (numeric ? figure(cells[a]) - figure(cells[b]) : cells[a].localeCompare(cells[b], "en", { numeric: true }));
      });
      body.append(...order.map((i) => rows[i]));
    };
    heads.forEach((head, column) => head.replaceChildren(button(head.textContent, () => sort(column))));
  };
  document.querySelectorAll("table").forEach((table) => {
    if (table.tBodies[0].rows.length > 1) sortable(table);
  });

  /* Worked examples, round by round. Nothing moves by itself where the reader asked for less motion. */
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const player = (sample) => {
    const rounds = [...sample.querySelectorAll(".round")];
    const words = [...sample.querySelectorAll(".told li")].map((item) => item.textContent);
    const state = document.createElement("span");
    state.className = "state";
    state.setAttribute("role", "status");
    let at = rounds.length;
    let timer = null;
    const show = (round) => {
      at = Math.max(0, Math.min(rounds.length, round));
      rounds.forEach((one, i) => {
        one.classList.toggle("later", i >= at);
        one.classList.toggle("now", i === at - 1 && at < rounds.length);
      });
      // A screen reader is told each step that is taken by hand, not every step of a play.
      state.setAttribute("aria-live", timer ? "off" : "polite");
      state.textContent = at ? `Round ${at} of ${rounds.length}: ${words[at - 1]}` : `Before the first of ${rounds.length} rounds`;
    };
    const stop = () => {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    };
    const play = button("Play", () => {
      if (timer) return stop();
      if (at >= rounds.length) show(0);
      play.textContent = "Pause";
      timer = setInterval(() => {
        show(at + 1);
        if (at >= rounds.length) stop();
      }, 500);
    });
    const step = (move) => button(move < 0 ? "Back" : "Next", () => {
      stop();
      show(move > 0 && at >= rounds.length ? 1 : at + move);
    });
    const controls = document.createElement("div");
    controls.className = "controls";
    controls.setAttribute("role", "group");
    controls.setAttribute("aria-label", "Play the answer round by round");
    controls.append(...(still ? [] : [play]), step(-1), step(1), button("All", () => { stop(); show(rounds.length); }), state);
    sample.querySelector(".answer").before(controls);
    state.textContent = `${rounds.length} rounds`;
  };
  document.querySelectorAll(".sample").forEach(player);

  /* Settings: a button copies them, where the browser lets a page do that. */
  if (navigator.clipboard) {
    document.querySelectorAll(".paste pre").forEach((pre) => {
      const copy = button("Copy", async () => {
        await navigator.clipboard.writeText(pre.textContent);
        copy.textContent = "Copied";
      });
      copy.className = "copy";
      pre.before(copy);
    });
  }

  /* A link to a folded section opens it. */
  const reveal = () => {
    const fold = document.getElementById(location.hash.slice(1))?.querySelector(":scope > details");
    if (fold) fold.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
})();

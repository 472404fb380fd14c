"use strict";
(() => {
  const root = document.documentElement;
  addEventListener("error", (event) => { root.dataset.error = event.message; });

  const STEP = 200;
  const [NAME, WHAT, CHANGED, ELEMENTS, MAX, MEAN, REL, COSINE, ULPS, BINS, LAYER] = Array(11).keys();
  const SORTED_BY = [NAME, WHAT, CHANGED, MAX, MEAN, REL, COSINE, LAYER];
  const KEYS = ["name", "what", "changed", "max_abs", "mean_abs", "rel_l2", "cosine", "ulps"];
  const rows = JSON.parse(document.getElementById("data").textContent).rows;
  const table = document.getElementById("tensors");
  const filter = document.getElementById("filter");
  const state = { measure: "rel_l2", filter: "", sort: "", most: STEP };

  const trimmed = (text) => text.replace(/e([+-])0?/, "e$1");
  const scientific = (value) => value === null ? "-" : value === 0 ? "0" : trimmed(value.toExponential(2));

  function percent(part, whole) {
    if (whole === null) return "-";
    if (!whole || part === 0 || part === whole) return part ? "100%" : "0%";
    const value = 100 * part / whole;
    return value < 0.01 ? "<0.01%" : value >= 99.995 ? ">99.99%" : value.toFixed(2) + "%";
  }

  function cosine(value) {
    if (value === null) return "-";
    if (value === 1) return "1";
    return value > 0.9999995 ? "1-" + (1 - value).toExponential(0) : value.toFixed(6);
  }

  function cell(kind, text, title) {
    const made = document.createElement(kind);
    made.textContent = text;
    if (title) made.title = title;
    return made;
  }

  function line(row) {
    const made = document.createElement("tr");
    const name = cell("th", row[NAME]);
    name.scope = "row";
    made.append(name, cell("td", row[WHAT]), cell("td", percent(row[CHANGED], row[ELEMENTS])));
    for (const i of [MAX, MEAN, REL]) made.append(cell("td", scientific(row[i])));
    made.append(cell("td", cosine(row[COSINE])), cell("td", row[ULPS], row[BINS]));
    return made;
  }

  // Every word has to be in the name or in what differs; layer:3 and layer:3-5 ask for the number of the layer.
  function wanted(text) {
    const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      const layer = /^layer:(\d+)(?:-(\d+))?$/.exec(word);
      if (!layer) return (row) => (row[NAME] + " " + row[WHAT]).toLowerCase().includes(word);
      const first = Number(layer[1]), last = Number(layer[2] ?? layer[1]);
      return (row) => row[LAYER] !== null && row[LAYER] >= first && row[LAYER] <= last;
    });
    return rows.filter((row) => tests.every((test) => test(row)));
  }

  // What has no number where others have one lies outside of any scale: it stands with the largest.
  function value(row, column) {
    if (column === CHANGED) return row[ELEMENTS] === null ? Infinity : row[CHANGED] / (row[ELEMENTS] || 1);
    return row[column] ?? (column === COSINE ? -Infinity : Infinity);
  }

  function sorted(found) {
    const up = state.sort.startsWith("-") ? -1 : 1;
    const at = KEYS.indexOf(state.sort.replace("-", ""));
    if (at < 0) return found;
    if (at === 7) return found.slice().sort((a, b) => up * (farthest(b) - farthest(a)));
    const column = SORTED_BY[at];
    const order = column < CHANGED
      ? (a, b) => a[column].localeCompare(b[column], "en", { numeric: true })
      : (a, b) => (value(b, column) > value(a, column)) - (value(b, column) < value(a, column));
    return found.slice().sort((a, b) => up * order(a, b));
  }

  function farthest(row) {
    const last = row[BINS].split("\n").pop().replace("up to ", "").split(":")[0];
    return last.startsWith("2^") ? 2 ** Number(last.slice(2)) : Number(last);
  }

  function list() {
    if (!table) return;
    const found = sorted(wanted(state.filter));
    const few = found.slice(0, state.most);
    table.tBodies[0].replaceChildren(...few.map(line));
    document.getElementById("count").textContent =
      `${few.length.toLocaleString("en")} of ${found.length.toLocaleString("en")}`
      + (found.length < rows.length ? ` (${rows.length.toLocaleString("en")} in all)` : "");
    document.getElementById("more").hidden = few.length === found.length;
    for (const [i, head] of [...table.tHead.rows[0].cells].entries()) {
      const up = state.sort === KEYS[i] ? i < 2 : state.sort === "-" + KEYS[i] ? i >= 2 : null;
      head.setAttribute("aria-sort", up === null ? "none" : up ? "ascending" : "descending");
    }
  }

  function remember() {
    const kept = new URLSearchParams();
    if (state.measure !== "rel_l2") kept.set("measure", state.measure);
    if (state.filter) kept.set("filter", state.filter);
    if (state.sort) kept.set("sort", state.sort);
    history.replaceState(null, "", kept.size ? "#" + kept : "#");
  }

  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    const choice = document.getElementById("measure-" + (kept.get("measure") ?? "rel_l2"));
    if (choice) choice.checked = true;
    state.measure = choice ? choice.value : "rel_l2";
    state.filter = kept.get("filter") ?? "";
    state.sort = kept.get("sort") ?? "";
    state.most = STEP;
    if (filter) filter.value = state.filter;
    list();
  }

  function seek(text) {
    state.filter = text;
    state.most = STEP;
    filter.value = text;
    list();
    remember();
  }

  for (const choice of document.querySelectorAll("input[name=measure]")) {
    choice.addEventListener("change", () => { state.measure = choice.value; remember(); });
  }
  if (table) {
    for (const part of document.querySelectorAll(".controls")) part.hidden = false;
    document.getElementById("static").hidden = true;
    filter.addEventListener("input", () => seek(filter.value));
    document.getElementById("more").addEventListener("click", () => { state.most += STEP; list(); });
    for (const button of table.querySelectorAll("thead button")) {
      button.disabled = false;
      button.addEventListener("click", () => {
        const key = KEYS[Number(button.dataset.column)];
        state.sort = state.sort === key ? "-" + key : key;
        list();
        remember();
      });
    }
    for (const part of document.querySelectorAll("[data-layer]")) {
      part.classList.add("link");
      part.addEventListener("click", () => {
        seek("layer:" + part.dataset.layer);
        filter.scrollIntoView({ block: "center" });
      });
    }
  }
  addEventListener("hashchange", recall);
  recall();
  root.dataset.ready = String(rows.length);
})();

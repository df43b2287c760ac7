"use strict";

// For each device the place of its block among the blocks that are drawn, which is its colour.
function colours(held, drawn) {
  const place = new Map(drawn.map((block, i) => [block, i]));
  return held.map(block => place.get(block));
}

// The order of two cells: by number where both are numbers.
function compare(a, b) {
  const x = Number(a), y = Number(b);
  return Number.isNaN(x) || Number.isNaN(y) ? (a < b ? -1 : a > b ? 1 : 0) : x - y;
}

// Whether a text has every word of a query.
function matches(text, query) {
  return query.toLowerCase().split(/\s+/).every(word => text.toLowerCase().includes(word));
}

function start() {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const find = id => document.getElementById(id);
  const value = cell => cell.dataset.value ?? cell.textContent;
  all("[data-script]").forEach(one => { one.hidden = false; });

  all("table").forEach(table => all("thead th", table).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") === "descending" || !heading.classList.contains("number")
        && heading.getAttribute("aria-sort") !== "ascending";
      all("thead th", table).forEach(one => one.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = all("tbody tr", table);
      rows.sort((a, b) => (up ? 1 : -1) * compare(value(a.cells[column]), value(b.cells[column])));
      table.tBodies[0].append(...rows);
    });
  }));

  const rows = all("tr[data-picture]");
  if (!rows.length) return;
  find("filter").addEventListener("input", event => {
    rows.forEach(row => { row.hidden = !matches(row.textContent, event.target.value); });
    find("found").textContent = rows.filter(row => !row.hidden).length + " of " + rows.length + " arrays";
  });

  const picture = find("picture"), devices = all("#devices .cell");
  function light(cell) {
    const block = cell ? cell.dataset.block : null;
    const on = all("[data-block]", picture).filter(one => {
      one.classList.toggle("on", one.dataset.block === block);
      return one.dataset.block === block && one.closest("#devices");
    });
    const shown = cell && all("figure:not([hidden]) [data-block]", picture).find(one => one.dataset.block === block);
    find("said").textContent = shown
      ? "block " + block + ": " + shown.title + "; on device " + on.map(one => one.dataset.device).join(", ") : "";
  }
  function choose(row) {
    rows.forEach(one => one.classList.toggle("chosen", one === row));
    all("figure", picture).forEach(one => { one.hidden = one.id !== "picture-" + row.dataset.picture; });
    const figure = find("picture-" + row.dataset.picture), held = figure.dataset.held.split(" ");
    colours(held, all("[data-block]", figure).map(cell => cell.dataset.block)).forEach((colour, i) => {
      devices[i].className = "cell c" + colour;
      devices[i].dataset.block = held[i];
      devices[i].querySelector("em").textContent = "block " + held[i];
    });
    const headings = all("thead th", row.closest("table"));
    find("details").replaceChildren(...[...row.cells].flatMap((cell, i) => {
      const term = document.createElement("dt"), words = document.createElement("dd");
      term.textContent = headings[i].textContent;
      words.textContent = cell.textContent;
      return [term, words];
    }));
    find("choice").value = row.id;
    light(null);
  }
  find("choice").addEventListener("change", event => choose(find(event.target.value)));
  rows.forEach(row => row.addEventListener("click", () => choose(row)));
  for (const name of ["mouseover", "focusin"])
    picture.addEventListener(name, event => light(event.target.closest("[data-block]")));
  picture.addEventListener("mouseleave", () => light(null));
  // One stop of the Tab key per group of cells; arrows move inside it.
  picture.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    const cell = event.target.closest(".cell");
    if (!step || !cell) return;
    const group = all(".cell", cell.closest("[role=group]"));
    const next = group[group.indexOf(cell) + step];
    if (!next) return;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

if (typeof document === "undefined") module.exports = {colours, compare, matches};
else start();

"use strict";
(() => {
  const cases = [...document.querySelectorAll("[data-case]")];
  const texts = cases.map((element) => element.textContent.toLowerCase());
  const rows = cases.filter((element) => element.tagName === "TR").length;

  const toolbar = document.getElementById("toolbar");
  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const applyFilter = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0;
    cases.forEach((element, i) => {
      element.hidden = !words.every((word) => texts[i].includes(word));
      if (!element.hidden && element.tagName === "TR") visible += 1;
    });
    shown.textContent = words.length ? `${visible} of ${rows} cases` : `${rows} cases`;
  };
  toolbar.hidden = false;
  filter.addEventListener("input", applyFilter);
  applyFilter();

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    const text = cell.textContent.trim();
    return cell.classList.contains("number") || text === "-" ? null : text;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const sortBy = (header, table) => {
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [valueOf(row, header.cellIndex), row]);
    keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : direction * compare(a, b)));
    body.append(...keyed.map(([, row]) => row));
  };
  for (const table of document.querySelectorAll("table.results")) {
    for (const header of table.tHead.rows[0].cells) {
      if (header.dataset.fixed !== undefined) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => sortBy(header, table));
    }
  }

  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", openTarget);
  openTarget();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((element) => (element.open = true)));
})();

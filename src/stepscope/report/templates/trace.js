"use strict";
(() => {
  // Tables: a click on a title sorts, numbers as numbers, gaps last.
  const valueOf = (cell) => {
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    return cell.classList.contains("number") || cell.textContent === "-" ? null : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const header of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        const numeric = header.classList.contains("number");
        const before = header.getAttribute("aria-sort");
        // The largest number is wanted first, and the first letter of the alphabet.
        const falling = before ? before === "ascending" : numeric;
        for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const body = table.tBodies[0];
        const keyed = [...body.rows].map((row) => [valueOf(row.cells[header.cellIndex]), row]);
        keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (falling ? -1 : 1) * compare(a, b)));
        body.append(...keyed.map(([, row]) => row));
      });
    }
  }
  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    // Ranks are chosen by the timeline.
    if (!target || target.name === "rank") return;
    const folded = target.closest("details");
    if (folded) folded.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", openTarget);
  openTarget();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((element) => (element.open = true)));
})();

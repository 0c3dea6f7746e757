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
    const folded = target && target.closest("details");
    if (folded) folded.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", openTarget);
  openTarget();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((element) => (element.open = true)));

  // Timeline.
  const source = document.getElementById("overview");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const box = document.getElementById("timeline");
  const canvas = box.querySelector("canvas");
  const hover = document.getElementById("hover");
  const status = document.getElementById("shown");
  box.hidden = false;
  document.getElementById("no-script").hidden = true;

  const LANE = 16, AXIS = 24, APART = 7, WIDE = 7;
  const ends = data.lanes.map(() => [0, 0]);
  for (let i = 0; i < data.blocks.length; i += WIDE) {
    const lane = ends[data.blocks[i]];
    if (lane[1] === 0) lane[0] = i;
    lane[1] = i + WIDE;
  }
  let y = AXIS;
  const tops = data.lanes.map(([, group], i) => {
    if (i > 0 && group !== data.lanes[i - 1][1]) y += APART;
    y += LANE;
    return y - LANE;
  });
  const height = y + 4;
  let from = 0, to = data.length, width = 0, gutter = 150, queued = false, colours = {};

  const seconds = (ns) => {
    const value = Math.abs(ns);
    const [unit, scale] = value >= 1e9 ? ["s", 1e9] : value >= 1e6 ? ["ms", 1e6] : value >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    return `${(ns / scale).toPrecision(4)} ${unit}`;
  };
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    colours = { text: read("--text"), soft: read("--soft"), line: read("--line"), mark: read("--mark"), on: read("--on"), light: read("--on-light") };
    colours.fill = data.colours.map((name) => read(`--k-${name}`));
  };
  const place = (ns) => gutter + ((ns - from) / (to - from)) * (width - gutter);
  const timeAt = (x) => from + ((x - gutter) / (width - gutter)) * (to - from);
  const fitText = (context, text, room) => {
    const letters = Math.floor(room / 6.1);
    return text.length <= letters ? text : letters > 2 ? `${text.slice(0, letters - 1)}…` : "";
  };

  const drawAxis = (context) => {
    const step = [1, 2, 5, 10].map((f) => f * 10 ** Math.floor(Math.log10((to - from) / 6))).find((s) => (to - from) / s <= 8);
    context.fillStyle = colours.soft;
    context.strokeStyle = colours.line;
    context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = Math.round(place(at)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
      context.stroke();
      if (x < width - 24) context.fillText(at === 0 ? "0" : seconds(at).replace(/\.?0+ /, " "), x, 12);
    }
  };
  const drawLane = (context, lane) => {
    const [first, last] = ends[lane];
    let reached = -1;
    for (let i = first; i < last; i += WIDE) {
      const start = data.blocks[i + 1], end = start + data.blocks[i + 2];
      if (end < from || start > to) continue;
      const left = Math.max(gutter, place(start)), right = Math.min(width, place(end));
      // Rectangles below a pixel that fall on one already drawn add nothing.
      if (right < reached) continue;
      const wide = Math.max(right - left, 0.7);
      reached = wide < 1 ? left + 0.5 : -1;
      const colour = data.blocks[i + 4];
      context.fillStyle = colours.fill[colour];
      context.fillRect(left, tops[lane] + 1, wide > 3 ? wide - 0.6 : wide, LANE - 3);
      if (wide > 44) {
        context.fillStyle = colour >= 5 && colour <= 6 ? colours.light : colours.on;
        context.textAlign = "left";
        context.fillText(fitText(context, data.names[data.blocks[i + 3]], wide - 6), left + 3, tops[lane] + 11);
      }
    }
  };
  const draw = () => {
    queued = false;
    const ratio = devicePixelRatio || 1;
    width = box.clientWidth;
    gutter = width < 600 ? 84 : 170;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    drawAxis(context);
    data.lanes.forEach(([label], lane) => {
      drawLane(context, lane);
      context.fillStyle = colours.soft;
      context.textAlign = "left";
      if (label) context.fillText(fitText(context, label, gutter - 10), 6, tops[lane] + 11);
    });
    context.fillStyle = colours.mark;
    for (let i = 0; i < data.marks.length; i += 3) {
      const start = data.marks[i + 1], end = start + data.marks[i + 2];
      if (end < from || start > to) continue;
      const left = Math.max(gutter, place(start));
      context.fillRect(left, tops[data.marks[i]] + LANE - 3, Math.max(Math.min(width, place(end)) - left, 0.7), 2);
    }
    canvas.dataset.from = from;
    canvas.dataset.to = to;
    const whole = to - from >= data.length;
    status.textContent = whole ? `${seconds(data.length)}` : `${seconds(from)} to ${seconds(to)} of ${seconds(data.length)}`;
  };
  const redraw = () => {
    if (!queued) requestAnimationFrame(draw);
    queued = true;
  };
  const show = (first, last) => {
    const span = Math.min(data.length, Math.max(last - first, Math.min(data.length, 200)));
    from = Math.min(Math.max(0, first), data.length - span);
    to = from + span;
    redraw();
  };
  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);

  const findBlock = (x, py) => {
    const lane = tops.findIndex((top) => py >= top && py < top + LANE);
    if (lane < 0 || x < gutter) return -1;
    const at = timeAt(x), near = ((to - from) / (width - gutter)) * 1.5;
    let best = -1, distance = near;
    for (let i = ends[lane][0]; i < ends[lane][1]; i += WIDE) {
      const start = data.blocks[i + 1], end = start + data.blocks[i + 2];
      if (start > at + near) break;
      const away = at < start ? start - at : at > end ? at - end : 0;
      if (away <= distance) [best, distance] = [i, away];
    }
    return best;
  };
  const tell = (event) => {
    const frame = canvas.getBoundingClientRect();
    const found = findBlock(event.clientX - frame.left, event.clientY - frame.top);
    hover.hidden = found < 0;
    if (found < 0) return;
    const [, start, length, name, , count, busy] = data.blocks.slice(found, found + WIDE);
    const title = document.createElement("b");
    title.textContent = count > 1 ? `${count} events, mostly ${data.names[name]}` : data.names[name];
    const facts = document.createElement("span");
    const inside = count > 1 ? `, ${seconds(busy)} in them` : "";
    facts.textContent = `${seconds(length)}${inside}, at ${seconds(start)}`;
    hover.replaceChildren(title, facts);
    const offset = canvas.offsetTop + event.clientY - frame.top + 16;
    hover.style.top = `${offset}px`;
    const left = event.clientX - frame.left + 12;
    hover.style.left = `${Math.max(0, Math.min(left, frame.width - hover.offsetWidth - 4))}px`;
  };

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return tell(event);
    hover.hidden = true;
    const moved = ((held.x - event.clientX) / (width - gutter)) * (held.to - held.from);
    show(held.from + moved, held.to + moved);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (held = null));
  canvas.addEventListener("pointerleave", () => (hover.hidden = true));
  canvas.addEventListener("dblclick", () => show(0, data.length));
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // All is shown: the page scrolls on.
    if (!sideways && event.deltaY > 0 && to - from >= data.length) return;
    event.preventDefault();
    hover.hidden = true;
    if (sideways) {
      const moved = (event.deltaX / (width - gutter)) * (to - from);
      show(from + moved, to + moved);
    } else {
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), timeAt(event.clientX - canvas.getBoundingClientRect().left));
    }
  }, { passive: false });
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, data.length),
    ArrowLeft: () => show(from - (to - from) / 5, to - (to - from) / 5),
    ArrowRight: () => show(from + (to - from) / 5, to + (to - from) / 5),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.getElementById("nearer").addEventListener("click", () => zoom(0.6));
  document.getElementById("farther").addEventListener("click", () => zoom(1 / 0.6));
  document.getElementById("whole").addEventListener("click", () => show(0, data.length));
  readColours();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  new ResizeObserver(redraw).observe(box);
  draw();
})();

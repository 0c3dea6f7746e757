"use strict";
(() => {
  const source = document.getElementById("overview");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const element = (id) => document.getElementById(id);
  const box = element("timeline"), canvas = box.querySelector("canvas"), hover = element("hover");
  box.hidden = false;
  element("no-script").hidden = true;

  const drawing = new TimelineCanvas(canvas, data.names, data.colours);
  const unpacked = new Map();
  const state = { rank: null, layout: null, from: 0, to: 1, matches: null, picked: -1, hovered: -1 };
  let found = { blocks: [], events: 0, unplaced: 0 }, current = -1, queued = false;

  const draw = () => {
    queued = false;
    drawing.draw(state, box.clientWidth);
    const { rank, from, to } = state;
    canvas.dataset.from = from;
    canvas.dataset.to = to;
    canvas.dataset.tops = JSON.stringify(state.layout.rows.map((row) => [row.track === undefined ? rank.lanes[row.lane][0] : rank.tracks[row.track].label, row.top]));
    const whole = to - from >= rank.length;
    element("shown").textContent = whole ? formatTime(rank.length) : `${formatTime(from)} to ${formatTime(to)} of ${formatTime(rank.length)}`;
  };
  const redraw = () => {
    if (!queued) requestAnimationFrame(draw);
    queued = true;
  };
  const show = (first, last) => {
    const { length } = state.rank;
    const span = Math.min(length, Math.max(last - first, Math.min(length, 200)));
    state.from = Math.min(Math.max(0, first), length - span);
    state.to = state.from + span;
    redraw();
  };
  const showAll = () => show(0, state.rank.length);
  const zoom = (factor, at = (state.from + state.to) / 2) => show(at - (at - state.from) * factor, at + (state.to - at) * factor);
  const move = (share) => show(state.from + (state.to - state.from) * share, state.to + (state.to - state.from) * share);

  // Words about a block: its name, its times, what it holds, and its launches.
  const describe = (block) => {
    const { rank } = state, inside = rank.contents.get(block), name = data.names[rank.name[block]];
    const facts = [`${formatTime(rank.end[block] - rank.start[block])}${inside ? `, ${formatTime(inside.busy)} in them` : ""}, at ${formatTime(rank.start[block])}`];
    if (inside) {
      const listed = inside.names.map(([code, count]) => `${count} × ${data.names[code]}`);
      const rest = inside.count - inside.names.reduce((sum, [, count]) => sum + count, 0);
      facts.push(`put together: ${listed.join(", ")}${rest ? `, ${rest} others` : ""}`);
    }
    const arrows = arrowsOf(rank, block);
    if (rank.launchOf.has(block)) {
      const call = rank.launchOf.get(block), apart = inside || rank.contents.has(call) ? "" : `, started ${formatTime(rank.start[block] - rank.start[call])} after it`;
      facts.push(`${inside ? "the first of them " : ""}launched by ${data.names[rank.name[call]]}${apart}`);
    } else if (groupOf(rank, block) === "device") {
      facts.push("its launch is not drawn: before this step, on a thread that is not shown, or not recorded");
    } else if (arrows.length) {
      const drawn = arrows.length > MOST_ARROWS ? `, arrows to the first ${MOST_ARROWS}` : "";
      facts.push(`launches ${arrows.length} ${arrows.length > 1 ? "rectangles" : "rectangle"} on the device${drawn}`);
    }
    return [inside ? `${inside.count} events, mostly ${name}` : name, facts];
  };
  const say = (into, title, facts) => {
    const head = document.createElement("b");
    head.textContent = title;
    into.replaceChildren(head, ...facts.flatMap((text) => {
      const line = document.createElement("span");
      line.textContent = text;
      return [" ", line];
    }));
  };

  // Choosing a rectangle, by click, key or search.
  const pick = (block) => {
    state.picked = block;
    if (block < 0) element("picked").replaceChildren(); else say(element("picked"), ...describe(block));
    redraw();
  };
  const bringIntoView = (block) => {
    const { rank, from, to } = state, start = rank.start[block], length = rank.end[block] - start;
    const span = Math.max(Math.min(to - from, rank.length), length * 1.2);
    // Wide enough to be seen: a match that is thinner than a pixel would be lost in the whole step.
    const wanted = length > 0 && length < span / 200 ? Math.max(length * 40, 2000) : span;
    if (wanted !== to - from || start < from || start + length > to) show(start + length / 2 - wanted / 2, start + length / 2 + wanted / 2);
  };
  const pickIn = (lane, at) => {
    const { rank } = state;
    let best = -1, distance = Infinity;
    for (let block = rank.first[lane]; block < rank.first[lane + 1]; block += 1) {
      const away = at < rank.start[block] ? rank.start[block] - at : Math.max(0, at - rank.end[block]);
      if (away < distance) [best, distance] = [block, away];
    }
    return best;
  };
  const step = (by) => {
    const { rank, picked } = state;
    const lane = picked < 0 ? 0 : rank.lane[picked];
    const next = picked < 0 ? pickIn(lane, (state.from + state.to) / 2) : picked + by;
    if (next < rank.first[lane] || next >= rank.first[lane + 1]) return;
    pick(next);
    bringIntoView(next);
  };
  const changeLane = (by) => {
    const { rank, picked } = state, middle = (state.from + state.to) / 2;
    let lane = picked < 0 ? (by > 0 ? -1 : rank.lanes.length) : rank.lane[picked];
    do lane += by; while (lane >= 0 && lane < rank.lanes.length && rank.first[lane] === rank.first[lane + 1]);
    if (lane < 0 || lane >= rank.lanes.length) return;
    const next = pickIn(lane, picked < 0 ? middle : (rank.start[picked] + rank.end[picked]) / 2);
    pick(next);
    bringIntoView(next);
  };

  // Search.
  const query = element("query"), matches = element("matches");
  const sayMatches = () => {
    const count = found.blocks.length, active = query.value.trim() !== "";
    element("before").disabled = element("after").disabled = !count;
    const place = current >= 0 ? `${current + 1} of ${count}` : `${count}`;
    const events = found.events !== count ? ` (${found.events} events)` : "";
    const more = found.unplaced ? `; ${found.unplaced} more events are not drawn or not named in their block` : "";
    const beyond = state.rank.unsearched ? `; ${state.rank.unsearched} events have names that this page does not hold` : "";
    matches.textContent = active ? `${place} ${count === 1 && current < 0 ? "match" : "matches"}${events}${more}${beyond}` : "";
  };
  const search = () => {
    found = findNames(state.rank, data.names, query.value);
    current = -1;
    state.matches = query.value.trim() === "" ? null : new Set(found.blocks);
    sayMatches();
    redraw();
  };
  const goTo = (by) => {
    if (!found.blocks.length) return;
    current = current < 0 ? (by > 0 ? 0 : found.blocks.length - 1) : (current + by + found.blocks.length) % found.blocks.length;
    sayMatches();
    pick(found.blocks[current]);
    bringIntoView(found.blocks[current]);
  };
  query.addEventListener("input", search);
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter") goTo(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      query.value = "";
      search();
    }
  });
  element("before").addEventListener("click", () => goTo(-1));
  element("after").addEventListener("click", () => goTo(1));

  // Ranks.
  const choose = (number) => {
    const packed = data.ranks.find((one) => one.rank === number);
    if (!packed) return;
    if (!unpacked.has(number)) unpacked.set(number, unpackRank(packed));
    state.rank = unpacked.get(number);
    state.layout = layOut(state.rank);
    state.hovered = -1;
    element("timeline-caption").textContent = packed.caption;
    canvas.setAttribute("aria-label", `Timeline of the step: ${packed.caption}`);
    pick(-1);
    search();
    showAll();
  };
  const choices = [...document.querySelectorAll('input[name="rank"]')];
  if (choices.length) element("ranks").hidden = false;
  for (const choice of choices) choice.addEventListener("change", () => choose(Number(choice.value)));
  const goToRank = (target) => {
    const choice = choices.find((one) => `#${one.id}` === target);
    if (!choice) return;
    choice.checked = true;
    choose(Number(choice.value));
    element("overview-title").scrollIntoView();
  };
  for (const link of document.querySelectorAll('a[href^="#rank-"]')) link.addEventListener("click", (event) => {
    event.preventDefault();
    history.replaceState(null, "", link.getAttribute("href"));
    goToRank(link.getAttribute("href"));
    choices.find((one) => one.checked).focus({ preventScroll: true });
  });
  addEventListener("hashchange", () => goToRank(location.hash));

  // Pointer.
  const tell = (event) => {
    const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    const block = drawing.findBlock(x, y), row = drawing.rowAt(y);
    if (block !== state.hovered) {
      state.hovered = block;
      redraw();
    }
    const track = row && row.track !== undefined && x >= drawing.gutter ? state.rank.tracks[row.track] : null;
    hover.hidden = block < 0 && !track;
    if (hover.hidden) return;
    if (track) {
      const mean = track.cell_ns ? `, mean over ${formatTime(track.cell_ns)}` : "", time = drawing.timeAt(x);
      const hint = track.unit === "activities" ? "launched and not started, of all steps" : "of what runs at this time, over its whole duration";
      say(hover, `${track.label}: ${formatValue(track, valueAt(track, time))}`, [`at ${formatTime(time)}${mean}`, hint]);
    } else say(hover, ...describe(block));
    hover.style.top = `${canvas.offsetTop + y + 16}px`;
    hover.style.left = `${Math.max(0, Math.min(x + 12, frame.width - hover.offsetWidth - 4))}px`;
  };
  const forget = () => {
    hover.hidden = true;
    if (state.hovered >= 0) redraw();
    state.hovered = -1;
  };
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from: state.from, to: state.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return tell(event);
    if (Math.abs(held.x - event.clientX) > 3) held.moved = true;
    if (!held.moved) return;
    forget();
    const moved = ((held.x - event.clientX) / (drawing.width - drawing.gutter)) * (held.to - held.from);
    show(held.from + moved, held.to + moved);
  });
  canvas.addEventListener("pointerup", (event) => {
    const frame = canvas.getBoundingClientRect();
    if (held && !held.moved) pick(drawing.findBlock(event.clientX - frame.left, event.clientY - frame.top));
    held = null;
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("pointerleave", forget);
  canvas.addEventListener("dblclick", showAll);
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // All is shown: the page scrolls on.
    if (!sideways && event.deltaY > 0 && state.to - state.from >= state.rank.length) return;
    event.preventDefault();
    forget();
    if (sideways) move(event.deltaX / (drawing.width - drawing.gutter));
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), drawing.timeAt(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });

  // Keys and buttons.
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: showAll,
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
    ",": () => step(-1), ".": () => step(1), Escape: () => pick(-1), "/": () => query.focus(), n: () => goTo(1), N: () => goTo(-1),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  element("nearer").addEventListener("click", () => zoom(0.6));
  element("farther").addEventListener("click", () => zoom(1 / 0.6));
  element("whole").addEventListener("click", showAll);

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawing.readColours();
    redraw();
  });
  new ResizeObserver(redraw).observe(box);
  choose(data.telling);
  goToRank(location.hash);
  draw();
})();

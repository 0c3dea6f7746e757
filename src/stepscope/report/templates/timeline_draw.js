"use strict";
// Draws a view of a rank's timeline on a canvas; it knows nothing of pointers, keys or the rest of the page.
const LANE = 16, TRACK = 30, AXIS = 24, APART = 7, MOST_ARROWS = 200;

// Lanes of rectangles, and small curves: the queue above the device that it feeds, bandwidths below it.
const layOut = (rank) => {
  const rows = [];
  const addTracks = (wanted) => rank.tracks.forEach((track, number) => {
    if (wanted(track)) rows.push({ track: number, group: "track", height: TRACK });
  });
  const isQueue = (track) => track.unit === "activities";
  let queueDone = false;
  rank.lanes.forEach(([, group], lane) => {
    if (group === "device" && !queueDone) {
      addTracks(isQueue);
      queueDone = true;
    }
    rows.push({ lane, group, height: LANE });
  });
  if (!queueDone) addTracks(isQueue);
  addTracks((track) => !isQueue(track));
  let y = AXIS;
  rows.forEach((row, i) => {
    if (i > 0 && (row.group !== rows[i - 1].group || row.group === "track")) y += APART;
    row.top = y;
    y += row.height;
  });
  const topOf = [];
  for (const row of rows) if (row.lane !== undefined) topOf[row.lane] = row.top;
  return { rows, topOf, height: y + 4 };
};

class TimelineCanvas {
  constructor(canvas, names, colours) {
    this.canvas = canvas;
    this.names = names;
    this.colourNames = colours;
    this.width = 0;
    this.gutter = 150;
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.ink = { text: read("--text"), soft: read("--soft"), line: read("--line"), mark: read("--mark"), on: read("--on"), light: read("--on-light"), accent: read("--accent"), area: read("--bar") };
    this.fill = this.colourNames.map((name) => read(`--k-${name}`));
  }

  place(ns) { return this.gutter + ((ns - this.from) / (this.to - this.from)) * (this.width - this.gutter); }
  timeAt(x) { return this.from + ((x - this.gutter) / (this.width - this.gutter)) * (this.to - this.from); }
  get nsPerPixel() { return (this.to - this.from) / (this.width - this.gutter); }

  // `shown`: rank, layout, from, to, matches (a Set, or null without a search), picked and hovered blocks (-1: none).
  draw(shown, width) {
    Object.assign(this, shown, { width, gutter: width < 600 ? 94 : 170 });
    const ratio = devicePixelRatio || 1, { canvas, layout } = this;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(layout.height * ratio);
    canvas.style.height = `${layout.height}px`;
    const context = (this.context = canvas.getContext("2d"));
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    this.drawAxis();
    for (const row of layout.rows) {
      if (row.track === undefined) this.drawLane(row); else this.drawTrack(row);
    }
    this.drawMarks();
    this.drawArrows(this.picked, 0.9);
    if (this.hovered !== this.picked) this.drawArrows(this.hovered, 0.6);
    if (this.picked >= 0) this.outline(this.picked, this.ink.text, 2);
  }

  fitText(text, room) {
    const letters = Math.floor(room / 6.1);
    return text.length <= letters ? text : letters > 2 ? `${text.slice(0, letters - 1)}…` : "";
  }
  label(text, top) {
    this.context.fillStyle = this.ink.soft;
    this.context.textAlign = "left";
    if (text) this.context.fillText(this.fitText(text, this.gutter - 10), 6, top + 11);
  }

  // Where room is short: the thread beside its first lane, what it does beside the others.
  laneLabel(lane) {
    const [label, group] = this.rank.lanes[lane], isFirst = lane === 0 || this.rank.lanes[lane - 1][1] !== group;
    if (this.width >= 600 || !label.includes(": ")) return label;
    return label.split(": ")[isFirst ? 0 : 1];
  }

  drawAxis() {
    const { context, from, to, ink } = this;
    const step = [1, 2, 5, 10].map((f) => f * 10 ** Math.floor(Math.log10((to - from) / 6))).find((s) => (to - from) / s <= 8);
    context.fillStyle = ink.soft;
    context.strokeStyle = ink.line;
    context.textAlign = "center";
    const room = (this.width - this.gutter) * (step / (to - from)), every = Math.max(1, Math.ceil(52 / room));
    for (let number = Math.ceil(from / step); number * step <= to; number += 1) {
      const at = number * step, x = Math.round(this.place(at)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, this.layout.height);
      context.stroke();
      if (number % every === 0 && x < this.width - 24) context.fillText(at === 0 ? "0" : formatTime(at).replace(/\.?0+ /, " "), x, 12);
    }
  }

  // What a block covers on the canvas; null where it is outside of the view.
  boxOf(block) {
    const { rank, from, to } = this;
    if (rank.end[block] < from || rank.start[block] > to) return null;
    const left = Math.max(this.gutter, this.place(rank.start[block])), right = Math.min(this.width, this.place(rank.end[block]));
    return { left, right, wide: Math.max(right - left, 0.7), top: this.layout.topOf[rank.lane[block]] };
  }

  drawLane({ lane, top }) {
    const { rank, context, ink, matches } = this;
    let reached = -1, reachedMatch = false;
    for (let block = rank.first[lane]; block < rank.first[lane + 1]; block += 1) {
      const box = this.boxOf(block);
      if (!box) continue;
      const isMatch = !matches || matches.has(block);
      // Rectangles below a pixel that fall on one already drawn add nothing.
      if (box.right < reached && (reachedMatch || !isMatch)) continue;
      const { left, wide } = box;
      reached = wide < 1 ? left + 0.5 : -1;
      reachedMatch = isMatch;
      const colour = rank.colour[block];
      context.globalAlpha = isMatch ? 1 : 0.22;
      context.fillStyle = this.fill[colour];
      context.fillRect(left, top + 1, wide > 3 ? wide - 0.6 : wide, LANE - 3);
      if (rank.contents.has(block) && wide > 2) this.drawStripes(left, top + 1, wide - 0.6);
      if (wide > 44) {
        context.fillStyle = colour >= 5 && colour <= 6 ? ink.light : ink.on;
        context.textAlign = "left";
        context.fillText(this.fitText(this.names[rank.name[block]], wide - 6), left + 3, top + 11);
      }
      if (matches && isMatch) this.outline(block, ink.accent, 1.5);
    }
    context.globalAlpha = 1;
    this.label(this.laneLabel(lane), top);
  }

  // Stripes: several events put together.
  drawStripes(left, top, wide) {
    const { context } = this;
    context.strokeStyle = this.ink.on;
    context.save();
    context.beginPath();
    context.rect(left, top, wide, LANE - 3);
    context.clip();
    context.globalAlpha *= 0.45;
    context.beginPath();
    for (let x = left - (left % 5) - LANE; x < left + wide; x += 5) {
      context.moveTo(x, top + LANE - 3);
      context.lineTo(x + LANE - 3, top);
    }
    context.stroke();
    context.restore();
  }

  outline(block, colour, thick) {
    const box = this.boxOf(block);
    if (!box) return;
    this.context.strokeStyle = colour;
    this.context.lineWidth = thick;
    this.context.strokeRect(box.left - 0.5, box.top + 0.5, Math.max(box.wide, 2), LANE - 2);
    this.context.lineWidth = 1;
  }

  drawTrack({ track: number, top }) {
    const track = this.rank.tracks[number], { context, ink } = this, bottom = top + TRACK - 3, high = TRACK - 6;
    const upTo = (value) => bottom - (value / track.peak) * high;
    context.beginPath();
    context.moveTo(this.gutter, bottom);
    // Values hold until the next point. What is shorter than a pixel is still seen by its outline.
    track.points.forEach(([time, value], i) => {
      const next = i + 1 < track.points.length ? track.points[i + 1][0] : this.rank.length;
      if (next < this.from || time > this.to) return;
      const left = Math.max(this.gutter, this.place(time)), right = Math.min(this.width, this.place(next));
      context.lineTo(left, upTo(value));
      context.lineTo(right, upTo(value));
    });
    context.lineTo(this.width, bottom);
    context.fillStyle = ink.area;
    context.strokeStyle = ink.accent;
    context.fill();
    context.stroke();
    this.label(track.label, top);
    const peak = formatValue({ ...track, cell_ns: 0 }, track.peak);
    context.fillText(this.fitText(`${this.width < 600 ? "≤" : "peak"} ${peak}`, this.gutter - 10), 6, top + 24);
  }

  drawMarks() {
    const { context, rank, from, to } = this;
    context.fillStyle = this.ink.mark;
    context.globalAlpha = this.matches ? 0.3 : 1;
    rank.marks.forEach((spans, lane) => {
      for (const [start, end] of spans) {
        if (end < from || start > to) continue;
        const left = Math.max(this.gutter, this.place(start));
        context.fillRect(left, this.layout.topOf[lane] + LANE - 3, Math.max(Math.min(this.width, this.place(end)) - left, 0.7), 2);
      }
    });
    context.globalAlpha = 1;
  }

  // From the start of a launch to the start of what it launched; an end outside of the view stands at its edge.
  drawArrows(block, alpha) {
    const { context, rank, layout } = this, arrows = arrowsOf(rank, block).slice(0, MOST_ARROWS);
    context.strokeStyle = context.fillStyle = this.ink.text;
    context.globalAlpha = arrows.length > 30 ? alpha / 2 : alpha;
    const clamp = (ns) => Math.max(this.gutter, Math.min(this.width, this.place(ns)));
    for (const [call, device] of arrows) {
      const [x, y] = [clamp(rank.start[call]), layout.topOf[rank.lane[call]] + LANE - 2];
      const [endX, endY] = [clamp(rank.start[device]), layout.topOf[rank.lane[device]] + 1];
      const middle = (y + endY) / 2;
      context.beginPath();
      context.moveTo(x, y);
      context.bezierCurveTo(x, middle, endX, middle, endX, endY);
      context.stroke();
      context.beginPath();
      context.moveTo(endX, endY);
      context.lineTo(endX - 3, endY - 6);
      context.lineTo(endX + 3, endY - 6);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  // The row at a height; undefined between rows.
  rowAt(y) { return this.layout.rows.find((row) => y >= row.top && y < row.top + row.height); }

  findBlock(x, y) {
    const row = this.rowAt(y);
    if (!row || row.lane === undefined || x < this.gutter) return -1;
    const { rank } = this, at = this.timeAt(x), near = this.nsPerPixel * 1.5;
    let best = -1, distance = near;
    for (let block = rank.first[row.lane]; block < rank.first[row.lane + 1]; block += 1) {
      if (rank.start[block] > at + near) break;
      const away = at < rank.start[block] ? rank.start[block] - at : at > rank.end[block] ? at - rank.end[block] : 0;
      if (away <= distance) [best, distance] = [block, away];
    }
    return best;
  }
}

"use strict";
// One rank's timeline, unpacked into columns; times in nanoseconds from the start of the step.
const unpackSpans = (flat, wide) => {
  const spans = [];
  let start = 0;
  for (let i = 0; i < flat.length; i += wide) {
    start += flat[i];
    spans.push([start, start + flat[i + 1], ...flat.slice(i + 2, i + wide)]);
  }
  return spans;
};

const unpackRank = (packed) => {
  const total = packed.blocks.reduce((sum, flat) => sum + flat.length / 4, 0);
  const rank = {
    ...packed,
    lane: new Uint16Array(total), start: new Float64Array(total), end: new Float64Array(total),
    name: new Uint32Array(total), colour: new Uint8Array(total),
    first: [0], marks: packed.marks.map((flat) => unpackSpans(flat, 2)), contents: new Map(), launchOf: new Map(), launches: [],
  };
  let at = 0;
  packed.blocks.forEach((flat, lane) => {
    for (const [start, end, name, colour] of unpackSpans(flat, 4)) {
      rank.lane[at] = lane;
      [rank.start[at], rank.end[at], rank.name[at], rank.colour[at]] = [start, end, name, colour];
      at += 1;
    }
    rank.first.push(at);
  });
  for (const [block, count, busy, ...named] of packed.contents) {
    const names = [];
    for (let i = 0; i < named.length; i += 2) names.push([named[i], named[i + 1]]);
    rank.contents.set(block, { count, busy, names });
  }
  for (let i = 0, device = 0, call = 0; i < packed.launches.length; i += 2) {
    device += packed.launches[i];
    call += packed.launches[i + 1];
    rank.launchOf.set(device, call);
    rank.launches.push([call, device]);
  }
  rank.tracks = packed.tracks.map((track) => ({ ...track, points: unpackPoints(track.points, track.peak) }));
  return rank;
};

const unpackPoints = (flat, peak) => {
  const points = [];
  let time = 0;
  for (let i = 0; i < flat.length; i += 2) {
    time += flat[i];
    points.push([time, (flat[i + 1] / 1000) * peak]);
  }
  return points;
};

const isPath = (rank, block) => rank.lanes[rank.lane[block]][1] === "path";
const groupOf = (rank, block) => rank.lanes[rank.lane[block]][1];

// Arrows of a block: to a device activity from its launch; from a host event to everything launched inside it.
const arrowsOf = (rank, block) => {
  if (block < 0 || isPath(rank, block)) return [];
  if (rank.launchOf.has(block)) return [[rank.launchOf.get(block), block]];
  const group = groupOf(rank, block);
  return rank.launches.filter(([call]) =>
    call === block || (groupOf(rank, call) === group && rank.start[call] >= rank.start[block] && rank.end[call] <= rank.end[block]));
};

// Blocks with an event of that name, in order of time, and how many events these are. Events that no block lists by
// name are counted apart.
const findNames = (rank, names, query) => {
  const text = query.trim().toLowerCase();
  const wanted = names.map((name) => text !== "" && name.toLowerCase().includes(text));
  const found = { blocks: [], events: 0, unplaced: 0 };
  if (text === "") return found;
  for (let block = 0; block < rank.lane.length; block += 1) {
    if (isPath(rank, block)) continue;
    const inside = rank.contents.get(block);
    const events = inside ? inside.names.reduce((sum, [name, count]) => sum + (wanted[name] ? count : 0), 0) : Number(wanted[rank.name[block]]);
    if (events) found.blocks.push(block);
    found.events += events;
  }
  for (let i = 0; i < rank.unplaced.length; i += 2) if (wanted[rank.unplaced[i]]) found.unplaced += rank.unplaced[i + 1];
  found.blocks.sort((a, b) => rank.start[a] - rank.start[b]);
  return found;
};

const valueAt = (track, time) => {
  let low = 0, high = track.points.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (track.points[middle][0] <= time) low = middle; else high = middle;
  }
  return track.points.length ? track.points[low][1] : 0;
};

const formatTime = (ns) => {
  const value = Math.abs(ns);
  const [unit, scale] = value >= 1e9 ? ["s", 1e9] : value >= 1e6 ? ["ms", 1e6] : value >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  return `${(ns / scale).toPrecision(4)} ${unit}`;
};
const formatValue = (track, value) => {
  if (track.unit !== "B/s") return track.cell_ns ? value.toPrecision(3) : String(Math.round(value));
  const [unit, scale] = value >= 1e12 ? ["TB/s", 1e12] : value >= 1e9 ? ["GB/s", 1e9] : value >= 1e6 ? ["MB/s", 1e6] : ["kB/s", 1e3];
  return `${(value / scale).toPrecision(3)} ${unit}`;
};

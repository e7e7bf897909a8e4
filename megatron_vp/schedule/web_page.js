"use strict";
// Draws the schedules of the page, the second below the first, on one time axis. web_page.py defines the data.

const page = JSON.parse(document.getElementById("page").textContent);
const about = document.getElementById("about");
const GUTTER = 58, AXIS = 18; // pixels for rank names and for the time axis
const LONGEST = Math.max(...page.schedules.map((each) => each.makespan)) || 1;
const shown = { from: 0, until: LONGEST };
const chosen = { view: null, node: null, kept: false, chain: false };

const number = (value) => String(Number(value.toPrecision(6)));

class View {
  constructor(data) {
    Object.assign(this, data);
    this.nodes = data.nodes.map(([name, style, rank, start, end, before, turn], index) => (
      { name, style: page.styles[style], rank, start, end, before, turn, index, after: [], isPass: index < data.passes }));
    for (const node of this.nodes) for (const earlier of node.before) this.nodes[earlier].after.push(node.index);
    this.rows = Array.from({ length: data.ranks }, () => ({ compute: [], collective: [], copy: [] }));
    for (const node of this.nodes) {
      const lane = node.isPass ? "compute" : node.style.kind;
      if (lane in this.rows[0]) for (const rank of node.rank === null ? data.members : [node.rank]) this.rows[rank][lane].push(node);
    }
    for (const row of this.rows) for (const lane in row) row[lane].sort((one, other) => one.start - other.start);
    const takesTime = (lane) => this.rows.some((row) => row[lane].some((node) => node.end > node.start));
    const tall = data.ranks <= 16 ? 22 : data.ranks <= 40 ? 14 : 9;
    this.height = { compute: tall, collective: takesTime("collective") ? 6 : 0, copy: takesTime("copy") ? 6 : 0,
      memory: tall * 0.8 };
    this.pitch = 10 + Object.values(this.height).reduce((sum, each) => sum + each);
    const place = document.querySelector("main").appendChild(document.createElement("section"));
    place.appendChild(document.createElement("h2")).textContent = data.title;
    place.appendChild(document.createElement("p")).textContent = data.figures;
    this.canvas = place.appendChild(document.createElement("canvas"));
    this.canvas.view = this;
  }

  // Positions in pixels of the page.
  x(time) { return GUTTER + (time - shown.from) / (shown.until - shown.from) * (this.width - GUTTER); }
  time(x) { return shown.from + (x - GUTTER) / (this.width - GUTTER) * (shown.until - shown.from); }
  top(rank, lane = "compute") {
    let y = AXIS + rank * this.pitch;
    for (const each in this.height) { if (each === lane) return y; y += this.height[each]; }
    return y;
  }

  at(x, y) {
    const rank = Math.floor((y - AXIS) / this.pitch);
    if (x < GUTTER || rank < 0 || rank >= this.ranks) return null;
    const lane = ["compute", "collective", "copy"].find((each) => y < this.top(rank, each) + this.height[each]);
    const near = 2 * (shown.until - shown.from) / this.width; // 2 pixels, so that thinner passes can be hit
    const time = this.time(x), row = lane ? this.rows[rank][lane] : [];
    return row.find((node) => node.start <= time && time < node.end)
      || row.find((node) => node.end > node.start && node.start - near <= time && time < node.end + near) || null;
  }

  // The nearest passes before or after a node, and the communication on the way to them.
  reach(node, way) {
    const found = new Set(), open = [...node[way]];
    while (open.length) {
      const each = this.nodes[open.pop()];
      if (found.has(each)) continue;
      found.add(each);
      if (!each.isPass) open.push(...each[way]);
    }
    return found;
  }
  previous(node) { return this.nodes[node.turn] || null; } // on its rank or communicator
  decider(node) { // of the awaited nodes, the last to end; in a tie, not the previous node on its rank
    return node.before.map((index) => this.nodes[index])
      .reduce((last, each) => !last || each.end >= last.end ? each : last, this.previous(node));
  }
  chain(node) {
    const found = [node];
    while ((node = this.decider(node))) found.push(node);
    return found;
  }

  draw(width, ratio) {
    this.width = width;
    const height = AXIS + this.ranks * this.pitch, canvas = this.canvas, draw = this.pen = canvas.getContext("2d");
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    draw.scale(ratio, ratio);
    draw.font = "11px system-ui, sans-serif";
    draw.textBaseline = "middle";
    this.drawAxis(height);
    const node = chosen.view === this ? chosen.node : null;
    const before = node ? this.reach(node, "before") : null, after = node ? this.reach(node, "after") : null;
    const chain = node && chosen.chain ? new Set(this.chain(node)) : null;
    const lit = (each) => !node || each === node || (chain ? chain.has(each) : before.has(each) || after.has(each));
    for (let rank = 0; rank < this.ranks; rank++) {
      draw.fillStyle = "#222";
      draw.textAlign = "right";
      draw.fillText(`rank ${rank}`, GUTTER - 8, this.top(rank) + this.height.compute / 2);
    }
    draw.beginPath();
    draw.rect(GUTTER, 0, width - GUTTER, height);
    draw.clip();
    for (let rank = 0; rank < this.ranks; rank++) {
      for (const lane in this.rows[rank]) if (this.height[lane]) this.drawLane(rank, lane, lit);
      draw.globalAlpha = 1;
      this.drawMemory(rank);
    }
    if (node) this.drawArrows(node, chain);
  }

  drawAxis(height) {
    const draw = this.pen, span = shown.until - shown.from;
    let step = 10 ** Math.floor(Math.log10(span / 4));
    step *= [1, 2, 5, 10].find((each) => span / (step * each) <= this.width / 90);
    draw.textAlign = "center";
    for (let tick = Math.ceil(shown.from / step); tick * step <= shown.until; tick++) {
      draw.fillStyle = "#e4e4e4";
      draw.fillRect(this.x(tick * step), AXIS - 3, 1, height);
      draw.fillStyle = "#555";
      draw.fillText(number(tick * step), this.x(tick * step), 7);
    }
  }

  drawLane(rank, lane, lit) {
    const draw = this.pen, row = this.rows[rank][lane], top = this.top(rank, lane);
    const height = this.height[lane] - (lane === "compute" ? 0 : 2);
    draw.textAlign = "center";
    for (const node of row) {
      if (node.end <= shown.from || node.start >= shown.until || node.end === node.start) continue;
      const left = this.x(node.start), wide = Math.max(0.3, this.x(node.end) - left);
      draw.globalAlpha = lit(node) ? 1 : 0.25;
      draw.fillStyle = node.style.colour;
      draw.fillRect(left, top, wide > 3 ? wide - 0.7 : wide, height);
      if (lane !== "compute") continue;
      const label = wide > 34 ? node.name : String(node.name.match(/\d+/));
      if (height >= 12 && wide > 7 * label.length + 2) {
        draw.fillStyle = "#000";
        draw.fillText(label, left + wide / 2, top + height / 2);
      }
    }
  }

  drawMemory(rank) {
    const draw = this.pen, base = this.top(rank, "memory") + this.height.memory, most = page.peak || 1;
    const path = (levels) => {
      draw.beginPath();
      draw.moveTo(this.x(0), base);
      let level = 0;
      for (const [time, next] of [...levels, [this.makespan, 0]]) {
        draw.lineTo(this.x(time), base - level / most * (this.height.memory - 2));
        draw.lineTo(this.x(time), base - next / most * (this.height.memory - 2));
        level = next;
      }
    };
    path(this.memory[rank]);
    draw.fillStyle = "#9a9a9a";
    draw.fill();
    if (!this.host) return;
    path(this.host[rank]);
    draw.strokeStyle = page.host_colour;
    draw.stroke();
  }

  drawArrows(node, chain) {
    const draw = this.pen, last = this.decider(node);
    const rank = (each) => each.rank === null ? node.rank ?? this.members[0] : each.rank;
    const middle = (each) => this.top(rank(each)) + this.height.compute / 2;
    const arrow = (from, to, colour, wide) => {
      draw.strokeStyle = draw.fillStyle = colour;
      draw.lineWidth = wide;
      draw.beginPath();
      draw.moveTo(this.x(from.end), middle(from));
      draw.lineTo(this.x(to.start), middle(to));
      draw.stroke();
      draw.beginPath();
      draw.arc(this.x(to.start), middle(to), 2.5, 0, 7);
      draw.fill();
    };
    draw.globalAlpha = 1;
    if (chain) {
      const passes = [...chain].filter((each) => each.isPass);
      for (let place = 1; place < passes.length; place++) arrow(passes[place], passes[place - 1], "#c0392b", 1.5);
    } else {
      const late = last && (last.isPass ? last : [...this.reach(node, "before")].filter((each) => each.isPass
        && this.reach(last, "before").has(each)).reduce((one, other) => !one || other.end > one.end ? other : one, null));
      for (const each of this.reach(node, "before")) if (each.isPass && each !== late) arrow(each, node, "#e08214", 1);
      for (const each of this.reach(node, "after")) if (each.isPass) arrow(node, each, "#2a6fdb", 1);
      if (late) arrow(late, node, "#c0392b", 2);
    }
    if (node.rank === null) return;
    draw.strokeStyle = "#000";
    draw.lineWidth = 1.5;
    const lane = node.isPass ? "compute" : "copy", left = this.x(node.start);
    draw.strokeRect(left, this.top(node.rank, lane), this.x(node.end) - left, this.height[lane]);
  }

  // The text of the box on a pass or communication.
  words(node) {
    const lines = [`${number(node.start)} to ${number(node.end)} (${number(node.end - node.start)})`];
    const name = (each) => each.isPass ? `${each.name} on rank ${each.rank}` : each.name;
    const previous = this.previous(node);
    const idle = node.start - (previous ? previous.end : 0);
    const last = this.decider(node);
    if (node.isPass && idle > 1e-9 * this.makespan && last) lines.push(`rank idle for ${number(idle)}, until ${name(last)}`);
    for (const index of node.before) {
      const each = this.nodes[index];
      lines.push(`waits for ${name(each)}, there at ${number(each.end)}`);
    }
    if (previous) lines.push(`comes after ${previous.name}, ended ${number(previous.end)}`);
    if (node.isPass) {
      const level = (levels) => levels.findLast(([time]) => time <= node.start)?.[1] ?? 0;
      lines.push(`activations held: ${number(level(this.memory[node.rank]))} microbatches`
        + (this.host ? `, in host memory ${number(level(this.host[node.rank]))}` : ""));
    }
    const title = node.isPass ? `${node.name} on rank ${node.rank}: ${node.style.meaning}` : node.name;
    return [title, lines];
  }
}

function tell(x, y) {
  const { view, node } = chosen;
  about.style.display = node ? "block" : "none";
  if (!node) return;
  const [title, lines] = view.words(node);
  const heading = document.createElement("b");
  heading.textContent = title;
  about.replaceChildren(heading, lines.join("\n"));
  about.style.left = `${Math.max(0, Math.min(x + 14, innerWidth - about.offsetWidth - 4))}px`;
  about.style.top = `${y + 18 + about.offsetHeight > innerHeight ? Math.max(0, y - 14 - about.offsetHeight) : y + 18}px`;
}

function choose(view, node, kept) {
  Object.assign(chosen, { view, node, kept, chain: chosen.chain && kept });
  redraw();
  if (!node) return tell();
  const box = view.canvas.getBoundingClientRect();
  tell(box.left + view.x((node.start + node.end) / 2), box.top + view.top(node.rank ?? 0) + view.height.compute);
}

function show(from, until) {
  const span = Math.min(Math.max(until - from, LONGEST / 1e5), LONGEST);
  shown.from = Math.min(Math.max(from, 0), LONGEST - span);
  shown.until = shown.from + span;
  redraw();
}

function zoom(factor, around = (shown.from + shown.until) / 2) {
  show(around - (around - shown.from) / factor, around + (shown.until - around) / factor);
}

function comeInto(node) { // moves the window so that it shows the node
  const span = shown.until - shown.from;
  if (node.start < shown.from || node.end > shown.until) show(node.start - span / 3, node.start + span * 2 / 3);
}

function key(name) {
  const { view, node, kept } = chosen, span = shown.until - shown.from;
  const go = (target) => { if (target) { comeInto(target); choose(view, target, true); } };
  const step = { ArrowLeft: -1, ArrowRight: 1 }[name], other = { ArrowUp: -1, ArrowDown: 1 }[name];
  if (name === "+" || name === "=") zoom(1.5);
  else if (name === "-") zoom(1 / 1.5);
  else if (name === "0") show(0, LONGEST);
  else if (name === "a" || (step === -1 && !kept)) show(shown.from - span / 4, shown.until - span / 4);
  else if (name === "d" || (step === 1 && !kept)) show(shown.from + span / 4, shown.until + span / 4);
  else if (name === "Escape") choose(null, null, false);
  else if (name === "c" && node) { chosen.chain = !chosen.chain; redraw(); }
  else if (step && node.isPass) { const row = view.rows[node.rank].compute; go(row[row.indexOf(node) + step]); }
  else if (other && kept && view.rows[node.rank + other]) {
    go(view.rows[node.rank + other].compute.reduce((near, each) =>
      Math.abs(each.start - node.start) < Math.abs(near.start - node.start) ? each : near));
  } else if (name === "Enter" && kept) {
    let target = view.decider(node);
    while (target && !target.isPass) target = view.decider(target);
    go(target);
  } else return false;
  return true;
}

function redraw(width = document.querySelector("main").clientWidth, ratio = devicePixelRatio) {
  for (const view of views) view.draw(width, ratio);
}

const views = page.schedules.map((each) => new View(each));
const isSeen = (style) => !style.kind || views.some((view) => view.nodes.some((each) => each.style === style && each.end > each.start));
for (const style of page.styles.filter((each) => each.meaning && isSeen(each))) {
  const entry = document.getElementById("legend").appendChild(document.createElement("span"));
  entry.appendChild(document.createElement("i")).style.background = style.colour;
  entry.append(style.meaning);
}

let drag = null;
addEventListener("mousemove", (event) => {
  if (drag) {
    const moved = (event.clientX - drag.x) / (views[0].width - GUTTER) * (drag.until - drag.from);
    drag.far = drag.far || Math.abs(event.clientX - drag.x) > 3;
    if (drag.far) show(drag.from - moved, drag.until - moved);
    return;
  }
  if (chosen.kept) return;
  const view = event.target.view, node = view ? view.at(event.offsetX, event.offsetY) : null;
  if (node !== chosen.node) { Object.assign(chosen, { view, node, chain: false }); redraw(); }
  tell(event.clientX, event.clientY);
});
addEventListener("mousedown", (event) => { if (event.target.view) drag = { x: event.clientX, ...shown }; });
addEventListener("mouseup", (event) => {
  const was = drag;
  drag = null;
  if (!was || was.far || !event.target.view) return;
  const node = event.target.view.at(event.offsetX, event.offsetY);
  choose(node ? event.target.view : null, node, node !== null);
});
addEventListener("wheel", (event) => {
  const view = event.target.view, span = shown.until - shown.from;
  if (!view || !(event.ctrlKey || event.deltaX || event.shiftKey)) return;
  event.preventDefault();
  if (event.ctrlKey) zoom(Math.exp(-event.deltaY / 200), view.time(event.offsetX));
  else show(shown.from + (event.deltaX || event.deltaY) / 1000 * span, shown.until + (event.deltaX || event.deltaY) / 1000 * span);
}, { passive: false });
addEventListener("keydown", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.altKey && key(event.key)) event.preventDefault();
});
for (const button of document.querySelectorAll("button")) button.onclick = () => { key(button.dataset.key); button.blur(); };
addEventListener("resize", () => redraw());
addEventListener("beforeprint", () => redraw(1000, 3)); // a landscape page, in its resolution
addEventListener("afterprint", () => redraw());
redraw();

"use strict";
// Draws the figures of a report from the data beside it. No library, no request: the page is one file.
(() => {
  const COLOURS = 8, NS = "http://www.w3.org/2000/svg";
  const tip = document.createElement("div");
  tip.className = "tip";
  document.body.append(tip);

  const make = (parent, name, attributes = {}, text) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const html = (parent, name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const number = (v) => {
    if (v === null || v === undefined) return "–";
    if (typeof v !== "number") return String(v);
    const size = Math.abs(v);
    if (size > 0 && size < 1e-4) return Number(v.toPrecision(3)).toExponential();
    if (size >= 1e9) return (v / 1e9).toPrecision(3) + " G";
    if (size >= 1e6) return (v / 1e6).toPrecision(3) + " M";
    if (size >= 1e4) return Math.round(v).toLocaleString("en");
    if (size >= 1e3) return String(Math.round(v));
    if (size >= 100 || Number.isInteger(v)) return String(Math.round(v * 100) / 100);
    return String(Number(v.toPrecision(4)));
  };
  const shown = (axis, v) => (axis.percent && typeof v === "number" ? number(100 * v) + " %" : number(v));
  const colour = (i) => `var(--c${i % COLOURS})`;
  const dashes = { solid: "", dashed: "7 4", dotted: "2 4" };
  // One setting has one colour all over a section; where there are more than colours, lines are dashed.
  const coloured = (figure, colours) => figure.series.map((s) => {
    const i = colours[s.name] ?? figure.series.indexOf(s), round = Math.floor(i / COLOURS);
    return { ...s, i, style: s.style !== "solid" || !round ? s.style : round === 1 ? "dashed" : "dotted" };
  });

  // How wide a text of a figure is, in the page's font
  const pen = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.body).fontFamily;
  const wide = (text, size = 12) => { pen.font = `${size}px ${family}`; return pen.measureText(text).width; };
  const widest = (texts, size) => Math.max(0, ...texts.map((text) => wide(String(text), size)));
  // Names differ at their ends more than in the middle
  const short = (name, pixels) => {
    let letters = name.length, found = name;
    while (letters > 3 && wide(found) > pixels) {
      const end = Math.floor(--letters * 0.45);
      found = name.slice(0, letters - 1 - end) + "…" + name.slice(name.length - end);
    }
    return found;
  };
  const wrapped = (text, pixels) => text.split(" ").reduce((lines, word) => {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    return lines.length && wide(longer) <= pixels ? [...lines.slice(0, -1), longer] : [...lines, word];
  }, []);

  // Scales

  const niceTicks = (low, high, wanted) => {
    const span = high - low || 1, raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
    const ticks = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    return ticks;
  };
  const logTicks = (low, high, wanted) => {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), powers = [];
    for (let p = first; p <= last; p++) powers.push(10 ** p);
    const choices = [[1, 2, 5], [1, 3], [1]].map((few) => powers.flatMap((power) => few.map((m) => m * power)).filter((v) => v >= low * 0.999 && v <= high * 1.001));
    const ticks = choices.find((found) => found.length <= wanted + 1) || choices[2];
    if (ticks.length < 3) return niceTicks(low, high, wanted).filter((v) => v > 0);
    const skip = Math.ceil(ticks.length / (wanted + 1));
    return ticks.filter((_, i) => i % skip === 0);
  };
  const apart = (values, at) => values.reduce((kept, v) => (kept.length && Math.abs(at(v) - at(kept[kept.length - 1])) < 30 ? kept : [...kept, v]), []);
  const scaleOf = (axis, values, from, to, wanted) => {
    const log = axis.scale === "log";
    const usable = values.filter((v) => typeof v === "number" && Number.isFinite(v) && (!log || v > 0));
    let low = usable.length ? Math.min(...usable) : log ? 1 : 0, high = usable.length ? Math.max(...usable) : 1;
    if (axis.zero && !log) low = Math.min(low, 0);
    if (low === high) { high = log ? low * 2 : low + (Math.abs(low) || 1); if (!log && !axis.zero) low -= (Math.abs(low) || 1) / 2; }
    if (!log && !axis.tight) { const pad = (high - low) * 0.04; high += pad; if (!(axis.zero && low === 0)) low -= pad; }
    const f = log ? Math.log : (v) => v, a = f(low), b = f(high);
    const at = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
    // A few values that were chosen, such as numbers of workers, are the ticks themselves
    const chosen = axis.values ? apart([...new Set(usable)].sort((p, q) => p - q), at) : [];
    const ticks = chosen.length > 1 ? chosen : log ? logTicks(low, high, wanted) : niceTicks(low, high, wanted);
    return { at, ticks, has: (v) => typeof v === "number" && Number.isFinite(v) && (!log || v > 0) };
  };
  // Of the ticks of a horizontal axis those that have room beside each other
  const besides = (scale, axis) => {
    let end = -Infinity;
    return scale.ticks.filter((v) => {
      const half = wide(shown(axis, v), 11) / 2, fits = scale.at(v) - half > end;
      if (fits) end = scale.at(v) + half + 6;
      return fits;
    });
  };
  const bandOf = (names, from, to) => {
    const step = (to - from) / Math.max(names.length, 1);
    return { step, at: (name) => from + step * (names.indexOf(name) + 0.5) };
  };

  // Frames

  const frame = (svg, figure, width, height, left, bottom, room = 0) => {
    const up = wrapped(figure.y.label, height - bottom - 12);
    const area = { left: left + 14 * up.length, right: width - 12 - room, top: 12, bottom: height - bottom };
    make(svg, "text", { x: (area.left + area.right) / 2, y: height - 4, "text-anchor": "middle" }, figure.x.label);
    up.forEach((line, i) => make(svg, "text", { x: -(area.top + area.bottom) / 2, y: 13 + 14 * i, transform: "rotate(-90)", "text-anchor": "middle" }, line));
    return area;
  };
  const yAxis = (svg, figure, area, y) => {
    for (const v of y.ticks) {
      make(svg, "line", { x1: area.left, x2: area.right, y1: y.at(v), y2: y.at(v), class: "grid" });
      make(svg, "text", { x: area.left - 6, y: y.at(v) + 4, "text-anchor": "end", class: "tick" }, shown(figure.y, v));
    }
  };
  const showTip = (event, lines) => {
    tip.replaceChildren();
    lines.forEach((line, i) => html(tip, i ? "div" : "strong", "", line));
    tip.style.display = "block";
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), y = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
    tip.style.left = `${Math.max(x, 4)}px`;
    tip.style.top = `${Math.max(y, 4)}px`;
  };
  const hideTip = () => { tip.style.display = "none"; };

  // Each line's name at its end, moved apart where they would overlap
  const endLabels = (svg, area, series, x, y, longest) => {
    const labels = series.map((s) => {
      const last = s.x.map((_, k) => k).filter((k) => x.has(s.x[k]) && y.has(s.y[k])).pop();
      return last === undefined ? null : { s, px: x.at(s.x[last]), py: y.at(s.y[last]) };
    }).filter(Boolean).sort((a, b) => a.py - b.py);
    let floor = area.top;
    for (const label of labels) { label.at = Math.max(label.py, floor); floor = label.at + 13; }
    const over = labels.length ? Math.max(labels[labels.length - 1].at - area.bottom, 0) : 0;
    for (const { s, px, py, at } of labels) {
      const stroke = s.ideal ? "var(--quiet)" : colour(s.i), top = at - over;
      make(svg, "line", { x1: px, y1: py, x2: area.right + 5, y2: top, stroke, opacity: 0.35 });
      make(svg, "text", { x: area.right + 8, y: top + 4, style: `fill:${stroke}` }, short(s.name, longest));
    }
  };

  // A name beside each point, where there is room
  const pointLabels = (svg, area, points) => {
    const taken = points.map((p) => [p.px - 5, p.py - 5, p.px + 5, p.py + 5]);
    for (const { s, px, py } of points) {
      const long = wide(s.name, 11);
      const places = [[px + 8, py + 4], [px - 8 - long, py + 4], [px - long / 2, py - 9], [px - long / 2, py + 17], [px + 8, py - 9], [px + 8, py + 17], [px - 8 - long, py - 9], [px - 8 - long, py + 17]];
      const free = places.find(([left, base]) => {
        const box = [left, base - 10, left + long, base + 2];
        return box[0] >= area.left && box[2] <= area.right + 10 && box[1] >= 0 && box[3] <= area.bottom && !taken.some((t) => t[0] < box[2] && box[0] < t[2] && t[1] < box[3] && box[1] < t[3]);
      });
      if (!free) continue;
      taken.push([free[0], free[1] - 10, free[0] + long, free[1] + 2]);
      make(svg, "text", { x: free[0], y: free[1], style: `fill:${colour(s.i)};font-size:11px` }, s.name);
    }
  };

  // Kinds of figures

  const drawLines = (svg, figure, width, height, hidden) => {
    const series = figure.series.filter((s) => !hidden.has(s.name));
    const single = series.length > 1 && series.every((s) => s.x.length === 1);
    const labelled = width > 460 && series.length > 1 && series.length <= 8 && !single;
    const room = labelled ? Math.min(widest(series.map((s) => s.name)) + 10, width * 0.36) : 0;
    const heights = series.flatMap((s) => [...s.y, ...s.low, ...s.high]), ticks = scaleOf(figure.y, heights, height - 44, 12, 6).ticks;
    const left = 14 + widest(ticks.map((v) => shown(figure.y, v)), 11);
    const area = frame(svg, figure, width, height, left, 44, room);
    const x = scaleOf(figure.x, series.flatMap((s) => s.x), area.left, area.right, width < 480 ? 5 : 8);
    const y = scaleOf(figure.y, heights, area.bottom, area.top, 6);
    yAxis(svg, figure, area, y);
    for (const v of besides(x, figure.x)) make(svg, "text", { x: x.at(v), y: area.bottom + 16, "text-anchor": "middle", class: "tick" }, shown(figure.x, v));
    make(svg, "line", { x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom, class: "axis" });
    const points = [];
    for (const s of series) {
      const stroke = s.ideal ? "var(--quiet)" : colour(s.i);
      const good = s.x.map((v, k) => k).filter((k) => x.has(s.x[k]) && y.has(s.y[k]));
      if (s.low.length) {
        const both = good.filter((k) => y.has(s.low[k]) && y.has(s.high[k]));
        const up = both.map((k) => `${x.at(s.x[k])},${y.at(s.high[k])}`), down = both.map((k) => `${x.at(s.x[k])},${y.at(s.low[k])}`).reverse();
        if (both.length > 1) make(svg, "polygon", { points: [...up, ...down].join(" "), fill: stroke, opacity: 0.15 });
      }
      make(svg, "polyline", {
        points: good.map((k) => `${x.at(s.x[k])},${y.at(s.y[k])}`).join(" "), fill: "none", stroke,
        "stroke-width": s.ideal ? 1.5 : 2.2, "stroke-dasharray": dashes[s.style], "stroke-linejoin": "round",
      });
      for (const k of good) {
        if (s.points) make(svg, "circle", { cx: x.at(s.x[k]), cy: y.at(s.y[k]), r: 3.5, fill: stroke });
        points.push({ s, k, px: x.at(s.x[k]), py: y.at(s.y[k]) });
      }
    }
    if (single) pointLabels(svg, area, points);
    if (labelled) endLabels(svg, area, series, x, y, room - 10);
    const mark = make(svg, "circle", { r: 5, fill: "none", stroke: "var(--text)", "stroke-width": 1.5, visibility: "hidden" });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), k = width / box.width;
      const mx = (event.clientX - box.left) * k, my = (event.clientY - box.top) * k;
      let best = null, distance = 40 * 40;
      for (const p of points) { const d = (p.px - mx) ** 2 + (p.py - my) ** 2; if (d < distance) { best = p; distance = d; } }
      if (!best) { hideTip(); mark.setAttribute("visibility", "hidden"); return; }
      for (const [name, value] of [["cx", best.px], ["cy", best.py], ["visibility", "visible"]]) mark.setAttribute(name, value);
      const { s, k: i } = best, spread = s.low.length ? ` (${shown(figure.y, s.low[i])} to ${shown(figure.y, s.high[i])})` : "";
      showTip(event, [s.name, `${figure.x.label}: ${shown(figure.x, s.x[i])}`, `${figure.y.label}: ${shown(figure.y, s.y[i])}${spread}`]);
    });
    svg.addEventListener("pointerleave", () => { hideTip(); mark.setAttribute("visibility", "hidden"); });
  };

  // Names stand at the left, or where there is no room for them above; bars grow to the right.
  const BAR = 22, ABOVE = 17;
  const barNames = (figure) => [...new Set(figure.series.flatMap((s) => s.x))];
  const above = (figure, width) => widest(barNames(figure)) + 10 > width * 0.46;
  const drawBars = (svg, figure, width, height, hidden, stacked) => {
    const series = figure.series.filter((s) => !hidden.has(s.name));
    const names = barNames(figure), over = above(figure, width) ? ABOVE : 0, room = over ? 4 : widest(names) + 10;
    const texts = series.flatMap((s) => s.text), after = texts.length ? Math.min(widest(texts) + 2, width * 0.28) : 0;
    const area = { left: room, right: width - 20 - after, top: 8, bottom: height - 44 };
    make(svg, "text", { x: (area.left + area.right) / 2, y: height - 6, "text-anchor": "middle" }, figure.y.label);
    const total = (name) => series.reduce((sum, s) => sum + (s.y[s.x.indexOf(name)] || 0), 0);
    const values = stacked ? [1] : series.flatMap((s) => [...s.y, ...s.high]);
    const x = scaleOf({ ...figure.y, zero: true, tight: stacked }, [0, ...values], area.left, area.right, width < 480 ? 3 : 6);
    for (const v of besides(x, figure.y)) {
      make(svg, "line", { x1: x.at(v), x2: x.at(v), y1: area.top, y2: area.bottom, class: "grid" });
      make(svg, "text", { x: x.at(v), y: area.bottom + 16, "text-anchor": "middle", class: "tick" }, shown(figure.y, v));
    }
    const band = bandOf(names, area.top, area.bottom), thick = (band.step - over) * 0.74, each = thick / (stacked ? 1 : Math.max(series.length, 1));
    for (const name of names) {
      const long = String(name), middle = band.at(name) + over / 2, begin = band.at(name) - band.step / 2;
      const place = over ? { x: area.left + 4, y: begin + 13 } : { x: area.left - 6, y: middle + 4, "text-anchor": "end" };
      const label = make(svg, "text", place, over ? short(long, width - 8) : long);
      make(label, "title", {}, long);
      let before = 0;
      series.forEach((s, k) => {
        const at = s.x.indexOf(name), v = at < 0 ? null : s.y[at], text = at < 0 ? undefined : s.text[at];
        const top = middle - thick / 2 + (stacked ? 0 : k * each);
        const good = typeof v === "number" && Number.isFinite(v);
        if (text !== undefined) {
          const end = good ? x.at(s.high.length ? s.high[at] : v) : area.left;
          make(svg, "text", { x: end + 6, y: top + each / 2 + 4, class: good ? "tick" : "bad" }, text);
        }
        if (!good) return;
        const left = x.at(stacked ? before : 0), right = x.at(stacked ? before + v : v);
        before += v;
        const bar = make(svg, "rect", { x: left, y: top, width: Math.max(right - left, 0.5), height: Math.max(each - 2, 1), fill: colour(s.i) });
        if (!stacked && s.low.length && s.high[at] > s.low[at]) make(svg, "line", { x1: x.at(s.low[at]), x2: x.at(s.high[at]), y1: top + each / 2, y2: top + each / 2, stroke: "var(--text)", "stroke-width": 1.5 });
        const spread = s.low.length ? ` (${shown(figure.y, s.low[at])} to ${shown(figure.y, s.high[at])})` : "";
        bar.addEventListener("pointermove", (event) => showTip(event, [long, `${s.name}: ${shown(figure.y, v)}${spread}`]));
        bar.addEventListener("pointerleave", hideTip);
      });
    }
    make(svg, "line", { x1: area.left, x2: area.left, y1: area.top, y2: area.bottom, class: "axis" });
  };

  const drawHeat = (svg, figure, width, height) => {
    const area = frame(svg, figure, width, height, 62, 44);
    const columns = [...new Set(figure.cells.map((c) => c.x))], rows = [...new Set(figure.cells.map((c) => c.y))];
    const x = bandOf(columns, area.left, area.right), y = bandOf(rows, area.bottom, area.top);
    const good = figure.cells.map((c) => c.value).filter((v) => typeof v === "number");
    const low = Math.min(...good), high = Math.max(...good);
    for (const c of figure.cells) {
      const share = high > low ? (c.value - low) / (high - low) : 1, failed = c.value === null;
      const box = { x: x.at(c.x) - x.step / 2 + 1, y: y.at(c.y) + y.step / 2 + 1, width: x.step - 2, height: -y.step - 2 };
      const cell = make(svg, "rect", { ...box, fill: failed ? "var(--bad-ground)" : "var(--c0)", opacity: failed ? 1 : 0.12 + 0.78 * share });
      make(svg, "text", { x: x.at(c.x), y: y.at(c.y) + 4, "text-anchor": "middle", class: failed ? "bad" : share > 0.65 ? "over" : "" }, failed ? "✕ " + c.text : c.text);
      cell.addEventListener("pointermove", (event) => showTip(event, [`${figure.x.label} ${c.x}, ${figure.y.label} ${c.y}`, c.tip || c.text]));
      cell.addEventListener("pointerleave", hideTip);
    }
    for (const c of columns) make(svg, "text", { x: x.at(c), y: area.bottom + 16, "text-anchor": "middle", class: "tick" }, String(c));
    for (const r of rows) make(svg, "text", { x: area.left - 6, y: y.at(r) + 4, "text-anchor": "end", class: "tick" }, String(r));
  };

  // The two phases of a ring all-reduce, step by step: who holds how much of the sum of each chunk.
  const drawRing = (svg, figure, width, height, _, state) => {
    const steps = figure.cells, step = state.step % steps.length, now = steps[step], n = now.held.length;
    const radius = Math.min(width, height) / 2 - 56, cx = width / 2, cy = height / 2 + 6;
    make(svg, "text", { x: cx, y: 16, "text-anchor": "middle" }, now.title);
    for (let r = 0; r < n; r++) {
      const angle = (2 * Math.PI * r) / n - Math.PI / 2, px = cx + radius * Math.cos(angle), py = cy + radius * Math.sin(angle);
      const next = (2 * Math.PI * (r + 1)) / n - Math.PI / 2;
      make(svg, "line", { x1: px, y1: py, x2: cx + radius * Math.cos(next), y2: cy + radius * Math.sin(next), class: "grid" });
      const sent = now.sends[r];
      if (sent !== null) {
        const middle = (angle + next) / 2, mx = cx + radius * 0.98 * Math.cos(middle), my = cy + radius * 0.98 * Math.sin(middle);
        make(svg, "circle", { cx: mx, cy: my, r: 9, fill: colour(sent) });
        make(svg, "text", { x: mx, y: my + 4, "text-anchor": "middle", style: "fill:var(--ground)" }, String(sent));
      }
      make(svg, "circle", { cx: px, cy: py, r: 30, fill: "var(--ground)", stroke: "var(--quiet)" });
      make(svg, "text", { x: px, y: py - 14, "text-anchor": "middle", class: "tick" }, `rank ${r}`);
      now.held[r].forEach((share, c) => {
        const each = 44 / n, left = px - 22 + c * each;
        make(svg, "rect", { x: left, y: py - 8, width: each - 1, height: 20, fill: "none", stroke: colour(c), "stroke-width": 0.8 });
        make(svg, "rect", { x: left, y: py + 12 - 20 * share, width: each - 1, height: 20 * share, fill: colour(c) });
      });
    }
  };

  const kinds = {
    lines: drawLines, heat: drawHeat, ring: drawRing,
    bars: (svg, f, w, h, hidden) => drawBars(svg, f, w, h, hidden, false), stacks: (svg, f, w, h, hidden) => drawBars(svg, f, w, h, hidden, true),
  };

  const draw = (figure, node, hidden, state) => {
    const width = Math.max(Math.floor(node.clientWidth - 30), 280);
    const names = barNames(figure).length, rows = names * (figure.kind === "bars" ? figure.series.length : 1);
    const height = figure.kind === "bars" || figure.kind === "stacks" ? 52 + BAR * Math.max(rows, 2) + (above(figure, width) ? ABOVE * names : 0) : Math.round(Math.min(Math.max(width * 0.6, 260), 420));
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", figure.title);
    kinds[figure.kind](svg, figure, width, height, hidden, state);
    node.querySelector(".canvas").replaceChildren(svg);
  };

  const place = (given, parent, colours) => {
    const figure = { ...given, series: coloured(given, colours) };
    const node = html(parent, "figure");
    node.id = figure.name;
    html(node, "h3", "", figure.title);
    if (figure.says) html(node, "p", "says", figure.says);
    html(node, "div", "canvas");
    const begins = new Set(figure.begins), state = { step: 0 };
    const hidden = new Set(begins.size ? figure.series.map((s) => s.name).filter((name) => !begins.has(name)) : []);
    if (figure.series.length > 1) {
      const legend = html(node, "div", "legend"), buttons = [];
      if (begins.size) {
        for (const [label, keep] of [["show all", () => true], ["a few", (name) => begins.has(name)], ["none", () => false]]) {
          const choose = html(legend, "button", "choose", label);
          choose.type = "button";
          choose.addEventListener("click", () => {
            figure.series.forEach((s, k) => { keep(s.name) ? hidden.delete(s.name) : hidden.add(s.name); buttons[k].setAttribute("aria-pressed", String(keep(s.name))); });
            draw(figure, node, hidden, state);
          });
        }
      }
      const first = figure.series.filter((s) => !hidden.has(s.name)); // those that are drawn can be read without scrolling
      [...first, ...figure.series.filter((s) => hidden.has(s.name))].forEach((s) => {
        const button = html(legend, "button", "");
        button.type = "button";
        buttons[figure.series.indexOf(s)] = button;
        button.setAttribute("aria-pressed", String(!hidden.has(s.name)));
        const swatch = html(button, "span", `swatch ${s.style}`);
        swatch.style.borderTopColor = s.ideal ? "var(--quiet)" : colour(s.i);
        html(button, "span", "", s.name);
        button.addEventListener("click", () => {
          hidden.has(s.name) ? hidden.delete(s.name) : hidden.add(s.name);
          button.setAttribute("aria-pressed", String(!hidden.has(s.name)));
          draw(figure, node, hidden, state);
        });
      });
    }
    if (figure.kind === "ring") {
      const tools = html(node, "div", "tools");
      for (const [label, by] of [["◀ step", -1], ["step ▶", 1]]) {
        html(tools, "button", "", label).addEventListener("click", () => { state.step = (state.step + by + figure.cells.length) % figure.cells.length; draw(figure, node, hidden, state); });
      }
      let timer = null;
      const play = html(tools, "button", "", "play");
      play.addEventListener("click", () => {
        if (timer) { clearInterval(timer); timer = null; play.textContent = "play"; return; }
        play.textContent = "stop";
        timer = setInterval(() => { state.step++; draw(figure, node, hidden, state); }, 900);
      });
    }
    if (figure.command) {
      const more = html(node, "details");
      html(more, "summary", "", "How to make it again");
      html(more, "pre", "", figure.command);
    }
    draw(figure, node, hidden, state);
    return () => draw(figure, node, hidden, state);
  };

  // The table

  const tableOf = (data, parent) => {
    const tools = html(parent, "div", "tools"), filter = html(tools, "input");
    filter.type = "search";
    filter.placeholder = "Filter, such as local-sgd 4";
    filter.setAttribute("aria-label", "Filter the table");
    const count = html(tools, "span", "quiet");
    const wrap = html(parent, "div", "table"), table = html(wrap, "table"), head = html(html(table, "thead"), "tr"), body = html(table, "tbody");
    let sorted = { column: null, up: true };
    const fill = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let rows = data.rows.filter((row) => words.every((w) => data.columns.some((c) => String(row[c.key] ?? "").toLowerCase().includes(w))));
      if (sorted.column) {
        const key = sorted.column, sign = sorted.up ? 1 : -1;
        rows = [...rows].sort((a, b) => {
          const [x, y] = [a[key], b[key]];
          if (x === null || x === undefined || y === null || y === undefined) return (x ?? null) === (y ?? null) ? 0 : (x === null || x === undefined ? 1 : -1);
          return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
        });
      }
      body.replaceChildren();
      for (const row of rows) {
        const line = html(body, "tr", row.bad ? "bad" : "");
        for (const c of data.columns) html(line, "td", c.text ? "text" : "", c.text ? row[c.key] ?? "–" : shown(c, row[c.key]));
      }
      count.textContent = `${rows.length} of ${data.rows.length}`;
    };
    for (const c of data.columns) {
      const cell = html(head, "th", c.text ? "text" : "", c.label);
      cell.tabIndex = 0;
      const sort = () => {
        sorted = { column: c.key, up: sorted.column === c.key ? !sorted.up : true };
        for (const other of head.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
        fill();
      };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    }
    filter.addEventListener("input", fill);
    fill();
  };

  // The page

  let redraws = [];
  const show = (data) => {
    document.title = data.title;
    document.querySelector("h1").textContent = data.title;
    const verdict = document.getElementById("verdict"), content = document.getElementById("content");
    verdict.replaceChildren();
    for (const line of data.verdict) html(verdict, "p", "", line);
    content.replaceChildren();
    redraws = [];
    for (const section of data.sections) {
      html(content, "h2", "", section.title);
      if (section.says) html(content, "p", "quiet", section.says);
      if (section.figures.length) {
        const grid = html(content, "div", "figures");
        for (const figure of section.figures) redraws.push(place(figure, grid, section.colours || {}));
      }
      if (section.table) tableOf(section.table, content);
      for (const line of section.notes) html(content, "p", "quiet", line);
    }
    html(content, "p", "quiet", data.made);
  };
  const theme = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; };
  theme(matchMedia("(prefers-color-scheme: dark)").matches);
  document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
  let waiting = null;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => redraws.forEach((redraw) => redraw()), 120); });
  const given = JSON.parse(document.getElementById("data").textContent);
  show(given);
  const live = document.documentElement.dataset.live;
  if (live) {
    const told = (data) => JSON.stringify({ ...data, made: "" }); // the time alone is nothing new
    let last = told(given);
    setInterval(async () => {
      try {
        const data = await (await fetch(live)).json();
        if (told(data) !== last) show(data);
        last = told(data);
      } catch { document.getElementById("verdict").title = "no answer: the watch has ended"; }
    }, 2000);
  }
})();

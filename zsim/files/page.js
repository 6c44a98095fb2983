// Names of series: those that are pressed stand out, all others are faint.
for (const figure of document.querySelectorAll(".figure")) {
  const buttons = [...figure.querySelectorAll(".legend button")];
  const pressed = () => buttons.filter(each => each.getAttribute("aria-pressed") === "true");
  buttons.forEach(button => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    const chosen = pressed().map(each => buttons.indexOf(each));
    figure.querySelectorAll("[data-series]").forEach(group =>
      group.classList.toggle("faint", chosen.length > 0 && !chosen.includes(Number(group.dataset.series))));
  }));
}

// What a bar or a dot is of: its title, at once and where a finger is, too.
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
document.addEventListener("pointermove", event => {
  const shape = event.target, title = shape.querySelector?.(":scope > title");
  if (title && shape.tagName !== "svg") {
    shape.dataset.title = title.textContent;
    title.remove();  // else the browser shows it once more
  }
  const text = shape.closest?.(".drawing, .picture") ? shape.dataset.title : "";
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, document.documentElement.clientWidth - wide - 8))}px`;
  tip.style.top = `${event.clientY + 18 + high > innerHeight ? event.clientY - high - 10 : event.clientY + 18}px`;
});

// A timeline is laid out anew for each width and each part of it that is looked at.
const unpacked = async text => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
const element = (name, attributes, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
};
const ticksOf = (from, to, most) => {
  let step = 10 ** Math.floor(Math.log10((to - from) / most));
  step *= [1, 2, 5, 10].find(factor => (to - from) / (step * factor) <= most);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let at = Math.ceil(from / step); at * step <= to; at += 1) found.push([at * step, (at * step).toFixed(Math.min(digits, 9))]);
  return found;
};
const took = (long, unit) => {
  const units = ["s", "ms", "us", "ns"], at = Math.min(Math.max(0, -Math.floor(Math.log10(long || 1) / 3)), 3 - units.indexOf(unit));
  return `${Number((long * 1000 ** at).toPrecision(3)).toLocaleString("en")} ${units[units.indexOf(unit) + at]}`;
};
const timeline = box => {
  const svg = box.querySelector("svg"), whole = Number(svg.dataset.long), left = Number(svg.dataset.left);
  const bars = [...svg.querySelectorAll("[data-at]")].map(rect => {
    const [start, long] = rect.dataset.at.split(" ").map(Number), [y, tall] = ["y", "height"].map(name => Number(rect.getAttribute(name)));
    const names = rect.dataset.names?.split("|") ?? [];
    rect.dataset.title = `${rect.parentNode.dataset.sort}${names.length ? ` of ${names[0]}` : ""}: ${took(long, svg.dataset.unit)}`;
    return {rect, start, end: start + long, y, tall, names};
  });
  // A bar thinner than a pixel is drawn as thin as it is, or else what is idle would look busy; one alone can be seen.
  const ordered = [...bars].sort((a, b) => a.y - b.y || a.start - b.start);
  ordered.forEach((bar, at) => {
    const [before, after] = [ordered[at - 1], ordered[at + 1]];
    bar.apart = Math.min(before?.y === bar.y ? bar.start - before.end : whole, after?.y === bar.y ? after.start - bar.end : whole);
  });
  const axis = svg.querySelector(".axis"), high = svg.viewBox.baseVal.height, names = element("g", {});
  names.style.pointerEvents = "none";
  const chosen = element("rect", {class: "chosen", y: 0, height: high, width: 0});
  svg.append(names, chosen);
  let [from, to, right] = [0, whole, 0], waits = false;
  const time = x => from + (to - from) * (Math.min(Math.max(x, left), right) - left) / (right - left);
  const draw = () => {
    waits = false;
    const width = Math.max(box.clientWidth, 300), scale = (width - 12 - left) / (to - from);
    right = width - 12;
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.setAttribute("width", width);
    const at = time => left + (time - from) * scale;
    const lines = ticksOf(from, to, Math.max(3, Math.floor(width / 90))).flatMap(([value, text]) => [
      element("line", {x1: at(value), x2: at(value), y1: 4, y2: high - 47, stroke: "#dde2e7"}),
      element("text", {x: at(value), y: high - 32, "font-size": 12, "text-anchor": "middle", fill: "#1f2933"}, text),
    ]);
    const title = `time since the step began, ${svg.dataset.unit}`;
    axis.replaceChildren(...lines, element("text", {x: (left + right) / 2, y: high - 12, "font-size": 12.5, "text-anchor": "middle", fill: "#7b8794"}, title));
    const shown = [];
    for (const bar of bars) {
      const [begin, end] = [Math.max(at(bar.start), left), Math.min(at(bar.end), right)];
      const seen = bar.end > from && bar.start < to;
      bar.rect.style.display = seen ? "" : "none";
      if (!seen) continue;
      const long = bar.apart * scale > 1 ? Math.max(end - begin, .7) : end - begin;
      bar.rect.setAttribute("x", begin);
      bar.rect.setAttribute("width", long > 2 ? long - .4 : long);
      const fits = long > 12 && bar.names.find(name => name && name.length * 7.2 + 4 < long);
      if (fits) shown.push(element("text", {class: "on", x: begin + long / 2, y: bar.y + bar.tall / 2 + 4, "font-size": 11.5, "text-anchor": "middle", fill: "#1f2933"}, fits));
    }
    names.replaceChildren(...shown);
  };
  const soon = () => {
    if (!waits) requestAnimationFrame(draw);
    waits = true;
  };
  const look = (begin, end) => {
    const long = Math.min(Math.max(end - begin, whole / 1e5), whole);
    from = Math.min(Math.max(begin, 0), whole - long);
    to = from + long;
    soon();
  };
  const around = factor => look((from + to) / 2 - (to - from) * factor / 2, (from + to) / 2 + (to - from) * factor / 2);
  const moved = share => look(from + (to - from) * share, to + (to - from) * share);
  const bar = box.insertBefore(document.createElement("div"), svg);
  bar.className = "zoom-buttons";
  for (const [sign, words, act] of [["+", "zoom in", () => around(.5)], ["\u2212", "zoom out", () => around(2)],
    ["\u25c0", "earlier", () => moved(-.5)], ["\u25b6", "later", () => moved(.5)], ["all", "the whole step", () => look(0, whole)]]) {
    const button = bar.appendChild(document.createElement("button"));
    [button.type, button.textContent, button.title] = ["button", sign, words];
    button.addEventListener("click", act);
  }
  let drag = null;
  const place = event => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointerdown", event => {
    drag = {x: place(event), from, to, touch: event.pointerType === "touch"};
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    if (!drag) return;
    const x = place(event);
    if (drag.touch) {
      const shift = (drag.x - x) / (right - left) * (drag.to - drag.from);
      look(drag.from + shift, drag.to + shift);
    } else {
      chosen.setAttribute("x", Math.max(Math.min(x, drag.x), left));
      chosen.setAttribute("width", Math.abs(Math.min(Math.max(x, left), right) - Math.max(drag.x, left)));
    }
  });
  const ended = event => {
    const x = place(event), start = drag;
    drag = null;
    chosen.setAttribute("width", 0);
    if (start && !start.touch && event.type === "pointerup" && Math.abs(x - start.x) > 4) look(...[time(start.x), time(x)].sort((a, b) => a - b));
  };
  svg.addEventListener("pointerup", ended);
  svg.addEventListener("pointercancel", ended);
  svg.addEventListener("dblclick", () => look(0, whole));
  new ResizeObserver(soon).observe(box);
  draw();
};
const packed = [...document.querySelectorAll(".drawing.zoom")].map(async box => {
  box.innerHTML = await unpacked(box.querySelector("script").textContent);
  timeline(box);
});
Promise.all(packed).then(() => document.documentElement.dataset.drawn = "yes");

for (const box of document.querySelectorAll(".pairs")) {
  const {figures: names, runs, errors} = pairs[box.dataset.of];
  const [first, second] = box.querySelectorAll("select");
  const digits = value => value === null ? "" : Number(value.toPrecision(4)).toLocaleString("en");
  const show = () => {
    const [a, b] = [runs[first.value], runs[second.value]];
    box.querySelector("tbody").replaceChildren(...names.map((name, at) => {
      const row = document.createElement("tr"), known = a[1][at] !== null && b[1][at] !== null, change = known ? b[1][at] - a[1][at] : null;
      const share = known && a[1][at] ? (100 * change / a[1][at]).toFixed(1) : "";
      for (const text of [name, digits(a[1][at]), digits(b[1][at]), digits(change), share]) {
        const cell = row.insertCell();
        cell.textContent = text;
        cell.className = row.cells.length > 1 ? "n" : "";
      }
      return row;
    }));
    const relative = b[1][0] / a[1][0] - 1, [less, more] = [Number(first.value), Number(second.value)].sort((x, y) => x - y);
    const error = less === more ? 0 : errors[more][less];
    const how = relative === 0 ? "B takes as long as A" : `B takes ${Math.abs(100 * relative).toFixed(1)} % ${relative < 0 ? "less" : "more"} time than A`;
    box.querySelector(".verdict").textContent = error === null ? `${how}; the error of this ratio is unknown.`
      : Math.max(1 + relative, 1 / (1 + relative)) > 1 + error ? `${how}, more than the error of the ratio (${(100 * error).toFixed(0)} %).`
      : `${how}: within the error of the ratio (${(100 * error).toFixed(0)} %), so it says nothing.`;
  };
  for (const [select, start] of [[first, 0], [second, Math.min(1, runs.length - 1)]]) {
    select.append(...runs.map(([name], at) => new Option(name, at)));
    select.value = start;
    select.addEventListener("change", show);
  }
  show();
}
for (const table of document.querySelectorAll("table:not(.plain)")) {
  table.querySelectorAll("th").forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const numeric = head.classList.contains("n");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((one, other) => numeric
      ? Number(value(one)) - Number(value(other)) : value(one).localeCompare(value(other)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  }));
}

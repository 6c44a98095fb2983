const form = document.querySelector("form"), place = document.getElementById("answer");
const work = document.getElementById("work"), found = work.querySelector(".found");
const bar = work.querySelector("progress"), says = work.querySelector("[role=status]");
const button = name => document.getElementById(name);
let kept = JSON.parse(form.dataset.kept);
if (!Object.keys(kept).length) kept = null;

const values = () => Object.fromEntries(
  [...new FormData(form)].filter(([, value]) => typeof value === "string"));
const query = () => {
  const now = values(), all = new URLSearchParams();
  for (const field of form.elements) {
    // An empty field is written only if its default is not empty.
    if (field.name && (now[field.name] || field.dataset.default)) all.set(field.name, now[field.name]);
  }
  if (kept) {
    const other = Object.keys(kept).filter(name => kept[name] !== now[name]);
    for (const name of other.length ? other : ["model"]) all.set(`kept.${name}`, kept[name]);
  }
  return all.toString();
};

let shown = query(), wanted = shown, asking = null, looking = null, seeking = null;
const gone = "<p class='answer no'>zsim serve does not answer any more.</p>";
const fetched = async (path, signal) => {
  try {
    const got = await fetch(path, {signal});
    if (got.status === 414) return "<p class='answer no'>The address is longer than 64 KiB: shorten the pasted files.</p>";
    return await got.text();
  } catch {
    if (signal && signal.aborted) return null;
    return gone;
  }
};
const more = async () => {
  looking = new AbortController();
  const signal = looking.signal;
  for (const box of place.querySelectorAll("[data-more]")) {
    const text = await fetched(box.dataset.more, signal);
    if (text === null) return;
    if (box.isConnected) box.innerHTML = text;
  }
};
const ask = async () => {
  if (asking) {
    if (wanted !== query()) asking.abort();  // zsim stops what nobody waits for
    return;
  }
  if (looking && shown !== query()) looking.abort();
  while (shown !== query()) {
    wanted = query();
    asking = new AbortController();
    place.classList.add("waits");
    const text = await fetched(`/answer?${wanted}`, asking.signal);
    if (text === null) continue;
    shown = wanted;
    if (wanted === query()) {
      place.innerHTML = text;
      history.replaceState(null, "", `/?${wanted}`);
    }
  }
  place.classList.remove("waits");
  asking = null;
  more();
};
let timer = 0;
form.addEventListener("input", event => {
  work.classList.add("old");  // its answer is to other choices
  const name = event.target.name;
  if (event.target.value && name === "config") form.elements.model.value = "own";
  if (event.target.value && (name === "hardware" || name.startsWith("gpu_"))) form.elements.gpu.value = "own";
  clearTimeout(timer);
  timer = setTimeout(ask, 250);
});
form.addEventListener("submit", event => {
  event.preventDefault();
  ask();
});
for (const file of form.querySelectorAll("[data-into]")) {
  file.addEventListener("change", async event => {
    event.stopPropagation();
    const [chosen] = file.files;
    if (!chosen) return;
    const field = form.elements[file.dataset.into];
    // Its first bytes are enough for the refusal of a file that is too large.
    field.value = await chosen.slice(0, 20000).text();
    file.value = "";
    field.dispatchEvent(new Event("input", {bubbles: true}));
  });
}

const compare = () => {
  button("keep").hidden = !!kept;
  button("drop").hidden = !kept;
};
button("keep").addEventListener("click", () => {
  kept = values();
  compare();
  ask();
});
button("drop").addEventListener("click", () => {
  kept = null;
  compare();
  ask();
});
button("copy").addEventListener("click", async () => {
  history.replaceState(null, "", `/?${query()}`);
  await navigator.clipboard.writeText(location.href);
  button("copy").textContent = "Copied";
  setTimeout(() => { button("copy").textContent = "Copy the address"; }, 1500);
});

const told = (line, begun) => {
  const seconds = `${Math.round((performance.now() - begun) / 1000)} s`;
  if (line.waiting) return `waits for ${line.waiting} other search${line.waiting > 1 ? "es" : ""}, ${seconds}`;
  if (line.done) return `${Math.round(100 * line.done[0] / line.done[1])} %, ${seconds}`;
  return `started, ${seconds}`;
};
const seek = async path => {
  const begun = performance.now(), stop = seeking = new AbortController();
  let line = {}, html = "";
  for (const name of ["search", "curve"]) button(name).disabled = true;
  work.hidden = work.firstElementChild.hidden = false;
  work.classList.remove("old");
  found.replaceChildren();
  bar.removeAttribute("value");
  const clock = setInterval(() => { says.textContent = told(line, begun); }, 500);
  says.textContent = told(line, begun);
  try {
    const got = await fetch(`${path}?${query()}`, {signal: stop.signal});
    if (!got.ok) throw new Error(got.status);
    const reader = got.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "";;) {
      const {done, value} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const text of lines) {
        line = JSON.parse(text);
        if (line.html) html = line.html;
        if (line.done) [bar.value, bar.max] = [Math.min(...line.done), line.done[1]];
        says.textContent = told(line, begun);
      }
    }
    if (!html) html = gone;
  } catch {
    html = stop.signal.aborted ? "<p>The search was cancelled.</p>" : gone;
  }
  clearInterval(clock);
  work.firstElementChild.hidden = true;
  found.innerHTML = html;
  for (const name of ["search", "curve"]) button(name).disabled = false;
};
button("search").addEventListener("click", () => seek("/search"));
button("curve").addEventListener("click", () => seek("/curve"));
button("cancel").addEventListener("click", () => seeking.abort());
compare();
more();

// Shows what the server sends each second. All text goes into text nodes, so that no name of a tier or key is ever markup.
"use strict";
const $ = (id) => document.getElementById(id);
const STUCK_AFTER = 10;

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function number(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 10) / 10);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${number(value)} ${units[at]}`;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${number(seconds)} s`;
  return seconds < 7200 ? `${number(seconds / 60)} min` : `${number(seconds / 3600)} h`;
}

function share(part, whole) {
  return whole ? `${number(100 * part / whole)} %` : "–";
}

function showDegraded(view) {
  const texts = view.degraded ?? [];
  const list = $("degraded");
  if ([...list.children].map((item) => item.textContent).join("\n") === texts.join("\n")) return; // said once, not each second
  list.replaceChildren(...texts.map((text) => element("li", text)));
  $("degraded-section").hidden = !texts.length;
}

function showFigures(view) {
  const rates = view.rates;
  const rows = [
    ["Hit rate", share(rates.hit_blocks, rates.asked_blocks)],
    ["Hit rate since the start", share(view.hit_blocks, view.asked_blocks)],
    ["Blocks looked up", `${number(rates.asked_blocks)} /s`],
    ["Blocks loaded", `${number(rates.loaded_blocks)} /s`],
    ["Blocks stored", `${number(rates.stored_blocks)} /s`],
    ["Copied into tiers", `${bytes(rates.copied_bytes)}/s`],
    ["Hits held", number(view.open_hits)],
    ["In quarantine", number(view.quarantined), view.quarantined > 0],
    ["Mismatches", number(view.mismatches), view.mismatches > 0],
  ];
  $("figures").replaceChildren(...rows.map(([name, value, wrong]) => {
    const cell = element("div");
    cell.append(element("dt", name), element("dd", value, wrong ? { class: "wrong" } : {}));
    return cell;
  }));
}

// Containers are known by their stage and number. A square that is new in a stage slides in from the one before.
const squares = new Map();

function showPipelines(view) {
  const shown = new Set();
  for (const pipeline of view.pipelines) {
    let box = document.querySelector(`[data-pipeline="${CSS.escape(pipeline.name)}"]`);
    if (!box) {
      box = element("div", undefined, { class: "pipeline", "data-pipeline": pipeline.name });
      box.append(element("h3"), element("ol", undefined, { class: "stages" }));
      for (const stage of Object.keys(pipeline.stages)) {
        const item = element("li", undefined, { "data-stage": stage });
        item.append(element("span", stage), element("span", "0", { class: "count" }), element("div", undefined, { class: "squares" }));
        box.lastChild.append(item);
      }
      $("pipelines").append(box);
    }
    box.firstChild.textContent = `${pipeline.name}: ${number(pipeline.used_blocks)} of ${number(pipeline.budget_blocks)} blocks; `
      + `${number(pipeline.complete)} containers complete, ${number(pipeline.cancelled)} cancelled, ${number(pipeline.failed)} failed`;
    for (const [stage, count] of Object.entries(pipeline.stages)) {
      const item = box.querySelector(`[data-stage="${stage}"]`);
      item.querySelector(".count").textContent = number(count);
      fill(item.querySelector(".squares"), pipeline.name, stage, count, view, shown);
    }
  }
  for (const [name, square] of squares) if (!shown.has(name)) { square.remove(); squares.delete(name); }
}

// A view tells of the oldest containers, and not which pipeline each is in: they are drawn where there is only one.
function fill(parent, pipeline, stage, count, view, shown) {
  const known = view.pipelines.length === 1 ? view.oldest.filter((one) => one.stage === stage) : [];
  const drawn = Math.min(count, 48);
  for (let at = 0; at < drawn; at += 1) {
    const one = known[at];
    const name = `${pipeline}/${stage}/${one ? one.number : `#${at}`}`;
    let square = squares.get(name);
    if (!square) { square = element("i"); squares.set(name, square); parent.append(square); }
    square.className = one && one.seconds > STUCK_AFTER ? "stuck" : "";
    square.title = one ? `container ${one.number}, for ${duration(one.seconds)}` : "a container";
    shown.add(name);
  }
}

function showTiers(view) {
  $("tiers").replaceChildren(...view.tiers.map((tier) => {
    const row = element("tr");
    const used = element("td");
    used.append(element("meter", undefined, { min: 0, max: tier.capacity_bytes || 1, value: tier.used_bytes,
      "aria-label": `${share(tier.used_bytes, tier.capacity_bytes)} used` }),
    ` ${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`);
    const state = tier.state === "closed" ? "works" : `left alone (${tier.state.replace("_", " ")}): ${tier.cause}`;
    row.append(element("th", tier.name, { scope: "row" }), used, ...[tier.blocks, tier.loaded, tier.stored, tier.evicted, tier.damaged]
      .map((value) => element("td", number(value))), element("td", state, { class: "text" }));
    return row;
  }));
}

// Rows stay while their container is there: a button that is replaced under the pointer is not clicked.
const rows = new Map();

function showOldest(view) {
  const shown = new Map();
  for (const one of view.oldest.slice(0, 12)) {
    const name = `${one.number} ${one.keys[0]}`;
    const row = rows.get(name) ?? makeRow(one);
    row.title = one.waits_for;
    [one.stage, duration(one.seconds), duration(one.age), one.waits_for].forEach((text, at) => { row.children[at + 1].textContent = text; });
    shown.set(name, row);
  }
  for (const [name, row] of rows) if (!shown.has(name)) { row.remove(); rows.delete(name); }
  for (const [name, row] of shown) if (!rows.has(name)) { $("oldest").append(row); rows.set(name, row); }
  $("nothing").hidden = shown.size > 0;
}

function makeRow(one) {
  const row = element("tr");
  const button = element("button", "Explain", { type: "button", "aria-label": `Explain container ${one.number}` });
  button.addEventListener("click", () => explain(one.keys[0], `container ${one.number}, ${one.blocks} blocks, waits for ${row.title}; its first block: `));
  const cell = element("td");
  cell.append(button);
  row.append(element("th", `${one.number}, ${one.blocks} blocks`, { scope: "row" }), element("td"), element("td"), element("td"),
    element("td", "", { class: "text" }), cell);
  return row;
}

async function explain(key, before = "") {
  $("answer").textContent = "asking";
  if (!$("dialog").open) $("dialog").showModal();
  try {
    const answer = await (await fetch(`explain?key=${encodeURIComponent(key)}`)).json();
    $("answer").textContent = before + (answer.error ?? answer.text);
  } catch (error) {
    $("answer").textContent = `no answer: ${error.message}`;
  }
}

function showPool(map) {
  $("pool-section").hidden = !map;
  if (!map) return;
  $("pool").replaceChildren(...map.regions.map((region) => {
    const figure = element("figure");
    const full = region.used.reduce((sum, cell) => sum + cell, 0) / Math.max(1, region.used.length);
    const canvas = element("canvas", undefined, { role: "img", "aria-label": `region ${region.region_id}: ${number(100 * full)} % full` });
    canvas.width = Math.max(1, region.used.length);
    canvas.height = 48;
    const pen = canvas.getContext("2d");
    const ink = getComputedStyle(document.body).color;
    region.used.forEach((cell, at) => {
      pen.globalAlpha = 1 - 0.75 * region.age[at];
      pen.fillStyle = ink;
      pen.fillRect(at, 48 * (1 - cell), 1, 48 * cell);
    });
    const owner = region.state === "owned" ? region.owner : `${region.owner}, ${region.state}`;
    figure.append(element("figcaption", `region ${region.region_id} of ${owner}: ${bytes(region.length)}, ${number(100 * full)} % full`), canvas);
    return figure;
  }));
}

const events = new EventSource("events");
events.addEventListener("status", (event) => {
  const view = JSON.parse(event.data);
  $("name").textContent = document.title = view.name;
  $("up").textContent = `up for ${duration(view.up_for)}`;
  $("connection").textContent = "live";
  $("connection").className = "";
  showDegraded(view);
  showFigures(view);
  showPipelines(view);
  showTiers(view);
  showOldest(view);
});
events.addEventListener("pool", (event) => showPool(JSON.parse(event.data)));
events.addEventListener("error", () => {
  $("connection").textContent = "no connection: what is shown is old";
  $("connection").className = "lost";
});
$("ask").addEventListener("submit", (event) => { event.preventDefault(); explain($("key").value); });


"use strict";
const PAUSE_MS = 2000, LIMIT_MS = 5000, SPAN_S = 300;
const id = (name) => document.getElementById(name);
const shown = {};
let timer = 0, busy = false, lastAnswer = Date.now(), lastTime = 0;

// Control and format characters could hide or reverse text of peers.
const clean = (text) => String(text).replace(/\p{C}/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");

function make(tag, text, classes) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = clean(text);
  if (classes) element.className = classes;
  return element;
}

function state(word) {
  const ok = ["ok", "healthy", "valid"], bad = ["doubtful", "no peer", "expired", "failed"], warn = ["draining", "expires soon", "degraded"];
  const color = ok.includes(word) ? "ok" : bad.includes(word) ? "bad" : warn.includes(word) ? "warn" : "unknown";
  return make("span", word, "state " + color);
}

function row(head, cells, classes) {
  const tr = make("tr", undefined, classes);
  const th = make("th");
  th.scope = "row";
  th.append(make("bdi", head));
  tr.append(th);
  for (const cell of cells) {
    const td = make("td", undefined, cell === null || typeof cell === "number" || cell.number ? "number" : "");
    if (cell instanceof Node) td.append(cell);
    else if (cell === null || typeof cell === "number") td.textContent = count(cell);
    else td.append(make("bdi", cell.number || cell));
    tr.append(td);
  }
  return tr;
}

function empty(columns, text) {
  const tr = make("tr"), td = make("td", text, "note");
  td.colSpan = columns;
  tr.append(td);
  return tr;
}

// Values that are no numbers are null.
const count = (value) => value === null ? "-" : Math.round(value).toLocaleString("en");
const round = (value, digits) => value === null ? "-" : value.toLocaleString("en", { maximumFractionDigits: digits });

function amount(value, unit) {
  if (value === null) return "-";
  if (unit === "") return count(value);
  if (unit === "/s") return round(value, value < 10 ? 2 : 0) + " /s";
  let power = 0;
  while (value >= 1024 && power < 4) { value /= 1024; power += 1; }
  return round(value, value < 10 ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power] + "/s";
}

function ago(seconds) {
  return seconds < 120 ? Math.floor(seconds) + " s" : Math.floor(seconds / 60) + " min";
}

// Replaces the children of an element if their data have changed, so that a selection of text stays.
function show(name, data, build) {
  const text = JSON.stringify(data);
  if (shown[name] === text) return;
  shown[name] = text;
  id(name).replaceChildren(...build(data));
}

function peerRows({ tunnels, gone }) {
  const rows = [];
  for (const tunnel of tunnels) {
    rows.push(row(tunnel.name, [state(tunnel.health), tunnel.connections, tunnel.dials, "", "", ""], "tunnel"));
    for (const [name, kind, health, connections, address, identifiers] of tunnel.peers) {
      rows.push(row(name, [state(health), connections, "", address, kind, identifiers], "peer"));
    }
    if (tunnel.leftOut > 0) rows.push(empty(7, "and " + count(tunnel.leftOut) + " more peers"));
    for (const peer of gone.filter((peer) => peer.tunnel === tunnel.name)) {
      const since = peer.minutes === 0 ? "less than 1 min" : peer.minutes + " min";
      rows.push(row(peer.name, [state("gone for " + since), { number: "-" }, "", "", peer.kind, ""], "peer gone"));
    }
  }
  return rows;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function curve({ name, unit, now, values }, ages) {
  const box = make("div"), known = values.filter((value) => value !== null);
  const top = Math.max(0, ...known), high = top || 1;
  const label = name + ", last 5 minutes: highest " + amount(top, unit);
  const image = svg("svg", { viewBox: "0 0 300 36", preserveAspectRatio: "none", role: "img", "aria-label": label });
  image.append(svg("line", { class: "base", x1: 0, y1: 35, x2: 300, y2: 35 }));
  // A missing value splits the curve.
  const parts = [[]];
  values.forEach((value, at) => {
    const x = 300 - (300 * ages[at]) / SPAN_S;
    if (value === null) parts.push([]);
    else parts[parts.length - 1].push(x.toFixed(1) + "," + (34 - (32 * value) / high).toFixed(1));
  });
  for (const points of parts) {
    if (points.length > 0) image.append(svg("polyline", { class: "line", points: points.join(" ") }));
  }
  box.append(make("h3", name), make("p", amount(now, unit)), image, make("p", "highest " + amount(top, unit), "top"));
  return box;
}

function counterRows(rows, columns) {
  if (rows.length === 0) return [empty(columns, "none since the start of the server")];
  return rows.map(({ labels: [head, ...more], perSecond, recent, total }) =>
    row(head, [...more, { number: round(perSecond, 2) }, recent, total]));
}

function fileRows(sets) {
  const rows = [];
  for (const set of sets) {
    const last = set.lastReloadOk === null ? "-" : state(set.lastReloadOk ? "ok" : "failed");
    const end = () => [last instanceof Node ? last.cloneNode(true) : last, set.reloads, set.failedReloads];
    for (const { kind, state: word, expires, left } of set.certificates) {
      const date = new Date(expires * 1000);
      const text = Number.isNaN(date.getTime()) ? "-" : date.toISOString().slice(0, 16).replace("T", " ") + " UTC";
      rows.push(row(set.name, [kind, state(word), text, left, ...end()]));
    }
    if (set.certificates.length === 0) rows.push(row(set.name, ["-", "-", "-", "-", ...end()]));
  }
  return rows.length > 0 ? rows : [empty(8, "no files with certificates")];
}

function verdict(word, color, reasons) {
  show("word", [word, color], () => [clean(word)]);
  id("word").className = "state " + color;
  id("verdict").className = color;
  show("reasons", reasons, (all) => all.map((reason) => make("li", reason)));
  document.title = word + " - Culvert server";
}

function render(data) {
  lastAnswer = Date.now();
  lastTime = data.time;
  document.body.className = data.isOld ? "old" : "";
  const ok = data.verdict === "ok";
  verdict(data.verdict, ok ? "ok" : data.isOld ? "bad" : "warn", data.reasons);
  times(data.isOld);
  id("server").textContent = clean(data.server);
  show("facts", data.facts, (facts) => facts.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
  show("peers", { tunnels: data.tunnels, gone: data.gone }, peerRows);
  show("curves", [data.ages, data.curves], ([ages, curves]) => curves.map((it) => curve(it, ages)));
  show("failures", data.failures, (rows) => counterRows(rows, 4));
  show("refusals", data.refusals, (rows) => counterRows(rows, 5));
  show("files", data.fileSets, fileRows);
  id("version").textContent = "Version of the server: " + clean(data.version === null ? "unknown" : data.version);
  id("main").hidden = false;
}

function times(isOld) {
  if (lastTime === 0) return;
  const time = new Date(lastTime * 1000).toLocaleTimeString("en-GB");
  id("when").textContent = (isOld ? "old data, from " : "data from ") + time;
}

function lost(reason) {
  document.body.className = "old";
  verdict("unknown", "bad", [reason]);
  times(true);
}

async function ask() {
  if (busy) return;
  busy = true;
  clearTimeout(timer);
  let data = null;
  try {
    const answer = await fetch("/data" + location.search, { signal: AbortSignal.timeout(LIMIT_MS), cache: "no-store" });
    if (answer.ok) data = await answer.json();
    else if (answer.status === 403) lost("This URL belongs to an earlier run of the command: open the URL that it prints now.");
    else lost("The command answers with an error: " + answer.status + " " + (await answer.text()));
  } catch (error) {
    const since = ago((Date.now() - lastAnswer) / 1000);
    lost("culvert status --web has not answered for " + since + " (" + error.name + "). If it was stopped, start it again, and open its new URL.");
  }
  try {
    if (data !== null) render(data);
  } catch (error) {
    lost("The answer cannot be shown: " + error);
  }
  busy = false;
  if (!document.hidden) timer = setTimeout(ask, PAUSE_MS);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) ask();
});
ask();

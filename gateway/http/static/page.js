"use strict";

const BASE = new URL(".", window.location.href);
const KEY_NAME = "baton-api-key";
const POLL_MS = { live: 1000, other: 5000 };
const LAST_LINES = 40;
const MAX_ROWS = 200;
// Beyond this many workers, a tier is drawn as one cell for each.
const MAX_CARDS = 12;
const MAX_FLIGHTS = 40;
const FLIGHT_MS = 700;
const STAGES = [
  ["tokenize", "tokenize"],
  ["queue", "queue"],
  ["reserve", "reserve"],
  ["prefill", "prefill"],
  ["first_step", "first step"],
];

const byId = (id) => document.getElementById(id);

function made(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function bytes(count) {
  if (count < 1024) return `${count} B`;
  if (count < 1024 ** 2) return `${(count / 1024).toFixed(0)} KiB`;
  if (count < 1024 ** 3) return `${(count / 1024 ** 2).toFixed(1)} MiB`;
  return `${(count / 1024 ** 3).toFixed(1)} GiB`;
}

// Requests, with the key if the server wants one

let key = sessionStorage.getItem(KEY_NAME) ?? "";
let needsKey = key !== "";
let asking = null;

function askForKey() {
  needsKey = true;
  asking ??= new Promise((resolve) => {
    byId("key-fault").textContent = key ? "The server refused that key." : "";
    byId("key").value = "";
    byId("key-dialog").addEventListener(
      "close",
      () => {
        key = byId("key").value;
        sessionStorage.setItem(KEY_NAME, key);
        asking = null;
        resolve();
      },
      { once: true },
    );
    byId("key-dialog").showModal();
  });
  return asking;
}

async function request(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await fetch(new URL(path, BASE), { ...options, headers });
    if (response.status !== 401) return response;
    await askForKey();
  }
}

// Tabs

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const other of tabs) {
    const isChosen = other === tab;
    other.setAttribute("aria-selected", String(isChosen));
    other.tabIndex = isChosen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isChosen;
  }
  const name = tab.getAttribute("aria-controls");
  history.replaceState(null, "", `#${name}`);
  if (name === "live" || name === "memory") poll();
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: (index + 1) % tabs.length,
      ArrowLeft: (index + tabs.length - 1) % tabs.length,
      Home: 0,
      End: tabs.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    tabs[to].focus();
    show(tabs[to]);
  });
}

// Playground

let model = { name: "", has_chat_template: true };
let models = [];
let conversation = [];
let running = null;

const mode = () => document.querySelector("input[name=mode]:checked").value;

function onMode() {
  const isChat = mode() === "chat";
  byId("prompt-label").textContent = isChat ? "Message" : "Prompt";
  byId("forget").hidden = !isChat;
  byId("output").replaceChildren();
  conversation = [];
}

function parameters() {
  const body = {
    model: model.name,
    max_tokens: Number(byId("max_tokens").value),
    temperature: Number(byId("temperature").value),
    top_p: Number(byId("top_p").value),
    stream: true,
    stream_options: { include_usage: true },
    return_timing: true,
  };
  if (byId("seed").value) body.seed = Number(byId("seed").value);
  if (byId("stop").value) body.stop = byId("stop").value;
  return body;
}

function tint(logprob) {
  const probability = Math.exp(logprob);
  return `token p${[0.9, 0.5, 0.2, 0.05].filter((bound) => probability < bound).length}`;
}

// Text may come later than its tokens: those that end within a character wait for the rest of it.
class Writer {
  constructor(output) {
    this.output = output;
    this.tokens = [];
    this.text = "";
  }

  write(text, tokens) {
    this.tokens.push(...tokens);
    if (!text) return;
    this.text += text;
    const spells = this.tokens.map((token) => token.text).join("") === text;
    const pieces = spells ? this.tokens : [this.joined(text)];
    this.tokens = [];
    for (const piece of pieces) {
      const span = made("span", { textContent: piece.text });
      if (piece.logprob !== undefined) {
        span.className = tint(piece.logprob);
        span.title = `${(100 * Math.exp(piece.logprob)).toPrecision(3)} %`;
      }
      this.output.append(span);
    }
    this.output.scrollTop = this.output.scrollHeight;
  }

  joined(text) {
    const logprobs = this.tokens.map((token) => token.logprob);
    return { text, logprob: logprobs.length ? Math.min(...logprobs) : undefined };
  }
}

function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob }) => ({ text: token, logprob }));
  }
  return logprobs.tokens.map((text, i) => ({ text, logprob: logprobs.token_logprobs[i] }));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function begin() {
  const output = byId("output");
  const prompt = byId("prompt").value;
  const body = parameters();
  if (mode() === "chat") {
    conversation.push({ role: "user", content: prompt });
    output.append(
      made("span", { className: "turn", textContent: "You" }),
      made("span", { className: "asked", textContent: prompt }),
      made("span", { className: "turn", textContent: model.name || "Model" }),
    );
    byId("prompt").value = "";
    return ["v1/chat/completions", { ...body, messages: conversation, logprobs: true }];
  }
  output.replaceChildren(made("span", { className: "asked", textContent: prompt }));
  return ["v1/completions", { ...body, prompt, logprobs: 0 }];
}

async function send() {
  const [path, body] = begin();
  const writer = new Writer(byId("output"));
  const outcome = byId("outcome");
  const seen = { usage: null, timing: null, finish: null };
  running = new AbortController();
  setRunning(true);
  outcome.className = "";
  outcome.textContent = "Waiting for the first token";
  try {
    const response = await request(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      take(event, writer, seen);
      running.signal.throwIfAborted(); // more pieces may have come already
    }
    finish(seen);
  } catch (error) {
    outcome.className = error.name === "AbortError" ? "" : "bad";
    outcome.textContent = error.name === "AbortError" ? "Stopped." : error.message;
  } finally {
    running = null;
    setRunning(false);
    if (mode() === "chat" && writer.text) {
      conversation.push({ role: "assistant", content: writer.text });
    }
  }
}

function take(event, writer, seen) {
  seen.usage = event.usage ?? seen.usage;
  seen.timing = event.timing ?? seen.timing;
  const [choice] = event.choices;
  if (!choice) return;
  seen.finish = choice.finish_reason ?? seen.finish;
  const text = choice.text ?? choice.delta.content ?? choice.delta.reasoning_content ?? "";
  writer.write(text, tokensOf(choice.logprobs));
  if (text) byId("outcome").textContent = "Streaming";
}

function finish({ usage, timing, finish: why }) {
  const reason = { stop: "the model ended", length: "the most tokens were reached" }[why] ?? why;
  const parts = [reason ? `Done: ${reason}` : "Done"];
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (timing) {
    const decode_ms = timing.total_ms - timing.time_to_first_token_ms;
    const num = (usage?.completion_tokens ?? 1) - 1;
    if (num > 0) parts.push(`${(decode_ms / num).toFixed(1)} ms a token after the first`);
    showTiming(timing);
  }
  byId("outcome").textContent = `${parts.join(", ")}.`;
}

function showTiming(timing) {
  const parts = STAGES.map(([name, shown], i) => [shown, timing.first_token_ms[name], i + 1]);
  byId("timing").hidden = false;
  byId("timing-label").textContent =
    `First token after ${timing.time_to_first_token_ms.toFixed(1)} ms`;
  byId("timing-bar").replaceChildren(
    ...parts
      .filter(([, ms]) => ms > 0)
      .map(([, ms, stage]) => {
        const part = made("div", { className: `stage-${stage}` });
        part.style.flexGrow = ms;
        return part;
      }),
  );
  byId("timing-parts").replaceChildren(
    ...parts.map(([shown, ms, stage]) =>
      made("li", {}, made("i", { className: `stage-${stage}` }), `${shown} ${ms.toFixed(1)} ms`),
    ),
  );
  byId("timing-handoff").textContent =
    timing.transfer_bytes > 0
      ? `Handed over from ${timing.prefill_worker} to ${timing.decode_worker}: ` +
        `${bytes(timing.transfer_bytes)}, ${timing.transfer_exposed_ms.toFixed(1)} ms of it after ` +
        "the prompt was computed. The first token does not wait for that."
      : `No handoff: ${timing.decode_worker || "one worker"} computed the prompt itself.`;
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("cancel").disabled = !isRunning;
  byId("output").setAttribute("aria-busy", String(isRunning));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("cancel").addEventListener("click", () => running?.abort());
byId("forget").addEventListener("click", onMode);
for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", onMode);
}
byId("tinted").addEventListener("change", ({ target }) => {
  byId("output").classList.toggle("tinted", target.checked);
  byId("tints").hidden = !target.checked;
});
byId("output").classList.add("tinted");

// Live map

const cards = new Map();
let last = null;
let timer = null;
let isPolling = false;

const isLive = () => !byId("live").hidden;
const pollMs = () => (isLive() || isMemory() ? POLL_MS.live : POLL_MS.other);
const kind = (state) => (state === "ready" || state === "draining" ? state : "lost");
const share = (part, all) => `${(100 * (all ? part / all : 0)).toFixed(0)} %`;
const used = (worker) => share(worker.leased_blocks, worker.num_blocks);
// Windowed layers' KV lies apart in some pools.
const memory = (worker) =>
  used(worker) +
  (worker.num_window_slots
    ? `, windows ${share(worker.leased_window_slots, worker.num_window_slots)}`
    : "") +
  worker.kv_tiers.map((tier) => `, ${tier.name} ${held(tier)}`).join("");
// A tier of KV below the device: what it holds, and how often it had what prompts lacked.
const held = (tier) =>
  tier.off_reason || !tier.pays
    ? "off"
    : `${(tier.num_bytes / 2 ** 20).toFixed(0)} MiB` +
      ` (${share(tier.num_hits, tier.num_hits + tier.num_misses)} hits)`;

async function poll() {
  if (isPolling) return;
  isPolling = true;
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      const response = await request("page/live");
      if (!response.ok) throw new Error(`status ${response.status}`);
      onListing(await response.json());
    }
  } catch {
    byId("health").className = "health bad";
    byId("health").textContent = "The gateway does not answer";
  }
  isPolling = false;
  timer = setTimeout(poll, pollMs());
}

function onListing(listing) {
  listing.workers.sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  const names = (some) => some.map((one) => one.name).join("\n");
  if (names(models) !== names(listing.models) || !last) onModels(listing.models);
  const ready = listing.workers.filter((worker) => worker.state === "ready").length;
  const health = `${ready} of ${listing.workers.length} workers ready`;
  if (byId("health").textContent !== health) {
    byId("health").textContent = health;
    byId("health").className = ready ? "health" : "health bad";
  }
  if (last) reportChanges(last.workers, listing.workers);
  drawGateway(listing);
  for (const tier of ["prefill", "decode"]) {
    drawTier(tier, listing.workers.filter((worker) => worker.tier === tier));
  }
  drawHandoffs(listing.handoffs);
  onMemory(listing.workers);
  last = listing;
  if (byId("listing").open) drawRows();
}

function onModels(some) {
  models = some;
  byId("model").hidden = models.length > 1;
  byId("models").parentElement.hidden = models.length === 1;
  byId("models").replaceChildren(
    ...models.map(({ name }) => made("option", { value: name, textContent: name })),
  );
  onModel(models.find(({ name }) => name === model.name) ?? models[0]);
}

byId("models").addEventListener("change", () => {
  onModel(models.find(({ name }) => name === byId("models").value));
  if (!model.has_chat_template) document.querySelector("input[value=completion]").checked = true;
  onMode();
});

function onModel(chosen) {
  model = chosen;
  byId("models").value = model.name;
  byId("model").textContent = model.name;
  const chat = document.querySelector("input[value=chat]");
  chat.disabled = !model.has_chat_template;
  chat.parentElement.title = model.has_chat_template ? "" : "This model has no chat template";
  drawSnippets();
}

function drawGateway({ gateway }) {
  byId("gateway").replaceChildren(
    made("strong", { textContent: "gateway" }),
    made("span", { textContent: `${gateway.num_active} requests under way` }),
    made("span", { textContent: `${gateway.num_waiting} of them wait for workers` }),
  );
}

function drawTier(tier, workers) {
  const box = byId(tier);
  const isDense = workers.length > MAX_CARDS;
  box.classList.toggle("dense", isDense);
  byId(`${tier}-count`).textContent = isDense ? `${workers.length} workers` : "";
  const names = new Set(workers.map((worker) => worker.id));
  for (const [name, card] of cards) {
    if (card.tier === tier && !names.has(name)) {
      card.element.remove();
      cards.delete(name);
    }
  }
  for (const worker of workers) drawWorker(box, worker);
}

function drawWorker(box, worker) {
  const card = cards.get(worker.id) ?? newCard(worker);
  const shows = JSON.stringify(worker);
  if (card.element.parentElement !== box) box.append(card.element);
  if (card.shows === shows) return;
  const percent = used(worker);
  const state = worker.reason ? `${worker.state}: ${worker.reason}` : worker.state;
  card.shows = shows;
  card.tier = worker.tier;
  card.element.className = `worker ${kind(worker.state)}`;
  card.element.title = `${worker.id}: ${state}, KV ${memory(worker)}`;
  card.element.style.setProperty("--used", percent.replace(" ", ""));
  card.state.textContent = state;
  card.load.textContent =
    `${worker.num_running} running, ${worker.num_waiting} waiting, KV ${memory(worker)}`;
  card.fill.style.width = percent.replace(" ", "");
}

function newCard(worker) {
  const card = {
    state: made("span", { className: "state" }),
    load: made("span"),
    fill: made("div"),
    tier: worker.tier,
  };
  card.element = made(
    "div",
    {},
    made("strong", { textContent: worker.id }),
    card.state,
    card.load,
    made("div", { className: "meter" }, card.fill),
  );
  cards.set(worker.id, card);
  return card;
}

function reportChanges(before, after) {
  const states = new Map(before.map((worker) => [worker.id, worker.state]));
  const changes = new Map();
  const add = (change, name) => changes.set(change, [...(changes.get(change) ?? []), name]);
  for (const worker of after) {
    const state = states.get(worker.id);
    if (state === undefined) add("has come", worker.id);
    else if (state !== worker.state) add(`is ${worker.state}`, worker.id);
    states.delete(worker.id);
  }
  for (const name of states.keys()) add("has gone", name);
  for (const [change, names] of changes) {
    const few = names.length <= 3 ? names.join(", ") : `${names.length} workers`;
    report(`${few}: ${change}`);
  }
}

function report(text) {
  const now = new Date();
  const news = byId("news");
  news.prepend(
    made("li", {}, made("time", { dateTime: now.toISOString(), textContent: now.toLocaleTimeString() }), text),
  );
  while (news.childElementCount > LAST_LINES) news.lastElementChild.remove();
}

function drawHandoffs(handoffs) {
  const known = last?.handoffs.total ?? handoffs.total;
  const fresh = handoffs.last.filter(([number]) => number > known).slice(-MAX_FLIGHTS);
  const newest = handoffs.last.at(-1);
  byId("rates").textContent =
    `Handoffs since the gateway started: ${handoffs.total}, ${bytes(handoffs.total_bytes)}` +
    (newest ? `; the last from ${newest[1]} to ${newest[2]}, ${bytes(newest[3])}.` : ".");
  if (!isLive() || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const [i, [, source, target]] of fresh.entries()) {
    fly(source, target, (i * (POLL_MS.live - FLIGHT_MS / 2)) / fresh.length);
  }
}

// From edge to edge where the two stand side by side, else from middle to middle.
function ends(source, target) {
  const map = byId("map").getBoundingClientRect();
  const [from, to] = [source, target].map((name) => cards.get(name)?.element);
  if (!from || !to) return null;
  const [a, b] = [from, to].map((element) => element.getBoundingClientRect());
  const isBeside = a.right < b.left;
  return [
    [(isBeside ? a.right : a.x + a.width / 2) - map.x, a.y + a.height / 2 - map.y],
    [(isBeside ? b.left : b.x + b.width / 2) - map.x, b.y + b.height / 2 - map.y],
  ];
}

function fly(source, target, delay) {
  const found = ends(source, target);
  if (!found) return;
  const [from, to] = found;
  const shape = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    byId("flights").append(element);
    return element;
  };
  const line = shape("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1] });
  const dot = shape("circle", { r: 5 });
  const place = ([x, y]) => ({ transform: `translate(${x}px, ${y}px)` });
  const options = { duration: FLIGHT_MS, delay, easing: "ease-in-out", fill: "backwards" };
  dot.animate([place(from), place(to)], options).finished.finally(() => {
    dot.remove();
    line.animate([{ opacity: 1 }, { opacity: 0 }], 2000).finished.finally(() => line.remove());
  });
}

function drawRows() {
  // Those that somebody should look at come first.
  const order = { lost: 0, draining: 1, ready: 2 };
  const workers = last.workers.toSorted((a, b) => order[kind(a.state)] - order[kind(b.state)]);
  byId("rows").replaceChildren(
    ...workers.slice(0, MAX_ROWS).map((worker) => {
      const cells = [worker.tier, worker.state, worker.num_running, worker.num_waiting];
      return made(
        "tr",
        {},
        made("th", { scope: "row", textContent: worker.id }),
        ...[...cells, memory(worker)].map((text) =>
          made("td", { textContent: text }),
        ),
      );
    }),
  );
  const num = workers.length - MAX_ROWS;
  byId("more-rows").textContent = num > 0 ? `And ${num} more; baton status lists all.` : "";
}

byId("listing").addEventListener("toggle", () => last && drawRows());
document.addEventListener("visibilitychange", () => document.hidden || poll());

// Code

function snippets() {
  const name = JSON.stringify(model.name);
  const url = new URL("v1", BASE).href;
  const shown = needsKey ? "YOUR_KEY" : "none";
  const header = needsKey ? " \\\n  -H 'authorization: Bearer YOUR_KEY'" : "";
  const body = JSON.stringify({ model: model.name, prompt: "def fibonacci(n):", max_tokens: 64 });
  return {
    curl: `curl ${url}/completions${header} \\
  -H 'content-type: application/json' \\
  -d '${body.replaceAll("'", "'\\''")}'`,
    "Python: pip install openai": `from openai import OpenAI

client = OpenAI(base_url="${url}", api_key="${shown}")
stream = client.completions.create(
    model=${name}, prompt="def fibonacci(n):", max_tokens=64, stream=True
)
for event in stream:
    print(event.choices[0].text, end="", flush=True)`,
    "TypeScript: npm install openai": `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${url}", apiKey: "${shown}" });
const stream = await client.completions.create({
  model: ${name},
  prompt: "def fibonacci(n):",
  max_tokens: 64,
  stream: true,
});
for await (const event of stream) process.stdout.write(event.choices[0].text);`,
  };
}

function drawSnippets() {
  byId("snippets").replaceChildren(
    ...Object.entries(snippets()).map(([title, text]) => {
      const copy = made("button", { type: "button", textContent: "Copy" });
      copy.setAttribute("aria-label", `Copy ${title.split(":")[0]}`);
      copy.addEventListener("click", async () => {
        await navigator.clipboard.writeText(text);
        byId("copied").textContent = `Copied: ${title.split(":")[0]}.`;
      });
      return made(
        "article",
        { className: "snippet" },
        made("div", { className: "snippet-head" }, made("h2", { textContent: title }), copy),
        made("pre", { tabIndex: 0 }, made("code", { textContent: text })),
      );
    }),
  );
}

show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
poll();

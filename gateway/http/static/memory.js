"use strict";

// The fleet's KV memory: shares of each tier's blocks since the page was opened, and what tiers
// below the device hold. Uses what page.js defines.

const MAX_SAMPLES = 600;
const CHART = { width: 600, height: 140 };
const SVG = "http://www.w3.org/2000/svg";
const samples = [];

const isMemory = () => !byId("memory").hidden;

function onMemory(workers) {
  const sample = { time_ms: Date.now() };
  for (const tier of ["prefill", "decode"]) {
    const sum = (name) =>
      workers
        .filter((worker) => worker.tier === tier)
        .reduce((total, worker) => total + worker[name], 0);
    sample[tier] = {
      leased: sum("leased_blocks"),
      cached: sum("cached_blocks"),
      blocks: sum("num_blocks"),
    };
  }
  samples.push(sample);
  if (samples.length > MAX_SAMPLES) samples.shift();
  if (isMemory()) drawMemory(workers);
}

function drawMemory(workers) {
  const [first, now] = [samples[0], samples.at(-1)];
  const span = Math.round((now.time_ms - first.time_ms) / 1000);
  byId("memory-span").textContent = `The last ${span} s, since this page was opened.`;
  for (const tier of ["prefill", "decode"]) {
    const { leased, cached, blocks } = now[tier];
    byId(`memory-${tier}-now`).textContent = blocks
      ? `${share(leased, blocks)} of ${blocks} blocks in use, ${share(cached, blocks)} cached`
      : "no worker";
    drawShares(byId(`memory-${tier}`), tier);
  }
  drawKvTiers(workers);
}

// Two areas, one on the other: blocks of sequences, and blocks of prefixes that may be reused.
function drawShares(chart, tier) {
  const [start, end] = [samples[0].time_ms, samples.at(-1).time_ms];
  const points = samples.map((sample) => {
    const { leased, cached, blocks } = sample[tier];
    const high = (count) => CHART.height * (1 - (blocks ? count / blocks : 0));
    const x = end > start ? (CHART.width * (sample.time_ms - start)) / (end - start) : 0;
    return { x, leased: high(leased), both: high(leased + cached) };
  });
  const area = (name, top) => {
    const line = points.map((point) => `${point.x.toFixed(1)},${point[top].toFixed(1)}`);
    const shape = document.createElementNS(SVG, "polygon");
    shape.setAttribute("points", [`0,${CHART.height}`, ...line, `${CHART.width},${CHART.height}`].join(" "));
    shape.setAttribute("class", name);
    return shape;
  };
  chart.replaceChildren(area("cached", "both"), area("leased", "leased"));
}

function drawKvTiers(workers) {
  const held = workers.flatMap((worker) => worker.kv_tiers.map((tier) => ({ worker, tier })));
  byId("no-kv-tiers").hidden = held.length > 0;
  byId("kv-tiers").hidden = held.length === 0;
  byId("kv-tier-rows").replaceChildren(
    ...held.slice(0, MAX_ROWS).map(({ worker, tier }) => {
      const reason = tier.off_reason || (tier.pays ? "" : "recomputing is faster");
      const cells = [
        tier.name,
        reason ? `off: ${reason}` : bytes(tier.num_bytes),
        share(tier.num_hits, tier.num_hits + tier.num_misses),
        tier.num_evictions,
        seconds(tier.saved_ms),
        seconds(tier.lost_ms),
      ];
      return made(
        "tr",
        {},
        made("th", { scope: "row", textContent: worker.id }),
        ...cells.map((text) => made("td", { textContent: text })),
      );
    }),
  );
}

const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;

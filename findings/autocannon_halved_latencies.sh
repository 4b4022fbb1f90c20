#!/usr/bin/env bash
# autocannon 9.0.0 (npm): with a rate (-R or -r) the latencies are false. A server that answers every request in 200 ms has a median of 104 ms.
# The guess was that of the README: latencies are corrected for coordinated omission, so that a stall counts for the requests that it held up, and a
# server that is as fast as the rate asks has the same latencies with and without the correction.
#
# Seen (2026-12-01): the histogram is in milliseconds, and the interval between two requests that it is corrected with is `Math.ceil(1 / rate)`, in seconds
# (lib/run.js): it is 1 at every rate. HdrHistogram takes it for 1 ms, and adds t - 1, t - 2, ..., 1 to each latency of t ms, as if a request had been due in
# every millisecond. 100 answers of 200 ms at a rate of 20 become 20,000 latencies between 1 and 200 ms: the mean and the median are halved, the smallest is
# 1 ms. Each answer also weighs as much as it is long: if one of 100 takes 2 s and the others 20 ms, the 90th percentile is 1,542 ms. With the
# interval of the rate, 250 ms for each connection, it is 40 ms, and 36 without a correction. `ignoreCoordinatedOmission` (-C), which the README advises
# against, and no rate at all are right. Nor are the requests of a rate spread over a second: a connection sends them in a row at its start. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-fund --no-audit --prefix "$folder" autocannon@9.0.0
cat >"$folder/rate.mjs" <<'JAVASCRIPT'
import assert from "node:assert";
import { readFileSync } from "node:fs";
import http from "node:http";
import autocannon from "autocannon";

const changed = "the behaviour has changed";
const { version } = JSON.parse(readFileSync(new URL("node_modules/autocannon/package.json", import.meta.url)));
console.log(`autocannon ${version}`);
let wait, arrivals;
const server = http.createServer((request, response) => {
  const ms = wait(arrivals.length);
  arrivals.push(performance.now());
  setTimeout(() => response.end("ok"), ms);
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const url = `http://127.0.0.1:${server.address().port}`;

function percentile(values, percent) {
  const sorted = values.toSorted((a, b) => a - b);
  return Math.round(sorted[Math.ceil((sorted.length * percent) / 100) - 1]);
}

async function load(name, delay, settings) {
  [wait, arrivals] = [delay, []];
  const times = [];
  const run = autocannon({ url, connections: 10, ...settings });
  run.on("response", (client, status, bytes, ms) => times.push(ms));
  const { latency } = await run;
  const measured = { p50: percentile(times, 50), p90: percentile(times, 90), smallest: Math.floor(Math.min(...times)) };
  console.log(`${name}, ${JSON.stringify(settings)}: ${times.length} answers, median ${measured.p50} ms, 90 % ${measured.p90} ms; reported are`);
  console.log(`  ${latency.totalCount} latencies, median ${latency.p50} ms, 90 % ${latency.p90} ms, smallest ${latency.min} ms`);
  return { measured, reported: latency, times };
}

const steady = () => 200;
for (const settings of [{}, { overallRate: 20, ignoreCoordinatedOmission: true }]) {
  const { measured, reported, times } = await load("all in 200 ms", steady, { amount: 100, ...settings });
  assert(Math.abs(reported.p50 - measured.p50) < 5 && reported.totalCount === times.length && reported.min >= 195);
}
for (const settings of [{ overallRate: 20 }, { connectionRate: 2 }, { connectionRate: 1 }]) {
  const { measured, reported, times } = await load("all in 200 ms", steady, { amount: 100, ...settings });
  assert(reported.p50 < 0.7 * measured.p50 && reported.min === 1 && reported.totalCount > 150 * times.length, changed);
}

const stalls = (request) => (request % 100 === 50 ? 2000 : 20);
const { measured, reported, times } = await load("one of 100 in 2 s, the others in 20 ms", stalls, { amount: 200, overallRate: 40 });
const corrected = times.flatMap((ms) => Array.from({ length: Math.max(1, Math.floor(ms / 250)) }, (_, step) => ms - 250 * step));
console.log(`  with the interval of the rate, 250 ms: ${corrected.length} latencies, 90 % ${percentile(corrected, 90)} ms`);
assert(reported.p90 > 500 && percentile(corrected, 90) < 0.5 * reported.p90, changed);

await load("at once", () => 0, { connections: 1, overallRate: 100, amount: 300 });
const gaps = arrivals.slice(1).map((time, place) => time - arrivals[place]);
const pauses = gaps.filter((gap) => gap > 300).length;
console.log(`gaps between the requests of a connection at 100 a second: median ${percentile(gaps, 50)} ms, and ${pauses} of more than 300 ms`);
assert(pauses >= 2 && percentile(gaps, 50) < 8, changed);
server.close();
JAVASCRIPT
node "$folder/rate.mjs"

// Load on a running service by k6, open loop at one rate, with thresholds.
//
//   K6_NO_USAGE_REPORT=true k6 run -e HOST=http://127.0.0.1:8000 -e RATE=20 -e SECONDS=30 load_tests/k6/predict.js
//
// constant-arrival-rate starts each request at its moment, whether or not those before it are answered. A request
// that could not start, since all virtual users were waiting, is in dropped_iterations, which must be 0.
// Ends with 0 when all thresholds hold and with 99 when one does not.
// TEXTS names a JSON file {"sentences": [...], "reviews": [...]}; LOAD_API_KEY opens a service that needs a key.
// Knows nothing of how the service works: docs/ says what it must answer.

import { check } from "k6";
import { SharedArray } from "k6/data";
import exec from "k6/execution";
import http from "k6/http";
import { Rate } from "k6/metrics";

const HOST = __ENV.HOST || "http://127.0.0.1:8000";
const RATE = Number(__ENV.RATE || 10);
const SECONDS = Number(__ENV.SECONDS || 30);
const SLO_MS = Number(__ENV.SLO_MS || 250);
const MARK = "unrepeatable"; // stands in what is refused, and must not come back
const MOST_TEXTS = 256; // the default of VALENCE_MAX_TEXTS
const HEADERS = __ENV.LOAD_API_KEY ? { Authorization: `Bearer ${__ENV.LOAD_API_KEY}` } : {};

const OWN = {
  sentences: [
    "The service was slow and unhelpful, and I will not come back.",
    "I found the ending quite moving.",
    "This blender is well made, although the price is fair.",
    "The whole cast is better than I had hoped.",
    "A waste of money.",
  ],
  reviews: [
    "I had read the book twice before I saw the film, and I went in with low hopes. ".repeat(4) +
      "The first half hour did not help: it takes its time, and the music is everywhere. " +
      "Then the two leads meet, and from there on it is quiet, funny and rather wise. ".repeat(5),
  ],
};

const given = (name) => (__ENV.TEXTS ? JSON.parse(open(__ENV.TEXTS))[name] : OWN[name]);
const sentences = new SharedArray("sentences", () => given("sentences"));
const reviews = new SharedArray("reviews", () => given("reviews"));

const answered = new Rate("answered"); // of the well-formed requests, 200 and a true body
const refused = new Rate("refused_rightly"); // of the requests that must be refused

export const options = {
  scenarios: {
    predict: {
      executor: "constant-arrival-rate",
      rate: RATE,
      timeUnit: "1s",
      duration: `${SECONDS}s`,
      preAllocatedVUs: Math.min(500, Math.max(20, 2 * RATE)),
      maxVUs: 5000,
    },
  },
  thresholds: {
    "http_req_duration{kind:answered}": [`p(99)<=${SLO_MS}`],
    answered: ["rate>=0.999"],
    refused_rightly: ["rate==1"],
    dropped_iterations: ["count==0"],
  },
  summaryTrendStats: ["min", "med", "p(90)", "p(95)", "p(99)", "max"],
  discardResponseBodies: false,
};

const WRONG = [
  { body: `{"inputs": "${MARK}`, status: 400, code: "bad_request" },
  { body: JSON.stringify({ inputs: Array(MOST_TEXTS + 1).fill(MARK) }), status: 413, code: "too_many_texts" },
  { body: JSON.stringify({ inputs: MARK }), type: "text/plain", status: 415, code: "unsupported_media_type" },
  { body: JSON.stringify({ text: MARK }), status: 422, code: "unprocessable" },
  { body: JSON.stringify({ inputs: "" }), status: 422, code: "text_empty" },
];

const pick = (texts) => texts[Math.floor(Math.random() * texts.length)];

function inputs() {
  const dice = Math.random();
  if (dice < 0.7) return pick(sentences);
  if (dice < 0.85) return pick(reviews);
  return Array.from({ length: 2 + Math.floor(Math.random() * 15) }, () => pick(sentences));
}

function post(body, type, kind) {
  return http.post(`${HOST}/predict`, body, {
    headers: { ...HEADERS, "Content-Type": type },
    tags: { kind },
    timeout: "60s",
  });
}

// The body, or nothing where it is not JSON.
function read(response) {
  try {
    return response.json() || {};
  } catch {
    return {};
  }
}

const isPrediction = (one) =>
  one.scores !== undefined && one.scores[one.label] === one.score && one.score >= 0 && one.score <= 1 && one.tokens > 0;

function askRightly() {
  const asked = inputs();
  const count = Array.isArray(asked) ? asked.length : 1;
  const response = post(JSON.stringify({ inputs: asked }), "application/json", "answered");
  const predictions = read(response).predictions || [];
  answered.add(
    check(response, {
      "answered with 200": (got) => got.status === 200,
      "one true prediction for each text": () => predictions.length === count && predictions.every(isPrediction),
    }),
  );
}

function askWrongly(wrong) {
  const response = post(wrong.body, wrong.type || "application/json", "refused");
  refused.add(
    check(response, {
      "a wrong request is refused as documented": (got) =>
        got.status === wrong.status && read(got).code === wrong.code && !String(got.body).includes(MARK),
    }),
  );
}

export default function () {
  // One request in twenty is wrong, each kind in its turn.
  const number = exec.scenario.iterationInTest;
  if (number % 20 === 10) askWrongly(WRONG[Math.floor(number / 20) % WRONG.length]);
  else askRightly();
}

export function handleSummary(data) {
  const missed = [];
  const lines = Object.entries(data.metrics).map(([name, metric]) => {
    for (const [threshold, result] of Object.entries(metric.thresholds || {})) {
      if (!result.ok) missed.push(`  MISSED  ${name}: ${threshold}`);
    }
    const values = Object.entries(metric.values).map(([key, value]) => `${key} ${Number(value.toFixed(2))}`);
    return `${name}: ${values.join(", ")}`;
  });
  const wanted = /^(http_req_duration\{kind:answered\}|answered|refused_rightly|checks|iterations|dropped_iterations):/;
  const verdict = missed.length ? missed : ["  ok      every threshold holds"];
  const made = { stdout: [...lines.filter((line) => wanted.test(line)), ...verdict, ""].join("\n") };
  if (__ENV.REPORT) made[__ENV.REPORT] = JSON.stringify(data, null, 1);
  return made;
}

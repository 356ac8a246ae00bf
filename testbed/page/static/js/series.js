// Columns for charts: figures of a run over time, in equal steps.
import { cachedTokensAt, countUntil, spansOf } from './run.js';

const [FEWEST, MOST] = [40, 240];

// Returns the middle of each step up to end. In short runs a step is a second: shorter ones would be noisy.
export function stepsUntil(end) {
  const length = Math.max(FEWEST, Math.min(MOST, Math.floor(end)));
  const size = Math.max(end, 1e-6) / length;
  return { size, times: Float64Array.from({ length }, (_, i) => (i + 0.5) * size) };
}

// Returns a quantile of sorted values, as the run's summary has it: on the straight line between the two next to it.
export function quantile(sorted, share) {
  if (!sorted.length) return null;
  const place = share * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(place)], sorted[Math.ceil(place)]];
  return low + (place % 1) * (high - low);
}

// Returns the number of requests waiting (with preempted ones), active and done at every step.
export function requestCounts(run, steps) {
  const n = steps.times.length;
  const [waiting, active, done] = [new Float64Array(n + 1), new Float64Array(n + 1), new Float64Array(n + 1)];
  const place = (at) => Math.max(0, Math.min(n, Math.ceil(at / steps.size - 0.5)));
  for (const session of run.ordered) {
    const end = session.end ? session.end.at : Infinity;
    let [column, from] = [waiting, session.at];
    for (const { at, isPreempted } of [...session.admits, { at: end }]) {
      const until = Math.min(at, end);
      column[place(from)] += 1;
      column[place(Math.min(until, 1e12))] -= 1;
      [column, from] = [isPreempted ? waiting : active, until];
    }
    if (session.end?.status === 'completed') done[place(end)] += 1;
  }
  for (const column of [waiting, active, done]) for (let i = 1; i <= n; i += 1) column[i] += column[i - 1];
  return [waiting, active, done].map((column) => Array.from(column.subarray(0, n)));
}

// Calls take(step, share) for the steps that an interval lies in, with each one's share of it.
function eachShare(from, until, steps, take) {
  const last = steps.times.length - 1;
  const place = (at) => Math.max(0, Math.min(last, Math.floor(at / steps.size)));
  const [first, end] = [place(from), place(until)];
  if (first === end) take(end, 1);
  else {
    for (let step = first; step <= end; step += 1) {
      const [begin, over] = [Math.max(from, step * steps.size), step === end ? until : (step + 1) * steps.size];
      take(step, (over - begin) / (until - from));
    }
  }
}

// Returns how many tokens of a session came from an instant to another. A token counts evenly over the time since the one
// before it, so that figures are smooth where tokens are few; the first one when it comes.
export function tokensBetween(session, from, until) {
  const { times, numbers } = session;
  let found = 0;
  for (let i = countUntil(times, from); i < times.length; i += 1) {
    if (i === 0) found += times[0] <= until ? numbers[0] + 1 : 0;
    else {
      const inside = Math.min(times[i], until) - Math.max(times[i - 1], from);
      const whole = times[i] - times[i - 1];
      if (whole > 0) found += ((numbers[i] - numbers[i - 1]) * Math.max(0, inside)) / whole;
      else if (times[i] <= until) found += numbers[i] - numbers[i - 1];
    }
    if (times[i] > until) break;
  }
  return found;
}

// Returns tokens per second, and the median and 95th percentile of times between tokens, at every step. A token counts
// evenly over the time since the one before it.
export function tokenSeries(run, steps) {
  const n = steps.times.length;
  const gaps = Array.from({ length: n }, () => []);
  const tokens = new Array(n).fill(0);
  for (const session of run.requests.values()) {
    const { times, numbers } = session;
    for (let i = 0; i < times.length; i += 1) {
      const step = Math.min(n - 1, Math.floor(times[i] / steps.size));
      const passed = i ? numbers[i] - numbers[i - 1] : numbers[i] + 1;
      if (!i) tokens[step] += passed;
      else {
        eachShare(times[i - 1], times[i], steps, (place, share) => { tokens[place] += passed * share; });
        gaps[step].push((times[i] - times[i - 1]) / passed);
      }
    }
  }
  gaps.forEach((values) => values.sort((a, b) => a - b));
  return {
    rate: tokens.map((count) => count / steps.size),
    median: gaps.map((values) => quantile(values, 0.5)),
    high: gaps.map((values) => quantile(values, 0.95)),
  };
}

// Returns [instants, values] of a figure of every request, ordered by instant.
function perRequest(run, figure) {
  const points = run.ordered.map(figure).filter((point) => point !== null);
  points.sort((a, b) => a[0] - b[0]);
  return [points.map((point) => point[0]), points.map((point) => point[1])];
}

export function firstTokens(run) {
  return perRequest(run, (session) => (session.times.length ? [session.times[0], session.times[0] - session.at] : null));
}

// Returns a session's time to the first token and per further token up to an instant; null: it has none.
export function timesAt({ at, times, numbers }, t) {
  const last = countUntil(times, t) - 1;
  return {
    ttft: last >= 0 ? times[0] - at : null,
    tpot: last > 0 ? (times[last] - times[0]) / (numbers[last] - numbers[0]) : null,
  };
}

// Returns how long a request waited until its chain was opened; null if it waits still.
export function queueOf(session) {
  const opening = session.openingAt ?? session.admits[0]?.at;
  return opening === undefined ? null : Math.max(0, opening - session.at);
}

export function queues(run) {
  return perRequest(run, (session) => {
    const queue = queueOf(session);
    return queue === null ? null : [session.at + queue, queue];
  });
}

// Returns the sessions and cache bytes of every server at every step: [server][step].
export function serverLoads(run, steps) {
  const n = steps.times.length;
  const make = () => run.header.servers.map(() => new Float64Array(n));
  const [sessions, cache] = [make(), make()];
  for (const session of run.ordered) {
    for (const [server, blocks, from, until] of spansOf(session, run.lastAt)) {
      if (!sessions[server]) continue;
      const last = Math.min(n - 1, Math.floor(until / steps.size));
      for (let step = Math.max(0, Math.floor(from / steps.size)); step <= last; step += 1) {
        const begin = step * steps.size;
        const share = (Math.min(until, begin + steps.size) - Math.max(from, begin)) / steps.size;
        sessions[server][step] += share;
        cache[server][step] += share * blocks * run.header.cache_bytes_per_token * cachedTokensAt(run.header, session, steps.times[step]);
      }
    }
  }
  return { sessions, cache };
}

// Returns the mean of the values within every step; null where there are none.
export function inSteps([instants, values], steps) {
  const n = steps.times.length;
  const [sums, counts] = [new Float64Array(n), new Float64Array(n)];
  instants.forEach((at, i) => {
    const step = Math.min(n - 1, Math.floor(at / steps.size));
    sums[step] += values[i];
    counts[step] += 1;
  });
  return Array.from(sums, (sum, i) => (counts[i] ? sum / counts[i] : null));
}

// Student's t for 95 %, for 1, 2, ... degrees of freedom.
const STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086];

// Returns [lows, highs] of the 95 % interval of the mean over runs at every step; null without two values.
export function interval(columns) {
  const ends = columns[0].map((_, step) => {
    const values = columns.map((column) => column[step]).filter((value) => value !== null);
    const n = values.length;
    if (n < 2) return [null, null];
    const mean = values.reduce((sum, value) => sum + value, 0) / n;
    const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1);
    const half = (STUDENT[n - 2] ?? 1.96 + 2.4 / (n - 1)) * Math.sqrt(variance / n);
    return [Math.max(0, mean - half), mean + half];
  });
  return [ends.map(([low]) => low), ends.map(([, high]) => high)];
}

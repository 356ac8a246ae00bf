// The data of a run, and its state at an instant. testbed/page/history.py describes the updates.

export const ENDED = ['completed', 'failed', 'cancelled', 'interrupted', 'unfinished'];

// Returns how many values of an ascending list are at or before t.
export function countUntil(values, t) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Inserts item into a list that is ordered by at; nearly always at its end.
function insert(list, item) {
  let place = list.length;
  while (place > 0 && list[place - 1].at > item.at) place -= 1;
  list.splice(place, 0, item);
}

export class Run {
  constructor(header) {
    this.header = header;
    this.requests = new Map();
    this.ordered = [];
    this.events = [];
    this.lastAt = 0;
    this.version = 0;
    this.siteOf = new Map([...header.clients, ...header.servers].map(({ name, site }) => [name, site]));
    this.linkChanges = header.changes.map(([at, why, changed]) => ({ at, why: why.startsWith('the end of: ') ? '' : why, changed }));
    this.servers = header.servers.map((server) => [
      { at: -Infinity, state: server.state, first: server.first, last: server.last, factor: 1, kept: [0, 0] },
    ]);
  }

  apply(update) {
    for (const record of update.records) this.applyRecord(record);
    const { request, number, at_s: times } = update.tokens;
    for (let i = 0; i < times.length; i += 1) {
      const session = this.request(request[i]);
      session.times.push(times[i]);
      session.numbers.push(number[i]);
    }
    for (const [index, token, readyAt, hops] of update.parts) {
      this.request(index).parts.push({ token, readyAt, hops });
    }
    for (const [server, at, state, first, last, factor, keptFirst, keptLast] of update.servers) {
      insert(this.servers[server], { at, state, first, last, factor, kept: [keptFirst, keptLast] });
    }
    for (const event of update.events) {
      const at = Number.isFinite(event.at_s) ? event.at_s : -Infinity;
      insert(this.events, { at, event, number: this.events.length });
      if (event.event === 'network-change' && Array.isArray(event.links)) insert(this.linkChanges, this.changeByHand(at, event));
    }
    this.lastAt = Math.max(this.lastAt, update.last_at_s);
    this.version += 1;
  }

  // A change by hand: the links between sites after it, [a, b, rtt, rate, loss], each the worst of its nodes'.
  changeByHand(at, event) {
    const pairs = new Map();
    for (const [from, to, delay, rate, , loss] of event.links) {
      const key = [from, to].sort().join(' ');
      const known = pairs.get(key) || { sites: [this.siteOf.get(from), this.siteOf.get(to)], rtt: 0, rate: Infinity, loss: 0 };
      pairs.set(key, { ...known, rtt: known.rtt + delay, rate: Math.min(known.rate, rate), loss: Math.max(known.loss, loss) });
    }
    const found = new Map();
    for (const { sites, rtt, rate, loss } of pairs.values()) {
      if (sites.includes(undefined)) continue; // a node with a user's program
      const [a, b] = sites.sort((x, y) => x - y);
      const known = found.get(`${a}-${b}`) || [a, b, 0, Infinity, 0];
      found.set(`${a}-${b}`, [a, b, Math.max(known[2], rtt), Math.min(known[3], rate), Math.max(known[4], loss)]);
    }
    const isOver = event.by === 'hand' && event.why.endsWith(': restore by hand');
    return { at, why: isOver ? '' : event.why, changed: [...found.values()] };
  }

  request(index) {
    let session = this.requests.get(index);
    if (!session) {
      session = {
        ...{ index, at: null, client: 0, nIn: 0, nOut: 0, refusals: [], admits: [], openAt: null },
        ...{ changes: [], end: null, times: [], numbers: [], parts: [], spans: null, spansOf: -1 },
      };
      this.requests.set(index, session);
    }
    return session;
  }

  applyRecord([kind, index, at, ...rest]) {
    const session = this.request(index);
    session.spans = null;
    if (kind === 'a') {
      [session.client, session.nIn, session.nOut] = rest;
      session.at = at;
      insert(this.ordered, session);
    } else if (kind === 'x') {
      session.refusals.push({ at, server: rest[0], reason: rest[1], pause: rest[2] });
    } else if (kind === 'm') {
      session.admits.push({ at, hops: rest[0], isPreempted: false });
    } else if (kind === 'v') {
      // It has no chain until the next admission.
      session.admits.push({ at, hops: [], isPreempted: true, server: rest[0], tokens: rest[1] });
    } else if (kind === 'o') {
      session.openingAt = at;
      [session.openAt] = rest;
    } else if (kind === 'e') {
      session.end = { at, status: rest[0], reason: rest[1] };
    } else if (kind === 'd') {
      insert(session.changes, { kind, at, servers: rest[0], blocks: rest[1], position: rest[2], reason: rest[3] });
    } else if (kind === 'r') {
      insert(session.changes, { kind, at, blocks: rest[0], hops: rest[1] });
    } else if (kind === 'p') {
      insert(session.changes, { kind, at, hops: rest[0], failedAt: rest[1] });
    }
  }

  serverAt(server, t) {
    const states = this.servers[server];
    let i = states.length - 1;
    while (i > 0 && states[i].at > t) i -= 1;
    return states[i];
  }
}

// Returns the last admission or preemption of a session up to an instant; null before the first.
function admitAt(session, t) {
  let found = null;
  for (const admit of session.admits) if (admit.at <= t) found = admit;
  return found;
}

// Returns a session's state: future, waiting, active, preempted (waiting again), or how it ended.
export function stateAt(session, t) {
  if (session.at === null || t < session.at) return 'future';
  if (session.end && t >= session.end.at) return session.end.status;
  const admit = admitAt(session, t);
  if (!admit) return 'waiting';
  return admit.isPreempted ? 'preempted' : 'active';
}

// Returns the hops [server, first, last] of a session at an instant, in the order of their blocks.
export function chainAt(session, t) {
  const admit = admitAt(session, t);
  if (!admit) return [];
  let { hops } = admit;
  for (const change of session.changes) {
    if (change.kind === 'r' && change.at >= admit.at && change.at <= t) {
      const [first, last] = change.blocks;
      hops = hops.filter((hop) => hop[1] >= last || hop[2] <= first).concat(change.hops);
    }
  }
  return [...hops].sort((a, b) => a[1] - b[1]);
}

// Returns how often a session lost its cache to others, on all servers or on one.
export function preemptionsAt(session, t, server = null) {
  return session.admits.filter((admit) => admit.isPreempted && admit.at <= t && (server === null || admit.server === server)).length;
}

export function recoveriesAt(session, t) {
  return session.changes.filter((change) => change.kind === 'p' && change.at <= t).length;
}

// Whether a hop has failed and the session does not continue yet.
export function isRecovering(session, t) {
  let failedAt = null;
  for (const change of session.changes) {
    if (change.at > t) break;
    if (change.kind === 'd') failedAt = change.at;
    if (change.kind === 'p') failedAt = null;
  }
  return failedAt !== null && admitAt(session, t)?.at <= failedAt; // a chain opened since is another
}

// Returns how many output tokens a session has at t.
export function tokensAt(session, t) {
  const n = countUntil(session.times, t);
  return n ? session.numbers[n - 1] + 1 : 0;
}

// Returns the parts {token, hops, ...} of a token: of the last one up to it whose parts are known.
export function partsOf(session, token) {
  let found = null;
  for (const parts of session.parts) {
    if (parts.token > token) break;
    found = parts;
  }
  return found || session.parts[0] || null;
}

// Returns how far the token in progress is at t: {share, parts, took}, share from 0 to 1; null if none is.
export function stepAt(session, t) {
  const n = countUntil(session.times, t);
  const parts = partsOf(session, n ? session.numbers[n - 1] + 1 : 0);
  if (!parts) return null;
  const from = n ? session.times[n - 1] : session.parts[0].readyAt;
  let took = 0;
  for (const [, client, up, compute, down] of parts.hops) took += client + up + compute + down;
  // A token that is not finished yet is assumed to take as long as the one before.
  const until = n < session.times.length ? session.times[n] : from + took;
  if (t < from || until <= from) return null;
  return { share: Math.min(1, (t - from) / (until - from)), parts, took };
}

// Returns [server, number of blocks, from, until] for the blocks that a session used over time.
export function spansOf(session, now) {
  if (!session.spans) {
    const marks = [...session.admits.map((admit) => admit.at)];
    for (const change of session.changes) if (change.kind === 'r') marks.push(change.at);
    marks.sort((a, b) => a - b);
    session.spans = marks.map((at, i) => ({ at, until: marks[i + 1] ?? null, hops: chainAt(session, at) }));
  }
  const end = session.end ? session.end.at : now;
  const spans = [];
  for (const { at, until, hops } of session.spans) {
    for (const [server, first, last] of hops) spans.push([server, last - first, at, until ?? end]);
  }
  return spans;
}

// Returns the tokens that a session has cache for: all that it may have, or with paging those so far.
export function cachedTokensAt(header, session, t) {
  const page = header.page_tokens;
  if (!page) return session.nIn + session.nOut;
  return Math.ceil((session.nIn + tokensAt(session, t)) / page) * page;
}

// Returns the sessions and cache bytes of every server, and the sessions by state, at an instant.
export function loadAt(run, t) {
  const servers = run.header.servers.map(() => ({ sessions: 0, cache: 0 }));
  const active = [];
  const waiting = [];
  let done = 0;
  let failed = 0;
  for (const session of run.ordered) {
    if (session.at > t) break;
    const state = stateAt(session, t);
    if (state === 'waiting' || state === 'preempted') waiting.push(session);
    else if (state === 'completed') done += 1;
    else if (state !== 'active') failed += 1;
    else {
      active.push(session);
      const perBlock = run.header.cache_bytes_per_token * cachedTokensAt(run.header, session, t);
      const seen = new Set();
      for (const [server, first, last] of chainAt(session, t)) {
        if (!servers[server]) continue;
        if (!seen.has(server)) servers[server].sessions += 1;
        seen.add(server);
        servers[server].cache += perBlock * (last - first);
      }
    }
  }
  return { servers, active, waiting, done, failed };
}

// Returns by 'a-b' the links [a, b, rtt, rate, loss] at an instant, and why they are not the scenario's.
export function linksAt(run, t) {
  const links = new Map(run.header.links.map((link) => [`${link[0]}-${link[1]}`, { link, why: '' }]));
  for (const { at, why, changed } of run.linkChanges) {
    if (at > t) break;
    for (const link of changed) {
      if (links.has(`${link[0]}-${link[1]}`)) links.set(`${link[0]}-${link[1]}`, { link, why });
    }
  }
  return links;
}

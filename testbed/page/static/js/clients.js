// What each client has had so far: requests, times, and how many met the objectives.
import { h, panel, setText } from './dom.js';
import { percent, seconds } from './format.js';
import { stateAt } from './run.js';
import { quantile, queueOf, timesAt } from './series.js';

const COLUMNS = ['Site', 'Active', 'Waiting', 'Done', 'Not completed', 'TTFT p50', 'TTFT p95', 'Per token p50', 'Per token p95'];
const JUDGED = ['queue', 'ttft', 'tpot', 'e2e']; // metrics that the page has of a request

export class ClientTable {
  constructor(run) {
    this.run = run;
    const { clients, sites } = run.header;
    const [section, body] = panel('clients', 'Clients', 'Times of requests that have ended or are being served.');
    this.section = section;
    const limits = clients.flatMap(({ objectives }) => Object.keys(objectives));
    const judged = limits.length > 0 && limits.every((metric) => JUDGED.includes(metric));
    const names = ['Client', ...COLUMNS, ...(judged ? ['Met'] : [])];
    const heads = names.map((name, i) => h('th', { scope: 'col', class: i > 1 ? 'number' : null, text: name, title: name === 'Met' ? 'Requests that met the objectives, of those that have ended' : null }));
    this.cells = clients.map(() => names.slice(1).map((_, i) => h('td', { class: i ? 'number' : null })));
    this.sites = clients.map(({ site }) => sites[site].name);
    const rows = clients.map(({ name }, i) => h('tr', { 'data-client': name }, h('th', { scope: 'row', text: name }), ...this.cells[i]));
    const table = h('table', { class: 'clients' }, h('thead', {}, h('tr', {}, ...heads)), h('tbody', {}, ...rows));
    body.append(h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Clients' }, table));
  }

  update(t) {
    const found = this.run.header.clients.map(() => ({ active: 0, waiting: 0, done: 0, failed: 0, met: 0, ttft: [], tpot: [] }));
    for (const session of this.run.ordered) {
      if (session.at > t) break;
      this.count(found[session.client], session, t);
    }
    found.forEach((own, i) => {
      own.ttft.sort((a, b) => a - b);
      own.tpot.sort((a, b) => a - b);
      const ended = own.done + own.failed;
      const values = [
        ...[this.sites[i], String(own.active), String(own.waiting), String(own.done), String(own.failed)],
        ...[seconds(quantile(own.ttft, 0.5)), seconds(quantile(own.ttft, 0.95))],
        ...[seconds(quantile(own.tpot, 0.5)), seconds(quantile(own.tpot, 0.95))],
        percent(ended ? own.met / ended : NaN),
      ];
      this.cells[i].forEach((cell, column) => setText(cell, values[column]));
    });
  }

  count(own, session, t) {
    const state = stateAt(session, t);
    if (state === 'active') own.active += 1;
    else if (state === 'waiting' || state === 'preempted') own.waiting += 1;
    else if (state === 'completed') own.done += 1;
    else own.failed += 1;
    const { ttft, tpot } = timesAt(session, t);
    if (ttft !== null) own.ttft.push(ttft);
    if (tpot !== null) own.tpot.push(tpot);
    const { objectives } = this.run.header.clients[session.client];
    if (state !== 'completed') return;
    const values = { queue: queueOf(session) ?? 0, ttft, tpot: tpot ?? 0, e2e: session.end.at - session.at };
    if (Object.entries(objectives).every(([metric, limit]) => values[metric] <= limit)) own.met += 1;
  }
}

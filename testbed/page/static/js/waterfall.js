// The dialog of one request: what happened to it, and the hops of each of its tokens.
import { h, setText } from './dom.js';
import { blocks, count, instant, seconds } from './format.js';
import { partsOf, stateAt } from './run.js';

const PARTS = ['client', 'network', 'compute'];

export class Waterfall {
  constructor(run, source) {
    this.run = run;
    this.source = source;
    this.title = h('h2', { id: 'waterfall-title' });
    this.facts = h('dl', { class: 'facts' });
    this.story = h('ol', { class: 'story' });
    this.number = h('input', { type: 'range', min: '0', 'aria-label': 'Token', on: { input: () => this.draw() } });
    this.label = h('output');
    this.bars = h('div', { class: 'bars' });
    this.note = h('p', { class: 'hint' });
    const close = h('button', { type: 'button', class: 'close', text: 'Close', on: { click: () => this.dialog.close() } });
    this.dialog = h(
      'dialog',
      { 'aria-labelledby': 'waterfall-title', class: 'waterfall', 'data-testid': 'waterfall' },
      h('div', { class: 'dialog-head' }, this.title, close),
      this.facts,
      this.story,
      h('h3', { text: 'Hops of a token' }),
      h('div', { class: 'choose-token' }, this.number, this.label),
      h('ul', { class: 'legend' }, ...PARTS.map((part) => h('li', {}, h('i', { class: `swatch part-${part}` }), part))),
      this.bars,
      this.note,
    );
  }

  async open(session, t) {
    this.session = session;
    this.rows = null;
    setText(this.title, `Request ${session.index}`);
    this.showFacts(session);
    this.number.max = String(Math.max(0, (session.numbers[session.numbers.length - 1] ?? 0)));
    const done = session.times.filter((at) => at <= t).length;
    this.number.value = String(done ? session.numbers[done - 1] : 0);
    this.draw();
    this.dialog.showModal();
    try {
      const rows = await this.source.hops(session.index);
      if (this.session === session && rows && rows.length) {
        this.rows = new Map(rows.map((row) => [row[0], row]));
        this.draw();
      }
    } catch (error) {
      setText(this.note, `The hops cannot be read: ${error.message}`);
    }
  }

  showFacts(session) {
    const first = session.times[0];
    const facts = [
      ['state', stateAt(session, Infinity) + (session.end?.reason ? `: ${session.end.reason}` : '')],
      ['client', this.run.header.clients[session.client]?.name ?? ''],
      ['arrived', instant(session.at)],
      ['tokens', `${session.nIn} in, ${session.nOut} out`],
      ['TTFT', first === undefined ? '–' : seconds(first - session.at)],
      ['refusals', String(session.refusals.length)],
    ];
    this.facts.replaceChildren(...facts.map(([name, value]) => h('div', {}, h('dt', { text: name }), h('dd', { text: value }))));
    const names = (numbers) => numbers.map((number) => this.run.header.servers[number]?.name ?? number).join(', ');
    const lines = [];
    for (const admit of session.admits) {
      if (admit.isPreempted) lines.push([admit.at, `preempted on ${names([admit.server])}: ${count(admit.tokens, 'token')} of cache lost`]);
      else if (admit !== session.admits[0]) lines.push([admit.at, `has a chain again: ${names(admit.hops.map((hop) => hop[0]))}`]);
    }
    for (const change of session.changes) {
      if (change.kind === 'd') lines.push([change.at, `lost ${names(change.servers)} at token ${change.position}: ${change.reason}`]);
      if (change.kind === 'r') lines.push([change.at, `${blocks(...change.blocks)} now on ${names(change.hops.map((hop) => hop[0]))}`]);
      if (change.kind === 'p') lines.push([change.at, `continues ${seconds(change.at - change.failedAt)} after the failure`]);
    }
    lines.sort((a, b) => a[0] - b[0]);
    this.story.replaceChildren(...lines.slice(-12).map(([at, text]) => h('li', {}, h('b', { text: instant(at) }), ` ${text}`)));
  }

  // Returns {list, total, isExact}: a token's hops with the spans of their parts, in seconds from its start.
  hopsOf(token) {
    const row = this.rows?.get(token);
    if (row) {
      const [, , at, hops] = row;
      const readyAt = Math.min(row[1], hops[0]?.[3] ?? row[1]); // a round of drafts may be sent ahead of that
      let from = readyAt;
      const list = hops.map(([server, first, last, sent, arrived, departed, received, replayed]) => {
        const spans = [['client', from, sent], ['network', sent, arrived], ['compute', arrived, departed], ['network', departed, received]];
        from = received;
        return { server, first, last, replayed, spans: spans.map(([part, a, b]) => [part, a - readyAt, b - readyAt]) };
      });
      return { list, total: at - readyAt, isExact: true };
    }
    const parts = partsOf(this.session, token);
    if (!parts) return { list: [], total: 0, isExact: false };
    let from = Math.max(0, -(parts.hops[0]?.[1] ?? 0)); // as above
    const list = parts.hops.map(([server, client, up, compute, down]) => {
      const spans = [];
      for (const [part, took] of [['client', client], ['network', up], ['compute', compute], ['network', down]]) {
        spans.push([part, from, from + took]);
        from += took;
      }
      return { server, first: null, last: null, replayed: 0, spans };
    });
    return { list, total: from, isExact: false };
  }

  // Returns the token with whose hops a token came: in a round of drafts only the first one has any.
  roundOf(token) {
    let first = token;
    while (this.rows && first && !this.rows.get(first)?.[3].length) first -= 1;
    return first;
  }

  draw() {
    const token = Number(this.number.value);
    const first = this.roundOf(token);
    const { list, total, isExact } = this.hopsOf(first);
    const where = token === 0 ? ' (prefill)' : first < token ? `, in the round of token ${first}` : '';
    setText(this.label, `token ${token} of ${this.session.nOut}${where}: ${seconds(total)}`);
    setText(this.note, isExact ? '' : 'Exact to 20 %: the page keeps parts only when they change by more.');
    const span = total || 1;
    this.bars.replaceChildren(
      ...list.map((hop) => {
        const name = this.run.header.servers[hop.server]?.name ?? `server ${hop.server}`;
        const took = hop.spans[hop.spans.length - 1][2] - hop.spans[0][1];
        const label = [hop.first === null ? '' : blocks(hop.first, hop.last), hop.replayed ? `replays ${count(hop.replayed, 'token')}` : ''];
        const track = h('div', { class: 'track' });
        for (const [part, a, b] of hop.spans) {
          if (b <= a) continue;
          const bar = h('i', { class: `part-${part}`, title: `${part}: ${seconds(b - a)}` });
          bar.style.setProperty('left', `${(100 * a) / span}%`);
          bar.style.setProperty('width', `${(100 * (b - a)) / span}%`);
          track.append(bar);
        }
        return h('div', { class: 'bar' }, h('span', { class: 'who' }, name, h('small', { text: label.filter(Boolean).join(', ') })), track, h('span', { class: 'took', text: `${seconds(took)} · ${Math.round((100 * took) / span)} %` }));
      }),
    );
    if (!list.length) this.bars.replaceChildren(h('p', { class: 'empty', text: 'No token yet.' }));
  }
}

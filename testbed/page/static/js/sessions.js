// The list of sessions with chain, position and recoveries; a click shows a session's hops.
import { h, panel, setAttribute, setStyle, setText } from './dom.js';
import { blocks, count, seconds } from './format.js';
import { chainAt, isRecovering, preemptionsAt, recoveriesAt, stateAt, tokensAt } from './run.js';
import { timesAt } from './series.js';

const SHOWN = 100;
const ORDER = { active: 0, waiting: 1, preempted: 1, failed: 2, cancelled: 2, interrupted: 2, unfinished: 2, completed: 3 };

export class SessionList {
  // open(session, button) shows a session's hops; hover(session or null) shows its chain on the map.
  constructor(run, open, hover) {
    this.run = run;
    this.open = open;
    this.hover = hover;
    this.which = 'all';
    this.rows = new Map();
    const [section, body, head] = panel('sessions', 'Sessions');
    this.section = section;
    this.note = h('p', { class: 'hint' });
    const choice = h(
      'select',
      { 'aria-label': 'Which sessions', on: { change: (change) => this.choose(change.target.value) } },
      ...['all', 'active', 'waiting', 'completed', 'not completed'].map((which) => h('option', { value: which, text: which })),
    );
    head.append(this.note, choice);
    this.body = h('tbody');
    this.numbers = ['Queue', 'TTFT', 'Per token', 'Recov.', ...(run.header.page_tokens ? ['Preempt.'] : [])];
    const titles = { 'Recov.': 'Recoveries: how often it lost hops and continued', 'Preempt.': 'Preemptions: how often it lost its cache to others and waited again' };
    const columns = ['Request', 'State', 'Position', 'Chain', ...this.numbers].map((name) => h('th', { scope: 'col', class: this.numbers.includes(name) ? 'number' : null, text: name, title: titles[name] ?? null }));
    const table = h('table', { class: 'sessions' }, h('thead', {}, h('tr', {}, ...columns)), this.body);
    this.empty = h('p', { class: 'empty', text: 'No session yet.' });
    body.append(h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Sessions' }, table, this.empty));
  }

  choose(which) {
    this.which = which;
    this.update(this.t);
  }

  wanted(state) {
    if (state === 'future') return false;
    if (this.which === 'all') return true;
    if (this.which === 'not completed') return ['failed', 'cancelled', 'interrupted', 'unfinished'].includes(state);
    return state === this.which || (this.which === 'waiting' && state === 'preempted');
  }

  update(t) {
    this.t = t;
    const found = [];
    for (const session of this.run.ordered) {
      if (session.at > t) break;
      const state = stateAt(session, t);
      if (this.wanted(state)) found.push([ORDER[state] ?? 2, session, state]);
    }
    found.sort((a, b) => a[0] - b[0] || (a[0] === 3 ? b[1].end.at - a[1].end.at : a[1].at - b[1].at));
    const shown = found.slice(0, SHOWN);
    setText(this.note, found.length > SHOWN ? `${count(found.length, 'session')}, ${SHOWN} shown` : count(found.length, 'session'));
    setAttribute(this.empty, 'class', found.length ? 'empty hidden' : 'empty');
    const wanted = new Set(shown.map(([, session]) => session.index));
    for (const [index, row] of this.rows) {
      if (!wanted.has(index)) {
        row.element.remove();
        this.rows.delete(index);
      }
    }
    let before = null;
    for (const [, session, state] of shown) {
      let row = this.rows.get(session.index);
      if (!row) {
        row = this.row(session);
        this.rows.set(session.index, row);
      }
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== row.element) this.body.insertBefore(row.element, place);
      before = row.element;
      this.updateRow(row, session, state, t);
    }
  }

  row(session) {
    const button = h('button', {
      ...{ type: 'button', class: 'link', text: String(session.index), 'aria-haspopup': 'dialog' },
      ...{ 'aria-label': `Hops of request ${session.index}` },
      on: {
        focus: () => this.hover(session),
        blur: () => this.hover(null),
      },
    });
    const state = h('td');
    const bar = h('div', { class: 'fill' });
    const position = h('span', { class: 'meter-text' });
    const chain = h('td', { class: 'chain' });
    const numbers = this.numbers.map(() => h('td', { class: 'number' }));
    const element = h(
      'tr',
      {
        on: {
          click: () => this.open(session, button),
          mouseenter: () => this.hover(session),
          mouseleave: () => this.hover(null),
        },
      },
      h('th', { scope: 'row' }, button),
      state,
      h('td', {}, h('div', { class: 'cache' }, h('div', { class: 'meter' }, bar), position)),
      chain,
      ...numbers,
    );
    return { element, state, bar, position, chain, numbers, chainText: null };
  }

  updateRow(row, session, state, t) {
    const shown = state === 'active' && isRecovering(session, t) ? 'recovering' : state;
    setText(row.state, shown);
    setAttribute(row.state, 'class', `state ${shown}`);
    if (session.end?.reason) setAttribute(row.state, 'title', session.end.reason);
    const done = tokensAt(session, t);
    setText(row.position, `${done} / ${session.nOut}`);
    setStyle(row.bar, 'width', `${session.nOut ? (100 * done) / session.nOut : 0}%`);
    const hops = chainAt(session, t);
    const chain = JSON.stringify(hops);
    if (chain !== row.chainText) {
      row.chainText = chain;
      row.chain.replaceChildren(...hops.map((hop) => this.hop(hop)));
    }
    const admitted = session.admits[0] && session.admits[0].at <= t;
    const queue = admitted ? (session.openingAt ?? session.admits[0].at) - session.at : t - session.at;
    const { ttft, tpot } = timesAt(session, t);
    const values = [
      seconds(Math.max(0, queue)),
      seconds(ttft),
      seconds(tpot),
      String(recoveriesAt(session, t)),
      String(preemptionsAt(session, t)),
    ];
    row.numbers.forEach((cell, i) => setText(cell, values[i]));
  }

  hop([server, first, last]) {
    const name = this.run.header.servers[server]?.name ?? `server ${server}`;
    return h('span', { class: 'hop', title: blocks(first, last) }, name, h('small', { text: `${first}–${last - 1}` }));
  }
}

// The dialog of one server: its state, and faults by hand.
import { h, setAttribute, setText } from './dom.js';
import { blocks, percent, scaled } from './format.js';
import { preemptionsAt } from './run.js';

// Enables the controls if faults by hand are possible now; otherwise the hint shows why they are not.
export function byHandStatus(hint, controls, status, hasToken) {
  const isPossible = Boolean(status.faults) && hasToken;
  for (const control of controls) control.disabled = !isPossible;
  const why = isPossible ? '' : status.faults ? 'Open the whole printed address, with the part after #, which is the page’s token.' : 'Possible only while a run in real time serves.';
  setText(hint, why);
  setAttribute(hint, 'class', why ? 'hint' : 'hint hidden');
}

export class ServerDialog {
  // source.fault carries out a fault.
  constructor(run, source) {
    this.run = run;
    this.source = source;
    this.server = null;
    this.title = h('h2', { id: 'server-title' });
    this.facts = h('dl', { class: 'facts' });
    this.factor = h('input', { type: 'number', min: '1', step: '0.5', value: '4', 'aria-label': 'Factor of slow' });
    const kinds = run.header.fault_kinds;
    this.buttons = kinds.map((kind) =>
      h('button', { type: 'button', text: kind.name, title: kind.what, 'data-fault': kind.name, on: { click: () => this.act(kind) } }),
    );
    const controls = this.buttons.flatMap((button, i) => (kinds[i].has_factor ? [h('span', { class: 'slow' }, button, '×', this.factor)] : [button]));
    this.said = h('p', { class: 'said', role: 'status' });
    this.why = h('p', { class: 'hint' });
    const close = h('button', { type: 'button', class: 'close', text: 'Close', on: { click: () => this.dialog.close() } });
    this.dialog = h(
      'dialog',
      { 'aria-labelledby': 'server-title', class: 'server', 'data-testid': 'server' },
      h('div', { class: 'dialog-head' }, this.title, close),
      this.facts,
      h('h3', { text: 'Faults by hand' }),
      h('div', { class: 'faults', role: 'group', 'aria-label': 'Faults by hand' }, ...controls),
      this.why,
      this.said,
    );
  }

  open(server) {
    this.server = server;
    setText(this.said, '');
    setText(this.title, this.run.header.servers[server].name);
    this.dialog.showModal();
  }

  setStatus(status, hasToken) {
    byHandStatus(this.why, [...this.buttons, this.factor], status, hasToken);
  }

  update(t, load) {
    if (this.server === null || !this.dialog.open) return;
    const server = this.run.header.servers[this.server];
    const now = this.run.serverAt(this.server, t);
    const used = load.servers[this.server];
    const facts = [
      ['state', now.factor > 1 ? `${now.state}, ×${now.factor}` : now.state],
      ['site', this.run.header.sites[server.site].name],
      ['hardware', server.hardware],
      ['blocks', blocks(now.first, now.last)],
      ['sessions', String(used.sessions)],
      ...(this.run.header.page_tokens ? [['preemptions', String(this.preemptions(t))]] : []),
      ['cache', `${scaled(used.cache, 'B')} of ${scaled(server.cache_bytes, 'B')} (${percent(server.cache_bytes ? used.cache / server.cache_bytes : 0)})`],
    ];
    const key = JSON.stringify(facts);
    if (key === this.factsKey) return;
    this.factsKey = key;
    this.facts.replaceChildren(...facts.map(([name, value]) => h('div', {}, h('dt', { text: name }), h('dd', { text: value }))));
  }

  preemptions(t) {
    return this.run.ordered.reduce((sum, session) => sum + preemptionsAt(session, t, this.server), 0);
  }

  async act(kind) {
    const name = this.run.header.servers[this.server].name;
    setText(this.said, `${kind.name} ${name} …`);
    setAttribute(this.said, 'class', 'said');
    try {
      setText(this.said, `${await this.source.fault(kind.name, name, kind.has_factor ? Number(this.factor.value) : null)}: done`);
    } catch (error) {
      setText(this.said, error.message);
      setAttribute(this.said, 'class', 'said bad');
    }
  }
}

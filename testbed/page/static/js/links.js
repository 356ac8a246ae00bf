// The dialog of the link between two sites: changes by hand.
import { h, setAttribute, setText } from './dom.js';
import { byHandStatus } from './faults.js';

export class LinkDialog {
  // source.link carries out a change.
  constructor(run, source) {
    this.run = run;
    this.source = source;
    this.sites = null;
    this.title = h('h2', { id: 'link-title' });
    const value = (name, unit) => h('label', {}, name, h('input', { type: 'number', min: '0', step: 'any', 'aria-label': name, 'data-unit': unit, 'data-name': name.toLowerCase() }), unit);
    this.values = [value('RTT', 'ms'), value('Rate', 'Mbit/s'), value('Loss', '%')];
    this.inputs = this.values.map((label) => label.querySelector('input'));
    const button = (action, what) => h('button', { type: 'button', text: action, title: what, on: { click: () => this.act(action) } });
    this.buttons = [
      button('cut', 'Lets nothing through'),
      button('restore', 'Restores what the scenario has now'),
      button('set', 'Sets these values; empty ones stay as they are'),
    ];
    this.said = h('p', { class: 'said', role: 'status' });
    this.why = h('p', { class: 'hint' });
    const close = h('button', { type: 'button', class: 'close', text: 'Close', on: { click: () => this.dialog.close() } });
    this.dialog = h(
      'dialog',
      { 'aria-labelledby': 'link-title', class: 'server', 'data-testid': 'link' },
      h('div', { class: 'dialog-head' }, this.title, close),
      h('h3', { text: 'Links by hand, in both directions' }),
      h('div', { class: 'faults', role: 'group', 'aria-label': 'Links by hand' }, ...this.buttons.slice(0, 2)),
      h('div', { class: 'faults', role: 'group', 'aria-label': 'Values' }, ...this.values, this.buttons[2]),
      this.why,
      this.said,
    );
  }

  open(a, b) {
    const { sites } = this.run.header;
    this.sites = [sites[a].name, sites[b].name];
    setText(this.said, '');
    setText(this.title, a === b ? `Inside ${sites[a].name}` : `${sites[a].name} and ${sites[b].name}`);
    this.dialog.showModal();
  }

  setStatus(status, hasToken) {
    byHandStatus(this.why, [...this.buttons, ...this.inputs], status, hasToken);
  }

  async act(action) {
    const [a, b] = this.sites;
    const given = this.inputs.filter((input) => action === 'set' && input.value !== '');
    const values = Object.fromEntries(given.map((input) => [input.dataset.name, `${input.value} ${input.dataset.unit}`]));
    setText(this.said, `${action} …`);
    setAttribute(this.said, 'class', 'said');
    try {
      setText(this.said, `${await this.source.link({ action, a, b, ...values })}: done`);
    } catch (error) {
      setText(this.said, error.message);
      setAttribute(this.said, 'class', 'said bad');
    }
  }
}

// The block bar: a row per server, a column per block, and how many servers offer each block.
import { h, panel, setAttribute, setStyle, setText } from './dom.js';
import { blocks, count, percent } from './format.js';

export const STATE_NAMES = ['joining', 'online', 'draining', 'halted', 'dead', 'absent'];

export class BlockBar {
  // openServer(number, button) opens the dialog of a server.
  constructor(run, openServer) {
    this.run = run;
    const [section, body, head] = panel('block-bar', 'Blocks');
    this.section = section;
    this.summary = h('p', { class: 'hint' });
    head.append(this.summary);
    body.append(this.legend());
    const n = run.header.n_blocks;
    this.cells = Array.from({ length: n }, () => h('i'));
    this.coverage = h('div', { class: 'track coverage', role: 'img' }, ...this.cells);
    this.rows = run.header.servers.map((server, number) => this.row(server, number, openServer));
    const table = h(
      'table',
      { class: 'blocks' },
      h(
        'thead',
        {},
        h(
          'tr',
          {},
          h('th', { scope: 'col', text: 'Server' }),
          h('th', { scope: 'col', class: 'wide' }, h('span', { class: 'axis' }, ...axis(n))),
          h('th', { scope: 'col', class: 'number', text: 'Sessions' }),
          h('th', { scope: 'col', text: 'Cache' }),
        ),
      ),
      h(
        'tbody',
        {},
        h(
          'tr',
          { class: 'coverage-row' },
          h('th', { scope: 'row', text: 'Coverage', title: 'How many servers offer each block' }),
          h('td', {}, this.coverage),
          h('td', { class: 'number' }),
          h('td'),
        ),
        ...this.rows.map((row) => row.element),
      ),
    );
    setStyle(table, '--blocks', String(n));
    body.append(h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Servers and their blocks' }, table));
  }

  legend() {
    const items = STATE_NAMES.map((state) => h('li', {}, h('i', { class: `swatch ${state}` }), state));
    return h('ul', { class: 'legend', 'aria-label': 'Colours of servers' }, ...items);
  }

  row(server, number, openServer) {
    const name = h('button', {
      ...{ class: 'server-name', type: 'button', text: server.name, 'aria-haspopup': 'dialog' },
      on: { click: (event) => openServer(number, event.currentTarget) },
    });
    const site = h('span', { class: 'site', text: this.run.header.sites[server.site].name });
    const label = h('span', { class: 'range-label' });
    const kept = h('div', { class: 'kept' });
    const range = h('div', { class: 'range' }, kept, label);
    const track = h('div', { class: 'track', role: 'img' }, range);
    const sessions = h('td', { class: 'number' });
    const fill = h('div', { class: 'fill' });
    const cacheText = h('span', { class: 'meter-text' });
    const meter = h('div', { class: 'meter' }, fill);
    const element = h(
      'tr',
      { 'data-server': server.name },
      h('th', { scope: 'row' }, name, site),
      h('td', {}, track),
      sessions,
      h('td', {}, h('div', { class: 'cache' }, meter, cacheText)),
    );
    return { element, range, kept, label, track, sessions, fill, cacheText };
  }

  update(t, load) {
    const n = this.run.header.n_blocks;
    const offered = new Array(n).fill(0);
    const states = new Map();
    this.rows.forEach((row, number) => {
      const now = this.run.serverAt(number, t);
      states.set(now.state, (states.get(now.state) || 0) + 1);
      const [first, last] = now.state === 'online' ? [now.first, now.last] : now.kept;
      for (let block = first; block < last; block += 1) offered[block] += 1;
      this.updateRow(row, number, now, load.servers[number]);
    });
    this.updateCoverage(offered);
    const open = STATE_NAMES.filter((state) => states.has(state));
    setText(
      this.summary,
      `${open.map((state) => `${states.get(state)} ${state}`).join(', ')} · ${coverageText(offered)}`,
    );
  }

  updateRow(row, number, now, load) {
    const n = this.run.header.n_blocks;
    const server = this.run.header.servers[number];
    const slow = now.factor > 1 ? `, ×${Number(now.factor.toPrecision(3))} slower` : '';
    const what = `${blocks(now.first, now.last)}, ${now.state}${slow}`;
    setAttribute(row.element, 'data-state', now.state);
    setAttribute(row.range, 'class', `range ${now.state}`);
    setStyle(row.range, 'left', `${(100 * now.first) / n}%`);
    setStyle(row.range, 'width', `${(100 * (now.last - now.first)) / n}%`);
    const width = now.last - now.first || 1;
    setStyle(row.kept, 'display', now.state === 'draining' && now.kept[1] > now.kept[0] ? 'block' : 'none');
    setStyle(row.kept, 'left', `${(100 * (now.kept[0] - now.first)) / width}%`);
    setStyle(row.kept, 'width', `${(100 * (now.kept[1] - now.kept[0])) / width}%`);
    const label = now.state === 'online' ? (now.factor > 1 ? `×${Number(now.factor.toPrecision(3))}` : '') : now.state;
    setText(row.label, label);
    // The label of a narrow range is beside it, on the side with room.
    const isNarrow = width / n < 0.2;
    const side = isNarrow ? (now.last / n > 0.7 ? 'before' : 'after') : 'inside';
    setAttribute(row.label, 'class', `range-label ${side}`);
    setAttribute(row.track, 'aria-label', what);
    setAttribute(row.track, 'title', `${server.name}: ${what}`);
    setText(row.sessions, String(load.sessions));
    const share = server.cache_bytes > 0 ? load.cache / server.cache_bytes : 0;
    setStyle(row.fill, 'width', `${Math.min(100, 100 * share)}%`);
    setAttribute(row.fill, 'class', share > 0.9 ? 'fill full' : 'fill');
    setText(row.cacheText, percent(share));
  }

  updateCoverage(offered) {
    this.cells.forEach((cell, block) => {
      const level = Math.min(offered[block], 5);
      setAttribute(cell, 'class', `level-${level}`);
      setAttribute(cell, 'title', `block ${block}: ${count(offered[block], 'server')}`);
    });
    setAttribute(this.coverage, 'aria-label', coverageText(offered));
  }
}

function axis(n) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((size) => n / size <= 7) || n;
  const ticks = [];
  for (let block = 0; block < n; block += step) {
    const tick = h('span', { text: String(block) });
    setStyle(tick, 'left', `${(100 * block) / n}%`);
    ticks.push(tick);
  }
  return ticks;
}

function coverageText(offered) {
  const missing = offered.filter((servers) => servers === 0).length;
  if (missing) return `${count(missing, 'block')} of ${offered.length} on no server`;
  const least = Math.min(...offered);
  return `every block is on at least ${count(least, 'server')}`;
}

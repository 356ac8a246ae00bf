// The list of events of the run, its servers, links and sessions, up to the shown instant.
import { h, panel, setAttribute, setText } from './dom.js';
import { blocks, count, instant, seconds } from './format.js';

const SHOWN = 200;

const TOPICS = {
  ...Object.fromEntries(
    ['fault', 'fault-over', 'begun', 'left', 'moving', 'drained', 'moved', 'move-lost', 'decided', 'leak', 'node-ended'].map(
      (kind) => [kind, 'servers'],
    ),
  ),
  ...Object.fromEntries(
    ['detected', 're-routed', 'replayed', 'unreachable', 'failed', 'preempted', 'resumed'].map((kind) => [kind, 'sessions']),
  ),
  'network-change': 'links',
};

export const BAD = ['fault', 'detected', 'unreachable', 'failed', 'move-lost', 'node-ended', 'broken', 'leak'];

function text(value) {
  if (Array.isArray(value) && value.every((item) => typeof item === 'string')) return value.join(', ');
  return typeof value === 'string' ? value : JSON.stringify(value);
}

function hops(value) {
  if (!Array.isArray(value)) return '';
  return value.map((hop) => (Array.isArray(hop) ? `${hop[0]} ${hop[1]}–${hop[2] - 1}` : text(hop))).join(', ');
}

function pair(value) {
  return Array.isArray(value) ? blocks(value[0], value[1]) : '';
}

// Returns one line about an event.
export function describe(event) {
  const { event: kind, server } = event;
  switch (kind) {
    case 'fault': {
      const by = event.by === 'hand' ? ' by hand' : event.by === 'itself' ? ' by itself' : '';
      const factor = event.factor ? ` ×${event.factor}` : '';
      const lasts = event.for_s ? `, for ${seconds(event.for_s)}` : '';
      return `${server}: ${event.kind}${factor}${by}${lasts}${event.applies === false ? ' (found nothing to do)' : ''}`;
    }
    case 'fault-over':
      return `${server}: ${event.kind} is over`;
    case 'begun':
      return `${server} serves ${pair(event.blocks)}`;
    case 'left':
      return `${server} has left`;
    case 'moving':
      return `${server} drains: ${pair(event.old)}, then ${pair(event.new)}`;
    case 'drained':
      return `${server} loads its new blocks`;
    case 'moved':
      return `${server} now serves ${pair(event.new)}, no longer ${pair(event.old)}`;
    case 'detected':
      return `request ${event.request}: lost ${text(event.servers)} (${pair(event.blocks)}) at token ${event.position}: ${text(event.reason)}`;
    case 're-routed':
      return `request ${event.request}: ${pair(event.blocks)} now on ${hops(event.hops)}`;
    case 'replayed':
      return `request ${event.request} continues after ${seconds(event.recovery_s ?? event.took_s)}, ${count(event.tokens, 'token')} replayed`;
    case 'preempted':
      return `request ${event.request}: ${server} needed its cache for others, ${count(event.tokens, 'token')} lost`;
    case 'resumed':
      return `request ${event.request} has a chain again and replays ${count(event.tokens, 'token')}`;
    case 'network-change':
      return `${text(event.why)} (${count(event.n_links, 'link')})`;
    case 'network':
      return `network ${event.name}: ${text(event.why)}`;
    case 'serving':
      return 'serving begins';
    case 'stopped':
      return 'the run has ended';
    case 'decided':
      return `new placement decided: ${text(event.servers)}`;
    default: {
      const { event: _, at_s: __, ...rest } = event;
      const details = Object.entries(rest).map(([name, value]) => `${name} ${text(value)}`);
      return `${kind}${details.length ? `: ${details.join(', ')}` : ''}`;
    }
  }
}

export class EventList {
  constructor(run, seek) {
    this.run = run;
    this.seek = seek;
    this.topic = 'all';
    const [section, body, head] = panel('events', 'Events');
    this.section = section;
    this.note = h('p', { class: 'hint' });
    const choice = h(
      'select',
      { 'aria-label': 'Which events', on: { change: (change) => this.choose(change.target.value) } },
      ...['all', 'servers', 'sessions', 'links', 'run'].map((topic) => h('option', { value: topic, text: topic })),
    );
    head.append(this.note, choice);
    this.list = h('ol', { class: 'events', reversed: true });
    this.empty = h('p', { class: 'empty', text: 'Nothing yet.' });
    body.append(h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Events' }, this.list, this.empty));
    this.shown = '';
  }

  choose(topic) {
    this.topic = topic;
    this.shown = '';
    this.update(this.t);
  }

  update(t) {
    this.t = t;
    const all = this.run.events.filter(
      ({ at, event }) => at <= t && (this.topic === 'all' || (TOPICS[event.event] || 'run') === this.topic),
    );
    const last = all.slice(-SHOWN).reverse();
    const key = `${this.topic} ${all.length} ${last[0]?.number ?? ''}`;
    if (key === this.shown) return;
    this.shown = key;
    setText(this.note, all.length > SHOWN ? `${all.length} so far, the last ${SHOWN} shown` : `${all.length} so far`);
    setAttribute(this.empty, 'class', all.length ? 'empty hidden' : 'empty');
    this.list.replaceChildren(...last.map((entry) => this.entry(entry)));
  }

  entry({ at, event }) {
    const isTimed = Number.isFinite(at);
    const time = h('button', {
      ...{ type: 'button', class: 'time', text: isTimed ? instant(at) : 'before', disabled: !isTimed },
      ...{ title: 'Show this instant', on: { click: () => this.seek(at) } },
    });
    const topic = TOPICS[event.event] || 'run';
    const kind = this.run.header.fault_kinds.find(({ name }) => name === event.kind);
    const isBad = BAD.includes(event.event) && kind?.is_bad !== false;
    return h(
      'li',
      { class: isBad ? 'bad' : `topic-${topic}` },
      time,
      h('span', { class: 'mark', 'aria-hidden': 'true' }),
      h('span', { class: 'what', text: describe(event) }),
    );
  }
}

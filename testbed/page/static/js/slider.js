// Play, pause, speed, and a slider for the shown instant, with marks for the events of the run.
import { colour, fitCanvas, h, setAttribute, setText } from './dom.js';
import { instant } from './format.js';
import { SPEEDS } from './player.js';
import { BAD } from './events.js';

const STEPS = 10000;

export class TimeSlider {
  constructor(run, player) {
    this.run = run;
    this.player = player;
    this.isLive = false;
    this.drawn = '';
    this.button = h('button', { type: 'button', class: 'play', on: { click: () => this.toggle() } });
    this.range = h('input', {
      ...{ type: 'range', min: '0', max: String(STEPS), step: '1', 'aria-label': 'Time in the run' },
      on: {
        input: (event) => player.seek((event.target.value / STEPS) * player.end),
        keydown: (event) => this.key(event),
      },
    });
    this.marks = h('canvas', { class: 'marks', 'aria-hidden': 'true' });
    this.now = h('output', { class: 'now', 'aria-live': 'off' });
    this.end = h('span', { class: 'end' });
    this.speed = h(
      'select',
      { 'aria-label': 'Speed', on: { change: (event) => this.setSpeed(Number(event.target.value)) } },
      ...SPEEDS.map((speed) => h('option', { value: speed, text: `${speed}×`, selected: speed === player.speed })),
    );
    this.live = h('button', { type: 'button', class: 'live', text: 'Live', on: { click: () => player.follow() } });
    this.section = h(
      'section',
      { class: 'time-slider', 'data-testid': 'time-slider', 'aria-label': 'Time' },
      this.button,
      h('div', { class: 'times' }, this.now, this.end),
      h('div', { class: 'rail' }, this.marks, this.range),
      this.speed,
      this.live,
    );
  }

  setSpeed(speed) {
    this.player.speed = speed;
  }

  toggle() {
    if (this.player.isPlaying || this.player.isFollowing) this.player.pause();
    else this.player.play();
  }

  // Arrow keys move by one second, with shift by ten. The slider's own steps differ from run to run.
  key(event) {
    const sign = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!sign) return;
    event.preventDefault();
    this.player.seek(this.player.t + sign * (event.shiftKey ? 10 : 1));
  }

  setLive(isLive) {
    this.isLive = isLive;
    setAttribute(this.live, 'class', isLive ? 'live' : 'live hidden');
  }

  update() {
    const { player } = this;
    const isMoving = player.isPlaying || player.isFollowing;
    setText(this.button, isMoving ? '❚❚' : '▶');
    setAttribute(this.button, 'aria-label', isMoving ? 'Pause' : 'Play');
    setAttribute(this.live, 'aria-pressed', String(player.isFollowing));
    setText(this.now, instant(player.t));
    setText(this.end, `of ${instant(player.end)}`);
    const value = player.end > 0 ? Math.round((player.t / player.end) * STEPS) : 0;
    if (Number(this.range.value) !== value) this.range.value = String(value);
    setAttribute(this.range, 'aria-valuetext', `${instant(player.t)} of ${instant(player.end)}`);
    this.drawMarks();
  }

  drawMarks() {
    const key = `${this.run.events.length} ${this.player.end} ${this.marks.clientWidth} ${matchMedia('(prefers-color-scheme: dark)').matches}`;
    if (key === this.drawn || !this.player.end) return;
    this.drawn = key;
    const [context, width, height] = fitCanvas(this.marks);
    const bad = colour('--dead');
    const other = colour('--muted');
    for (const { at, event } of this.run.events) {
      if (!Number.isFinite(at) || at < 0 || event.event === 'serving' || event.event === 'stopped') continue;
      if (!['fault', 'moved', 'network-change', 'failed', 'begun'].includes(event.event)) continue;
      context.fillStyle = BAD.includes(event.event) ? bad : other;
      context.fillRect((at / this.player.end) * width - 0.75, 0, 1.5, height);
    }
  }
}

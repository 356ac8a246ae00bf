// The sessions or the used share of the cache of every server over time, as a heat map.
import { colour, fitCanvas, h, setText } from './dom.js';
import { percent } from './format.js';
import { serverLoads, stepsUntil } from './series.js';

const LEFT = 92;
const BOTTOM = 20;

export class HeatMap {
  constructor(run, player) {
    this.run = run;
    this.player = player;
    this.figure = 'sessions';
    this.values = h('p', { class: 'values' });
    const choice = h(
      'select',
      { 'aria-label': 'Figure of servers', on: { change: (change) => this.choose(change.target.value) } },
      h('option', { value: 'sessions', text: 'sessions' }),
      h('option', { value: 'cache', text: 'cache' }),
    );
    this.canvas = h('canvas', {
      ...{ class: 'heat', role: 'img', 'aria-label': 'Sessions or cache of every server over time' },
      on: {
        mousemove: (event) => this.point(event),
        mouseleave: () => setText(this.values, ''),
        click: (event) => this.player.seek(this.timeAt(event.offsetX)),
      },
    });
    this.element = h(
      'figure',
      { class: 'chart', 'data-chart': 'servers' },
      h('figcaption', {}, h('h3', { text: 'Servers' }), choice, this.values),
      this.canvas,
    );
    this.picture = document.createElement('canvas');
  }

  choose(figure) {
    this.figure = figure;
    this.redraw();
  }

  timeAt(x) {
    return (Math.max(0, x - LEFT) / Math.max(1, this.canvas.clientWidth - LEFT)) * this.player.end;
  }

  point(event) {
    const { servers } = this.run.header;
    const row = Math.floor((event.offsetY / (this.canvas.clientHeight - BOTTOM)) * servers.length);
    const step = Math.floor(this.timeAt(event.offsetX) / this.steps.size);
    const value = this.rows?.[row]?.[step];
    if (value === undefined || event.offsetX < LEFT) return;
    const text = this.figure === 'cache' ? percent(value) : String(Number(value.toFixed(1)));
    setText(this.values, `${servers[row].name}, ${this.steps.times[step].toFixed(0)} s: ${text}`);
  }

  // Redraws the picture, after an update or a change of size.
  redraw() {
    const { servers } = this.run.header;
    this.steps = stepsUntil(this.player.end);
    const loads = serverLoads(this.run, this.steps);
    this.rows =
      this.figure === 'sessions'
        ? loads.sessions
        : loads.cache.map((row, server) => row.map((bytes) => (servers[server].cache_bytes ? bytes / servers[server].cache_bytes : 0)));
    const most = this.figure === 'cache' ? 1 : Math.max(1, ...this.rows.map((row) => Math.max(...row)));
    this.picture.width = this.steps.times.length;
    this.picture.height = servers.length;
    const context = this.picture.getContext('2d');
    const [low, high] = [rgb(colour('--heat-low')), rgb(colour('--heat-high'))];
    const image = context.createImageData(this.picture.width, this.picture.height);
    this.rows.forEach((row, server) => {
      row.forEach((value, step) => {
        const share = value <= 0 ? 0 : 0.12 + 0.88 * Math.min(1, value / most);
        const pixel = 4 * (server * row.length + step);
        for (let i = 0; i < 3; i += 1) image.data[pixel + i] = low[i] + (high[i] - low[i]) * share;
        image.data[pixel + 3] = 255;
      });
    });
    context.putImageData(image, 0, 0);
    this.update();
  }

  update() {
    if (!this.rows || !this.canvas.clientWidth) return;
    const { servers } = this.run.header;
    const [context, width, height] = fitCanvas(this.canvas);
    const rowHeight = (height - BOTTOM) / servers.length;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, LEFT, 0, width - LEFT, height - BOTTOM);
    context.fillStyle = colour('--muted');
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    const every = Math.ceil(12 / rowHeight);
    servers.forEach((server, row) => {
      if (row % every === 0) context.fillText(shortened(context, server.name, LEFT - 8), 0, Math.max(6, (row + 0.5) * rowHeight));
    });
    context.textBaseline = 'alphabetic';
    context.textAlign = 'right';
    context.fillText(`${this.player.end.toFixed(0)} s`, width, height - 5);
    context.textAlign = 'left';
    context.fillText('0 s', LEFT, height - 5);
    const x = LEFT + (this.player.end ? this.player.t / this.player.end : 0) * (width - LEFT);
    context.fillStyle = colour('--now');
    context.fillRect(Math.min(x, width - 1.5) - 0.75, 0, 1.5, height - BOTTOM);
  }
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length - 1;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

// Returns red, green and blue of a colour such as #0072b2.
function rgb(text) {
  return [1, 3, 5].map((place) => Number.parseInt(text.slice(place, place + 2), 16));
}

// Charts over time, measured and of the twin. A line marks the shown instant; a click moves it.
import { colour, h, panel } from './dom.js';
import { seconds } from './format.js';
import { HeatMap } from './heat.js';
import { firstTokens, inSteps, interval, queues, requestCounts, stepsUntil, tokenSeries } from './series.js';

const HEIGHT = 168;

const number = (value) => (value === null || value === undefined ? '–' : String(Number(value.toPrecision(4))));

const KINDS = [
  {
    id: 'requests', title: 'Requests', unit: number,
    series: [['waiting', '--waiting'], ['active', '--measured'], ['done', '--done', { scale: 'done' }]],
    twin: [['active, twin', '--twin']],
  },
  { id: 'ttft', title: 'Time to first token', unit: seconds, points: true, limit: 'ttft', series: [['measured', '--measured']], twin: [['twin', '--twin']] },
  {
    id: 'gaps', title: 'Time per token', unit: seconds, limit: 'tpot',
    series: [['median', '--measured'], ['95th percentile', '--waiting']], twin: [['median, twin', '--twin']],
  },
  { id: 'queue', title: 'Queue', unit: seconds, points: true, limit: 'queue', series: [['measured', '--measured']], twin: [['twin', '--twin']] },
  { id: 'rate', title: 'Tokens per second', unit: number, series: [['measured', '--measured']], twin: [['twin', '--twin']] },
];

const BAND = [['interval from', '--band'], ['to', '--band']];

export class Charts {
  constructor(run, player) {
    this.run = run;
    this.player = player;
    this.twin = null;
    this.others = [];
    const [section, body, head] = panel('charts', 'Over time');
    this.section = section;
    this.note = h('p', { class: 'hint', text: 'Click a chart to go to that instant.' });
    head.append(this.note);
    this.charts = KINDS.map((kind) => this.chart(kind));
    this.heat = new HeatMap(run, player);
    body.append(...this.charts.map((chart) => chart.element), this.heat.element);
    this.drawnVersion = -1;
    new ResizeObserver(() => this.resize()).observe(body);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.rebuild());
  }

  setTwin(twin) {
    this.twin = twin;
    this.rebuild();
  }

  setOthers(runs) {
    this.others = runs;
    this.note.textContent = `Bands: 95 % interval of the mean over ${runs.length + 1} runs. Click a chart to go to that instant.`;
    this.rebuild();
  }

  rebuild() {
    for (const chart of this.charts) {
      chart.plot?.destroy();
      chart.plot = null;
    }
    this.drawnVersion = -1;
    this.redraw();
  }

  chart(kind) {
    const values = h('p', { class: 'values', 'aria-live': 'off' });
    const frame = h('div', { class: 'frame', role: 'img', 'aria-label': `${kind.title} over time` });
    const element = h('figure', { class: 'chart', 'data-chart': kind.id }, h('figcaption', {}, h('h3', { text: kind.title }), values), frame);
    return { kind, element, frame, values, plot: null };
  }

  lines(kind) {
    const own = this.twin ? [...kind.series, ...kind.twin] : kind.series;
    return this.others.length ? [...own, ...BAND] : own;
  }

  // Returns [lows, highs] of a figure's interval at every step; empty if there is only one run.
  band(steps, figure) {
    return this.others.length ? interval([this.run, ...this.others].map((run) => figure(run, steps))) : [];
  }

  // Returns the data of every chart, in uPlot's columns.
  columns() {
    const steps = stepsUntil(this.player.end);
    const times = Array.from(steps.times);
    const [waiting, active, done] = requestCounts(this.run, steps);
    const tokens = tokenSeries(this.run, steps);
    const twin = this.twin;
    const twinTokens = twin ? tokenSeries(twin, steps) : null;
    const known = (column) => column.map((value, i) => (times[i] - steps.size / 2 <= this.run.lastAt ? value : null));
    const points = (figure) => {
      const columns = twin ? [figure(this.run), figure(twin)] : [figure(this.run)];
      if (this.others.length) columns.push([times, ...this.band(steps, (run) => inSteps(figure(run), steps))]);
      return uPlot.join(columns);
    };
    const band = (figure) => this.band(steps, figure);
    return {
      requests: [
        times, known(waiting), known(active), known(done), ...(twin ? [requestCounts(twin, steps)[1]] : []),
        ...band((run) => requestCounts(run, steps)[1]),
      ],
      ttft: points(firstTokens),
      gaps: [times, tokens.median, tokens.high, ...(twin ? [twinTokens.median] : []), ...band((run) => tokenSeries(run, steps).median)],
      queue: points(queues),
      rate: [times, known(tokens.rate), ...(twin ? [twinTokens.rate] : []), ...band((run) => tokenSeries(run, steps).rate)],
    };
  }

  redraw() {
    if (this.drawnVersion === this.run.version) return;
    this.drawnVersion = this.run.version;
    const columns = this.columns();
    for (const chart of this.charts) {
      const data = columns[chart.kind.id];
      if (!chart.plot) chart.plot = this.plot(chart, data);
      else chart.plot.setData(data);
      chart.data = data;
    }
    this.heat.redraw();
  }

  plot(chart, data) {
    const { kind } = chart;
    const [ink, grid] = [colour('--muted'), colour('--grid')];
    const axis = { stroke: ink, font: '11px system-ui, sans-serif', grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const lines = this.lines(kind);
    const series = lines.map(([label, name, more = {}]) => {
      const isTwin = name === '--twin';
      const stroke = colour(name);
      if (name === '--band') return { label, stroke: 'transparent', points: { show: false }, spanGaps: true };
      const points = kind.points
        ? { show: true, size: isTwin ? 8 : 5, width: 1.4, fill: isTwin ? 'transparent' : stroke, stroke }
        : { show: false };
      return { label, stroke, width: 1.6, dash: isTwin && !kind.points ? [5, 4] : undefined, points, paths: kind.points ? () => null : undefined, spanGaps: true, ...more };
    });
    const hasRight = kind.series.some(([, , more]) => more?.scale);
    const limit = this.limit(kind);
    const options = {
      width: Math.max(120, chart.frame.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, hasRight ? 0 : 8, 0, 0],
      cursor: { sync: { key: 'time' }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: () => [0, Math.max(this.player.end, 1e-6)] }, y: { range: (plot, low, high) => fromZero(plot, low, Math.max(high, limit ?? 0)) }, done: { range: fromZero } },
      axes: [
        { ...axis, size: 26, space: 60, values: (_, ticks) => ticks.map((tick) => `${tick} s`) },
        { ...axis, size: 46, space: 28, values: (_, ticks) => ticks.map((tick) => kind.unit(tick)) },
        ...(hasRight ? [{ ...axis, scale: 'done', side: 1, size: 40, grid: { show: false }, stroke: colour('--done') }] : []),
      ],
      series: [{}, ...series],
      bands: this.others.length ? [{ series: [lines.length, lines.length - 1], fill: colour('--band') }] : [],
      hooks: {
        setCursor: [(plot) => this.showValues(chart, plot.cursor.idx)],
        draw: [(plot) => this.drawLimit(plot, limit), (plot) => this.drawNow(plot)],
        ready: [(plot) => plot.over.addEventListener('click', () => this.player.seek(plot.posToVal(plot.cursor.left, 'x')))],
      },
    };
    return new uPlot(options, data, chart.frame);
  }

  // Returns the objective of a chart's metric in seconds; null if there is none.
  limit(kind) {
    return this.run.header.objectives[kind.limit] ?? null;
  }

  // Draws an objective as a dotted line across the chart.
  drawLimit(plot, limit) {
    if (limit === null) return;
    const { left, width } = plot.bbox;
    const y = Math.round(plot.valToPos(limit, 'y', true));
    drawLine(plot, [left, y], [left + width, y], { stroke: '--dead', width: 1.2, dash: [2, 3] });
  }

  drawNow(plot) {
    const { left, top, width, height } = plot.bbox;
    const x = Math.min(left + width, Math.round(plot.valToPos(this.player.t, 'x', true)));
    drawLine(plot, [x, top], [x, top + height], { stroke: '--now', width: 1.5, dash: [] });
  }

  // Shows the values under the mouse, or else at the shown instant.
  showValues(chart, hovered) {
    if (!chart.data) return;
    const i = hovered ?? nearest(chart.data[0], this.player.t);
    const parts = this.lines(chart.kind).map(([label, name], series) => {
      const item = h('span', {}, h('i', { class: 'dash' }), `${label} ${chart.kind.unit(chart.data[series + 1][i] ?? null)}`);
      item.firstChild.style.setProperty('background', `var(${name})`);
      return item;
    });
    const limit = this.limit(chart.kind);
    if (limit !== null) parts.push(h('span', {}, h('i', { class: 'dash limit' }), `objective ${chart.kind.unit(limit)}`));
    chart.values.replaceChildren(...parts);
  }

  // Redraws only the line and the values, after a change of the instant.
  update() {
    for (const chart of this.charts) {
      if (!chart.plot) continue;
      chart.plot.redraw(false, false);
      this.showValues(chart, chart.plot.cursor.idx);
    }
    this.heat.update();
  }

  resize() {
    for (const chart of this.charts) {
      const width = Math.max(120, chart.frame.clientWidth);
      if (chart.plot && chart.plot.width !== width) chart.plot.setSize({ width, height: HEIGHT });
    }
    this.heat.redraw();
  }
}

function drawLine({ ctx }, from, to, { stroke, width, dash }) {
  ctx.save();
  ctx.strokeStyle = colour(stroke);
  ctx.lineWidth = width * devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
  ctx.restore();
}

function fromZero(plot, low, high) {
  return [0, high > 0 ? high * 1.08 : 1];
}

function nearest(times, t) {
  let best = 0;
  for (let i = 1; i < times.length && times[i] <= t; i += 1) best = i;
  return best;
}

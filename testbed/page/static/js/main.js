// The page: opens the run, builds the parts of the page, and updates them to the shown instant.
import { h, setAttribute, setText } from './dom.js';
import { count, instant, seconds } from './format.js';
import { Run, countUntil, loadAt, preemptionsAt, stateAt } from './run.js';
import { Player } from './player.js';
import { quantile, tokensBetween } from './series.js';
import { openSource, pageToken } from './source.js';
import { BlockBar } from './blockbar.js';
import { Charts } from './charts.js';
import { ClientTable } from './clients.js';
import { EventList } from './events.js';
import { RunMap } from './map.js';
import { ServerDialog } from './faults.js';
import { LinkDialog } from './links.js';
import { SessionList } from './sessions.js';
import { TimeSlider } from './slider.js';
import { Waterfall } from './waterfall.js';

const REST_MS = 100; // Between frames, but while a replay plays: a live run is on this machine, and needs its CPUs more than the page.
const PANEL_MS = 200;
const CHART_MS = 1000;

const PHASES = {
  running: 'running',
  ended: 'run has ended',
  interrupted: 'interrupted',
  broken: 'run broke',
  killed: 'run was killed',
  simulated: 'simulation',
};

class Page {
  constructor(app, source, data) {
    this.app = app;
    this.source = source;
    this.run = new Run(data.header);
    this.run.apply(data.update);
    this.player = new Player();
    this.status = data.update.status;
    this.isLost = false;
    this.hasTwin = false;
    this.hasLinks = false;
    this.clockSet = performance.now();
    this.first = data.update;
    this.build();
  }

  begin() {
    this.setStatus(this.status);
    this.player.setEnd(this.endNow());
    if (this.status.phase === 'running') this.player.follow();
    else this.player.seek(busiest(this.run, this.player.end));
    this.charts.redraw();
    this.drawAll();
    this.player.onChange((isJump) => {
      this.isDirty = true;
      if (!isJump) return;
      this.lastFrame = performance.now();
      this.drawAll();
    });
    this.loadOthers();
    this.source.watch(this.first, (update) => this.take(update), (isLost) => this.lose(isLost));
    this.first = null;
    this.lastFrame = performance.now();
    requestAnimationFrame((now) => this.frame(now));
  }

  build() {
    const { run, player, source } = this;
    const { header } = run;
    this.waterfall = new Waterfall(run, source);
    this.serverDialog = new ServerDialog(run, source);
    this.bar = new BlockBar(run, (server) => {
      this.serverDialog.open(server);
      this.drawAll();
    });
    this.linkDialog = new LinkDialog(run, source);
    this.map = new RunMap(run, source, (a, b) => this.linkDialog.open(a, b));
    this.charts = new Charts(run, player);
    this.clients = header.clients.length > 1 ? new ClientTable(run) : null;
    this.sessions = new SessionList(run, (session) => this.waterfall.open(session, player.t), (session) => this.map.select(session));
    this.events = new EventList(run, (t) => player.seek(t));
    this.slider = new TimeSlider(run, player);
    this.pill = h('span', { class: 'pill', role: 'status', 'data-testid': 'phase' });
    this.tiles = new Map(['active', 'waiting', 'done', 'not completed', ...(header.page_tokens ? ['preemptions'] : []), 'tokens per second', 'TTFT', 'per token'].map((name) => [name, h('dd')]));
    const facts = [
      `${header.placement} + ${header.routing}`,
      header.design_concurrency ? `|R| = ${header.design_concurrency}` : '',
      `${header.model}, ${count(header.n_blocks, 'block')}`,
      `clock ${header.clock}${header.time_scale !== 1 ? ` ×${header.time_scale}` : ''}`,
      header.network ? `network ${header.network}` : '',
      header.drafts ? `drafts ${header.drafts}` : '',
      `seed ${header.seed}`,
    ].filter(Boolean);
    const top = h(
      'header',
      { class: 'top' },
      h('div', { class: 'name' }, h('h1', { text: header.name }), this.pill, h('p', { class: 'description', text: header.description })),
      h('ul', { class: 'run-facts', 'aria-label': 'Settings' }, ...facts.map((text) => h('li', { text }))),
      h('dl', { class: 'tiles' }, ...[...this.tiles].map(([name, value]) => h('div', {}, h('dt', { text: name }), value))),
    );
    const main = h('main', {}, this.bar.section, this.map.section, this.charts.section, ...(this.clients ? [this.clients.section] : []), this.sessions.section, this.events.section);
    this.app.replaceChildren(top, main, this.slider.section, this.waterfall.dialog, this.serverDialog.dialog, this.linkDialog.dialog);
    document.title = `${header.name} – testbed`;
  }

  take(update) {
    this.run.apply(update);
    this.setStatus(update.status);
    this.isDirty = true;
  }

  lose(isLost) {
    if (this.isLost === isLost) return;
    this.isLost = isLost;
    this.setStatus(this.status);
  }

  setStatus(status) {
    this.status = status;
    this.clockSet = performance.now();
    const isRunning = status.phase === 'running' && !this.isLost;
    this.writePill();
    setAttribute(this.pill, 'class', `pill ${isRunning ? 'running' : status.phase === 'broken' || status.phase === 'killed' || this.isLost ? 'bad' : ''}`);
    for (const dialog of [this.serverDialog, this.linkDialog]) {
      dialog.setStatus(this.isLost ? { ...status, faults: false } : status, Boolean(pageToken()) && !this.source.isReport);
    }
    this.slider.setLive(isRunning);
    if (!isRunning && this.player.isFollowing) {
      this.player.setEnd(this.endNow());
      this.player.pause();
    }
    if (status.twin && !this.hasTwin) this.loadTwin();
    if (status.links && !this.hasLinks) this.loadLinks();
  }

  // Writes the run's state. Before the end of a run that has ended, the page is a replay.
  writePill() {
    const { phase, why } = this.status;
    let text = PHASES[phase] || phase;
    if (why && why !== phase) text = `${text}: ${why}`;
    // The server of a page beside a run ends with the run.
    if (this.isLost) text = phase === 'running' ? 'connection lost: the run or its page has ended' : `${text}; the page’s server, too`;
    else if (phase !== 'running' && this.player.t < this.player.end) text = `replay at ${instant(this.player.t)}; ${text}`;
    setText(this.pill, text);
  }

  // A run leaves the use of its links when it ends.
  async loadLinks() {
    this.hasLinks = true;
    try {
      this.map.setUse(await this.source.links());
      this.isDirty = true;
    } catch {
      this.hasLinks = false;
    }
  }

  async loadTwin() {
    this.hasTwin = true;
    try {
      const data = await this.source.twin();
      if (!data) return;
      const twin = new Run(this.run.header);
      twin.apply(data);
      this.charts.setTwin(twin);
    } catch {
      this.hasTwin = false;
    }
  }

  async loadOthers() {
    const runs = (await this.source.others()).map((data) => {
      const run = new Run(this.run.header);
      run.apply(data);
      return run;
    });
    if (runs.length) this.charts.setOthers(runs);
  }

  // The run's clock in scenario seconds; in real time it advances between two updates.
  endNow() {
    const { now_s: now, phase } = this.status;
    if (now === null || now === undefined || phase !== 'running' || this.isLost) return this.run.lastAt;
    return Math.max(this.run.lastAt, now + ((performance.now() - this.clockSet) / 1000) * this.run.header.time_scale);
  }

  frame(now) {
    const elapsed = Math.max(0, now - this.lastFrame) / 1000;
    this.lastFrame = now;
    this.player.setEnd(this.endNow());
    this.player.tick(elapsed);
    if (this.isDirty) {
      this.drawMoving();
      if (now - (this.lastPanels ?? 0) >= PANEL_MS) {
        this.lastPanels = now;
        this.drawPanels();
        this.isDirty = this.player.isPlaying || this.player.isFollowing;
      }
    }
    if (this.charts.drawnVersion !== this.run.version && now - (this.lastCharts ?? 0) >= CHART_MS) {
      this.lastCharts = now;
      this.charts.redraw();
    }
    const draw = () => requestAnimationFrame((next) => this.frame(next));
    if (this.player.isPlaying) draw();
    else setTimeout(draw, REST_MS);
  }

  drawAll() {
    this.drawMoving();
    this.drawPanels();
  }

  drawMoving() {
    this.load = loadAt(this.run, this.player.t);
    this.map.updateMoving(this.player.t, this.load);
    this.slider.update();
  }

  drawPanels() {
    const { t } = this.player;
    this.bar.update(t, this.load);
    this.map.updatePanel(t, this.load);
    this.sessions.update(t);
    this.clients?.update(t);
    this.events.update(t);
    this.charts.update();
    this.serverDialog.update(t, this.load);
    this.drawTiles(t);
    this.writePill();
  }

  drawTiles(t) {
    const { active, waiting, done, failed } = this.load;
    const window = Math.max(1, Math.min(10, this.player.end / 20));
    let tokens = 0;
    let preemptions = 0;
    const [firsts, gaps] = [[], []];
    for (const session of this.run.ordered) {
      if (session.at > t) break;
      const { times, numbers } = session;
      preemptions += preemptionsAt(session, t);
      if (times.length && times[0] <= t) firsts.push(times[0] - session.at);
      if (session.end && session.end.at < t - window) continue;
      tokens += tokensBetween(session, t - window, t);
      // The times between tokens of the window, and at least a session's last one.
      const last = countUntil(times, t) - 1;
      for (let i = last; i > 0 && (times[i] > t - window || i === last); i -= 1) {
        gaps.push((times[i] - times[i - 1]) / (numbers[i] - numbers[i - 1]));
      }
    }
    const planned = this.run.header.n_requests; // null: requests come from outside
    const values = {
      ...{ active: String(active.length), waiting: String(waiting.length) },
      ...{ done: planned === null ? String(done) : `${done} of ${planned}`, 'not completed': String(failed), preemptions: String(preemptions) },
      ...{ 'tokens per second': (tokens / window).toFixed(1), TTFT: seconds(median(firsts)), 'per token': seconds(median(gaps)) },
    };
    for (const [name, element] of this.tiles) setText(element, values[name]);
  }
}

function median(values) {
  return quantile(values.sort((a, b) => a - b), 0.5);
}

// The first instant with the most active sessions, at which the page of a finished run opens.
function busiest(run, end) {
  let [best, most] = [0, -1];
  for (let step = 1; step < 200; step += 1) {
    const t = (step / 200) * end;
    let active = 0;
    for (const session of run.ordered) {
      if (session.at > t) break;
      if (stateAt(session, t) === 'active') active += 1;
    }
    if (active > most) [best, most] = [t, active];
  }
  return best;
}

async function main() {
  const app = document.getElementById('app');
  try {
    const source = await openSource();
    new Page(app, source, await source.open()).begin();
  } catch (error) {
    app.replaceChildren(h('p', { class: 'starting', role: 'alert', text: `The run cannot be shown: ${error.message}` }));
    throw error;
  }
}

main();

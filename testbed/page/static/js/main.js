// The page: opens the run, makes its parts, and keeps them at the instant that is shown.
import { h, setAttribute, setText } from './dom.js';
import { count, instant, seconds } from './format.js';
import { Run, loadAt } from './run.js';
import { Player } from './player.js';
import { openSource } from './source.js';
import { BlockBar } from './blockbar.js';
import { EventList } from './events.js';
import { SessionList } from './sessions.js';
import { TimeSlider } from './slider.js';

const PANEL_MS = 100;

function start(app, source, data) {
  const run = new Run(data.header);
  run.apply(data.update);
  const player = new Player();
  const slider = new TimeSlider(run, player);
  const seek = (t) => player.seek(t);
  const bar = new BlockBar(run, () => {});
  const sessions = new SessionList(run, () => {}, () => {});
  const events = new EventList(run, seek);
  app.replaceChildren(h('main', {}, bar.section, sessions.section, events.section), slider.section);
  player.setEnd(run.lastAt);
  player.onChange(() => {
    bar.update(player.t, loadAt(run, player.t));
    sessions.update(player.t);
    events.update(player.t);
    slider.update();
  });
  player.seek(player.end / 2);
}

async function main() {
  const app = document.getElementById('app');
  try {
    const source = await openSource();
    start(app, source, await source.open());
  } catch (error) {
    app.replaceChildren(h('p', { class: 'starting', role: 'alert', text: `The run cannot be shown: ${error.message}` }));
    throw error;
  }
}

main();

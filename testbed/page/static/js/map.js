// The map: sites with their servers, links between them, and the messages of sessions on their way.
import { colour, fitCanvas, h, panel, s, setAttribute, setStyle, setText } from './dom.js';
import { count, milliseconds, percent, scaled } from './format.js';
import { chainAt, isRecovering, linksAt, stepAt } from './run.js';

const WIDTH = 800;
const [FLATTEST, LOWEST, HIGHEST] = [240, 330, 470];
const MARGIN = { side: 90, over: 46 };
const SPREAD = 9.5; // distance between servers of a site
const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const CLOSEST = 8000;

export class RunMap {
  // choose(a, b) is called for a link whose name is clicked.
  constructor(run, source, choose) {
    this.run = run;
    this.choose = choose;
    this.selected = null;
    this.use = null;
    const isPlaced = run.header.layout === 'places';
    const [section, body, head] = panel('map', 'Map');
    this.section = section;
    this.note = h('p', { class: 'hint' });
    head.append(this.note);
    this.layer = Object.fromEntries(['land', 'links', 'chain', 'sites', 'labels', 'shares'].map((name) => [name, s('g', { class: name })]));
    this.svg = s(
      'svg',
      { role: 'img', 'aria-label': this.description(isPlaced) },
      ...Object.values(this.layer).filter((layer) => layer !== this.layer.shares),
    );
    // The shares of hops are drawn above the sessions.
    this.over = s('svg', { class: 'over', 'aria-hidden': 'true' }, this.layer.shares);
    this.canvas = h('canvas', { class: 'moving', 'aria-hidden': 'true' });
    body.append(h('div', { class: 'map-frame' }, this.svg, this.canvas, this.over), this.keys(isPlaced), this.linkTable());
    this.place(isPlaced);
    for (const svg of [this.svg, this.over]) svg.setAttribute('viewBox', `0 0 ${WIDTH} ${this.height}`);
    this.drawLinks();
    this.drawSites();
    if (isPlaced) this.drawLand(source);
  }

  description(isPlaced) {
    const { sites, servers, clients } = this.run.header;
    const how = isPlaced ? 'at their coordinates' : 'so that distances follow round trips';
    return `${count(sites.length, 'site')} with ${count(servers.length, 'server')} and ${count(clients.length, 'client')}, ${how}`;
  }

  keys(isPlaced) {
    const how = isPlaced ? 'Sites at their coordinates.' : 'Distances follow round-trip times.';
    const item = (kind, text) => h('li', {}, h('i', { class: `key ${kind}` }), text);
    return h(
      'ul',
      { class: 'legend' },
      h('li', { text: how }),
      item('client', 'client'),
      item('server', 'server'),
      item('session', 'session'),
      item('recovering', 'recovering'),
      item('used', 'busy link'),
      item('changed', 'changed link'),
      item('down', 'link down'),
    );
  }

  // Screen positions of sites, and of the servers and clients around each.
  place(isPlaced) {
    const { sites, servers, clients } = this.run.header;
    const bySite = sites.map(() => []);
    clients.forEach((client, number) => bySite[client.site].push(['client', number]));
    servers.forEach((server, number) => bySite[server.site].push(['server', number]));
    this.radius = bySite.map((members) => 7 + SPREAD * Math.sqrt(Math.max(0, members.length - 1)));
    const widest = Math.max(...this.radius);
    const [side, over] = [Math.max(MARGIN.side, widest + 16), Math.max(MARGIN.over, widest + 30)];
    const points = sites.map((site) => [site.x, site.y]);
    this.height = HIGHEST;
    if (isPlaced) {
      const shape = { type: 'MultiPoint', coordinates: points };
      const fitted = (height) => d3.geoEqualEarth()
        .rotate([-middle(points.map((point) => point[0])), 0])
        .fitExtent([[side, over], [WIDTH - side, height - over]], shape);
      const [[, top], [, bottom]] = d3.geoPath(fitted(HIGHEST)).bounds(shape);
      this.height = Math.max(LOWEST, Math.min(HIGHEST, bottom - top + 4 * over));
      this.projection = fitted(this.height);
      if (!(this.projection.scale() < CLOSEST)) {
        // All sites are at (almost) the same place: show the region around it.
        const [x, y] = points[0];
        this.projection = d3.geoEqualEarth().rotate([-x, 0]).center([0, y]).scale(CLOSEST).translate([WIDTH / 2, this.height / 2]);
      }
      this.at = points.map((point) => this.projection(point));
    } else {
      const scale = Math.min((WIDTH - 2 * side) / 1.2, HIGHEST - 2 * over);
      const tall = 2 * Math.max(...points.map(([, y]) => Math.abs(y)));
      this.height = Math.max(FLATTEST, tall * scale + 2 * over);
      this.at = points.map(([x, y]) => [WIDTH / 2 + x * scale * 1.2, this.height / 2 + y * scale]);
    }
    this.clientAt = [];
    this.serverAt = [];
    bySite.forEach((members, site) => {
      members.forEach(([kind, number], place) => {
        const out = place === 0 ? 0 : SPREAD * Math.sqrt(place);
        const [x, y] = [this.at[site][0] + out * Math.cos(place * GOLDEN), this.at[site][1] + out * Math.sin(place * GOLDEN)];
        (kind === 'client' ? this.clientAt : this.serverAt)[number] = [x, y];
      });
    });
  }

  async drawLand(source) {
    const atlas = await source.atlas();
    if (!atlas) return;
    const path = d3.geoPath(this.projection.clipExtent([[-2, -2], [WIDTH + 2, this.height + 2]])).digits(1);
    const land = topojson.feature(atlas, atlas.objects.land);
    const borders = topojson.mesh(atlas, atlas.objects.countries, (a, b) => a !== b);
    this.layer.land.append(
      s('path', { class: 'shore', d: path(land) }),
      s('path', { class: 'borders', d: path(borders) }),
    );
  }

  // Sets the use of links over time, {width_s, sites}, and lists the links in its order.
  setUse(use) {
    this.use = use;
    if (!use) return;
    const over = (key) => use.sites[key]?.over ?? 0;
    const keys = [...this.tableRows.keys()].sort((a, b) => over(b) - over(a));
    this.tableBody.append(...keys.map((key) => this.tableRows.get(key)[0].parentElement));
  }

  // Returns the share of a moment in which the busiest link between two sites carried something; null: not known.
  useAt(key, t) {
    if (!this.use) return null;
    return this.use.sites[key]?.use[Math.floor(t / this.use.width_s)] ?? 0;
  }

  // A curved line, which can be told from straight lines below it.
  curve(a, b) {
    const [[ax, ay], [bx, by]] = [this.at[a], this.at[b]];
    const bow = this.run.header.layout === 'places' ? 0.12 : 0;
    return [ax, ay, (ax + bx) / 2 + bow * (by - ay), (ay + by) / 2 - bow * Math.abs(bx - ax), bx, by];
  }

  drawLinks() {
    const links = this.run.header.links.filter(([a, b]) => a !== b);
    this.links = new Map();
    for (const [a, b, rtt, rate] of links) {
      const [ax, ay, mx, my, bx, by] = this.curve(a, b);
      const width = Math.max(1, Math.min(4, Math.log10(Math.max(rate, 1e6)) - 6.5));
      const title = s('title');
      const line = s('path', { class: 'link', d: `M${ax},${ay}Q${mx},${my} ${bx},${by}`, 'stroke-width': width }, title);
      const text = s('text', { class: 'rtt', x: (ax + 2 * mx + bx) / 4, y: (ay + 2 * my + by) / 4 - 5, text: milliseconds(rtt) });
      this.layer.links.append(line);
      this.links.set(`${a}-${b}`, { line, title, text, width });
    }
  }

  drawSites() {
    const { sites, servers } = this.run.header;
    this.dots = [];
    const taken = [];
    const order = sites.map((_, site) => site).sort((a, b) => this.radius[b] - this.radius[a]);
    for (const site of order) {
      const [x, y] = this.at[site];
      taken.push([x - this.radius[site], y - this.radius[site], x + this.radius[site], y + this.radius[site]]);
    }
    for (const site of order) {
      const [x, y] = this.at[site];
      const radius = this.radius[site];
      const own = ownLinks(sites[site]);
      this.layer.sites.append(s('circle', { class: own ? 'site limited' : 'site', cx: x, cy: y, r: radius + 3 }));
      const text = `${sites[site].name}${sites[site].is_placed ? '' : ' (place unknown)'}${own && `: ${own}`}`;
      const label = labelPlace(text, x, y, radius + 7, taken, this.height);
      if (label) this.layer.labels.append(s('text', { class: 'site-name', x: label.x, y: label.y, 'text-anchor': label.anchor, text }));
    }
    // Round trips are written where there is room; the table has all of them.
    for (const { text } of this.links.values()) {
      const [x, y] = [Number(text.getAttribute('x')), Number(text.getAttribute('y'))];
      const box = [x - 30, y - 12, x + 30, y + 4];
      if (taken.some((other) => overlaps(box, other))) continue;
      taken.push(box);
      this.layer.labels.append(text);
    }
    this.clientAt.forEach(([x, y], number) => {
      const box = s('rect', { class: 'client', x: x - 4.5, y: y - 4.5, width: 9, height: 9, transform: `rotate(45 ${x} ${y})` });
      box.append(s('title', { text: this.run.header.clients[number].name }));
      this.layer.sites.append(box);
    });
    this.serverAt.forEach(([x, y], number) => {
      const title = s('title', { text: servers[number].name });
      this.dots[number] = { dot: s('circle', { class: 'server', cx: x, cy: y, r: 4.2 }, title), title };
      this.layer.sites.append(this.dots[number].dot);
    });
  }

  linkTable() {
    this.tableBody = h('tbody');
    const names = ['Link', 'RTT', 'Rate', 'Loss', 'Use now', 'Use overall', 'Messages now', 'Event'];
    const last = names.length - 1;
    const { sites, links, servers } = this.run.header;
    this.tableRows = new Map(
      links.map(([a, b]) => {
        const cells = Array.from({ length: last }, (_, i) => h('td', { class: i < last - 1 ? 'number' : null }));
        const name = a === b ? `inside ${sites[a].name}` : `${sites[a].name} – ${sites[b].name}`;
        const button = h('button', { type: 'button', class: 'link', text: name, on: { click: () => this.choose(a, b) } });
        this.tableBody.append(h('tr', {}, h('th', { scope: 'row' }, button), ...cells));
        return [`${a}-${b}`, cells];
      }),
    );
    const heads = names.map((name, i) => h('th', { scope: 'col', class: i > 0 && i < last ? 'number' : null, text: name }));
    const table = h('table', { class: 'links' }, h('thead', {}, h('tr', {}, ...heads)), this.tableBody);
    const isOpen = servers.length > 12 && links.length > 1 && innerWidth > 1080; // beside a tall block bar there is room
    this.details = h('details', { class: 'links', open: isOpen, on: { toggle: () => this.updatePanel(this.t, this.load) } }, h('summary', { text: `Links (${links.length})` }), h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Links' }, table));
    return this.details;
  }

  select(session) {
    this.selected = session;
    this.updatePanel(this.t, this.load);
    this.updateMoving(this.t, this.load);
  }

  // Returns where a session's message is: {x, y, link}; link is 'a-b', or null while no link carries it.
  whereabouts(session, step) {
    const { header } = this.run;
    const client = this.clientAt[session.client];
    const clientSite = header.clients[session.client].site;
    if (!step) return { x: client[0], y: client[1], link: null };
    let left = step.share * step.took;
    let [fromPoint, fromSite] = [client, clientSite];
    const { hops } = step.parts;
    for (let i = 0; i < hops.length; i += 1) {
      const [server, own, up, compute, down] = hops[i];
      const at = this.serverAt[server] || client;
      const site = header.servers[server]?.site ?? clientSite;
      if (left < own) return { x: fromPoint[0], y: fromPoint[1], link: null };
      left -= own;
      if (left < up) return this.between(fromPoint, fromSite, at, site, left / up);
      left -= up;
      if (left < compute) return { x: at[0], y: at[1], link: null };
      left -= compute;
      if (left < down) return this.between(at, site, client, clientSite, left / down);
      left -= down;
      const forwards = header.forwarding && i < hops.length - 1;
      [fromPoint, fromSite] = forwards ? [at, site] : [client, clientSite];
    }
    return { x: client[0], y: client[1], link: null };
  }

  between([ax, ay], siteA, [bx, by], siteB, share) {
    let [x, y] = [ax + (bx - ax) * share, ay + (by - ay) * share];
    const link = siteA < siteB ? `${siteA}-${siteB}` : `${siteB}-${siteA}`;
    if (siteA !== siteB && this.run.header.layout === 'places') {
      const [cx, cy, mx, my, dx, dy] = this.curve(Math.min(siteA, siteB), Math.max(siteA, siteB));
      const lift = 2 * share * (1 - share);
      x += lift * (mx - (cx + dx) / 2);
      y += lift * (my - (cy + dy) / 2);
    }
    return { x, y, link };
  }

  // Updates states, links and labels, ten times per second.
  updatePanel(t, load) {
    if (!load) return;
    [this.t, this.load] = [t, load];
    const queues = new Map();
    for (const session of load.active) {
      const { link } = this.whereabouts(session, stepAt(session, t));
      if (link) queues.set(link, (queues.get(link) || 0) + 1);
    }
    let nChanged = 0;
    for (const [key, { link, why }] of linksAt(this.run, t)) {
      const [a, b, rtt, rate, loss] = link;
      const queue = queues.get(key) || 0;
      const shown = this.links.get(key);
      const isDown = loss >= 1;
      if (why) nChanged += 1;
      const [use, over] = [this.useAt(key, t), this.use ? this.use.sites[key]?.over ?? 0 : null];
      if (shown) {
        setAttribute(shown.line, 'class', `link${isDown ? ' down' : why ? ' changed' : ''}${queue ? ' busy' : ''}${use ? ' used' : ''}`);
        const { sites } = this.run.header;
        setText(shown.title, `${sites[a].name} – ${sites[b].name}: RTT ${milliseconds(rtt)}, ${scaled(rate, 'bit/s')}, ${count(queue, 'message')}${this.useInWords(key, use)}${why ? `; ${why}` : ''}`);
        setStyle(shown.line, '--use', `${Math.round(100 * (use ?? 0))}%`);
        setAttribute(shown.line, 'stroke-width', (shown.width + 4 * (use ?? 0)).toFixed(1));

        setText(shown.text, isDown ? 'down' : milliseconds(rtt));
      }
      const cells = this.details.open ? this.tableRows.get(key) : null;
      if (cells) {
        [milliseconds(rtt), rate ? scaled(rate, 'bit/s') : '–', isDown ? 'down' : percent(loss), percent(use ?? NaN), percent(over ?? NaN), String(queue), why].forEach((value, i) => setText(cells[i], value));
      }
    }
    this.dots.forEach(({ dot, title }, number) => {
      const now = this.run.serverAt(number, t);
      setAttribute(dot, 'class', `server ${now.state}`);
      setText(title, `${this.run.header.servers[number].name}: ${now.state}, ${count(load.servers[number].sessions, 'session')}`);
    });
    const shares = this.drawChain(t);
    const numbers = `${load.active.length} active, ${load.waiting.length} waiting${nChanged ? `, ${count(nChanged, 'link')} changed` : ''}`;
    setText(this.note, this.selected ? `request ${this.selected.index}: ${shares || 'no chain now'}` : numbers);
  }

  // Returns how busy the links between two sites are, for the line's title; '' if it is not known.
  useInWords(key, use) {
    const used = this.use?.sites[key];
    if (!used) return '';
    return `; ${percent(use)} busy now, ${percent(used.over)} over the run (${used.name})`;
  }

  // Draws the selected session's chain with each hop's share of a token's time; returns the shares as text.
  drawChain(t) {
    const session = this.selected;
    const chain = session ? chainAt(session, t) : [];
    const parts = chain.length ? stepAt(session, t)?.parts : null;
    const total = parts ? parts.hops.reduce((sum, hop) => sum + hop[1] + hop[2] + hop[3] + hop[4], 0) : 0;
    const [marks, labels, shares] = [[], [], []];
    let from = session ? this.clientAt[session.client] : null;
    chain.forEach(([server], i) => {
      const to = this.serverAt[server];
      if (!to) return;
      marks.push(s('line', { class: 'chain', x1: from[0], y1: from[1], x2: to[0], y2: to[1] }));
      const hop = parts?.hops[i];
      if (hop && total) {
        const share = percent((hop[1] + hop[2] + hop[3] + hop[4]) / total);
        const near = labels.filter((label) => Math.abs(label.x - to[0]) < 44 && Math.abs(label.y - to[1]) < 44).length;
        labels.push({ x: to[0], y: to[1], mark: s('text', { class: 'share', x: to[0] + 11, y: to[1] - 9 + 16 * near, text: share }) });
        shares.push(`${this.run.header.servers[server].name} ${share}`);
      }
      if (this.run.header.forwarding) from = to;
    });
    this.layer.chain.replaceChildren(...marks);
    this.layer.shares.replaceChildren(...labels.map((label) => label.mark));
    return shares.join(', ');
  }

  // Draws the sessions, in every frame.
  updateMoving(t, load) {
    if (!load) return;
    const [context, width, height] = fitCanvas(this.canvas);
    const scale = width / WIDTH;
    const [left, top] = [(width - WIDTH * scale) / 2, (height - this.height * scale) / 2];
    const [normal, bad, ring] = [colour('--session'), colour('--dead'), colour('--surface')];
    for (const session of load.active) {
      const { x, y } = this.whereabouts(session, stepAt(session, t));
      const isSelected = session === this.selected;
      // Sessions at the same place are drawn around it, each always in its own direction.
      const turn = session.index * GOLDEN;
      const [px, py] = [left + (x + 5 * Math.cos(turn)) * scale, top + (y + 5 * Math.sin(turn)) * scale];
      context.beginPath();
      context.arc(px, py, isSelected ? 6 : 3.4, 0, 2 * Math.PI);
      context.fillStyle = isRecovering(session, t) ? bad : normal;
      context.fill();
      context.lineWidth = isSelected ? 2 : 1;
      context.strokeStyle = ring;
      context.stroke();
    }
  }
}

// Returns the rates of a site's own links, which all its traffic to and from other sites shares; '' if it has none.
function ownLinks({ up_bps: up, down_bps: down }) {
  return [up && `↑ ${scaled(up, 'bit/s')}`, down && `↓ ${scaled(down, 'bit/s')}`].filter(Boolean).join(' ');
}

function overlaps(a, b) {
  return a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1];
}

// Returns the longitude in the middle of the shortest arc that has all longitudes, in degrees.
function middle(longitudes) {
  const sorted = [...longitudes].sort((a, b) => a - b);
  let [widest, after] = [-1, 0];
  sorted.forEach((longitude, i) => {
    const next = i + 1 < sorted.length ? sorted[i + 1] : sorted[0] + 360;
    if (next - longitude > widest) [widest, after] = [next - longitude, next];
  });
  return after + (360 - widest) / 2;
}

// Returns where a site's name fits (below, above or beside it) and covers nothing; null if nowhere.
function labelPlace(text, x, y, distance, taken, height) {
  const width = text.length * 7.4 + 4;
  const places = [
    { x, y: y + distance + 9, anchor: 'middle' },
    { x, y: y - distance, anchor: 'middle' },
    { x: x + distance, y: y + 4, anchor: 'start' },
    { x: x - distance, y: y + 4, anchor: 'end' },
    { x: x + distance * 0.8, y: y + distance + 4, anchor: 'start' },
    { x: x - distance * 0.8, y: y + distance + 4, anchor: 'end' },
    { x: x + distance * 0.8, y: y - distance + 4, anchor: 'start' },
    { x: x - distance * 0.8, y: y - distance + 4, anchor: 'end' },
  ];
  for (const place of places) {
    const left = place.x - (place.anchor === 'middle' ? width / 2 : place.anchor === 'end' ? width : 0);
    const box = [left, place.y - 11, left + width, place.y + 3];
    const fits = box[0] > 2 && box[2] < WIDTH - 2 && box[1] > 2 && box[3] < height - 2;
    if (fits && !taken.some((other) => overlaps(box, other))) {
      taken.push(box);
      return place;
    }
  }
  return null;
}

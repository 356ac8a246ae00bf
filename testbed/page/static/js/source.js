// Where the run's data come from: the page's server, or this file itself if it is a report.

export function pageToken() {
  return new URLSearchParams(location.hash.slice(1)).get('token') || '';
}

async function unpacked(id) {
  const element = document.getElementById(id);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer.json();
}

// A report, which has the run's data in it: nothing is fetched, and nothing changes.
class FileSource {
  constructor(data) {
    this.data = data;
    this.isReport = true;
  }

  async open() {
    return this.data;
  }

  watch() {}

  async twin() {
    return this.data.twin || null;
  }

  async links() {
    return this.data.links || null;
  }

  async others() {
    return [];
  }

  async hops() {
    return null;
  }

  async atlas() {
    return unpacked('atlas-data');
  }
}

class ServerSource {
  constructor() {
    this.isReport = false;
  }

  // Fetches the run so far; waits until a run that has only just begun has something to show.
  async open() {
    for (;;) {
      const answer = await fetch('api/run');
      if (answer.ok) return answer.json();
      if (answer.status !== 503) throw new Error((await answer.json()).error);
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  }

  // Calls take(update) with every update, and lost(isLost) when the connection is lost or back again.
  watch(update, take, lost) {
    const from = `${update.feed}.${update.position.join('.')}`;
    const stream = new EventSource(`api/news?from=${encodeURIComponent(from)}`);
    stream.onmessage = (message) => {
      lost(false);
      take(JSON.parse(message.data));
    };
    stream.onerror = () => lost(true);
    stream.addEventListener('again', () => location.reload());
  }

  async twin() {
    return fetched('api/twin');
  }

  // The use of links over time: testbed/page/linkuse.py describes it.
  async links() {
    return fetched('api/links');
  }

  // Histories of other runs.
  async others() {
    return fetched('api/others');
  }

  async hops(request) {
    return fetched(`api/requests/${request}/hops`);
  }

  async atlas() {
    return fetched('vendor/countries-50m.json');
  }

  // Does what `testbed fault` does; returns what was done, or throws an error with one sentence.
  async fault(kind, server, factor) {
    return this.change('api/faults', factor === null ? { kind, server } : { kind, server, factor });
  }

  // Does what `testbed link` does; returns what was done, or throws an error with one sentence.
  async link(asked) {
    return this.change('api/links', asked);
  }

  async change(path, asked) {
    const answer = await fetch(path, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'X-Testbed-Token': pageToken() },
      body: JSON.stringify(asked),
    });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error);
    return body.done;
  }
}

export async function openSource() {
  const data = await unpacked('run-data');
  return data ? new FileSource(data) : new ServerSource();
}

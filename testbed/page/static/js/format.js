// Formats numbers for people.

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0 s';
  if (size < 0.0995) return `${(value * 1000).toFixed(size < 0.00995 ? 2 : 1)} ms`;
  if (size < 9.995) return `${value.toFixed(2)} s`;
  return size < 99.95 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

// Returns an instant of the run, in scenario seconds.
export function instant(value) {
  return Number.isFinite(value) ? `${value.toFixed(1)} s` : '–';
}

export function milliseconds(value) {
  const ms = value * 1000;
  return `${ms >= 99.5 || Number.isInteger(ms) ? Math.round(ms) : ms.toFixed(1)} ms`;
}

const SCALES = [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']];

export function scaled(value, unit) {
  for (const [size, prefix] of SCALES) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${prefix}${unit}`;
  }
  return `${Number(value.toPrecision(3))} ${unit}`;
}

export function percent(ratio) {
  if (!Number.isFinite(ratio)) return '–';
  const value = 100 * ratio;
  return `${value > 0 && value < 1 ? '<1' : Math.round(value)} %`;
}

export function count(n, one, many = `${one}s`) {
  return `${n} ${n === 1 ? one : many}`;
}

// Returns the blocks [first, last), which count from 0, as text.
export function blocks(first, last) {
  if (last <= first) return 'no blocks';
  return last === first + 1 ? `block ${first}` : `blocks ${first}–${last - 1}`;
}

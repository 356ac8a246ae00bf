// Makes elements and never parses text as HTML, because run directories may come from anybody.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === 'text') {
      element.textContent = value;
    } else {
      element.setAttribute(name, value === true ? '' : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Returns an HTML element: h('p', {class: 'note', text: 'shown as text'}, ...children).
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

// Returns an SVG element.
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

// Changes the text only if it differs, so that selections and screen readers are not disturbed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function setStyle(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

// Returns the value of a custom property of the page's style, such as '--online'.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Returns a part of the page with a heading: [section, body, head].
export function panel(id, title, hint = '') {
  const head = h('div', { class: 'panel-head' }, h('h2', { id: `${id}-title`, text: title }));
  if (hint) head.append(h('p', { class: 'hint', text: hint }));
  const body = h('div', { class: 'panel-body' });
  const section = h(
    'section',
    { class: `panel panel-${id}`, 'data-testid': id, 'aria-labelledby': `${id}-title` },
    head,
    body,
  );
  return [section, body, head];
}

// Clears a canvas and fits its pixels to the screen's; returns [context, width, height] to draw with.
export function fitCanvas(canvas) {
  const scale = window.devicePixelRatio || 1;
  const box = canvas.getBoundingClientRect();
  const width = Math.round(box.width * scale);
  const height = Math.round(box.height * scale);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext('2d');
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, box.width, box.height);
  return [context, box.width, box.height];
}

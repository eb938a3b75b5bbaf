// A step's draft tree from left to right: depth is the column, leaves share the height.

import { $ } from './dom.js';

const NAMESPACE = 'http://www.w3.org/2000/svg';
const COLUMN = 64; // pixels at least, so that tokens can be read
const ROW = 30;
const CHARACTER = 7.3;

const short = (text, room) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);

// Depths and rows of the nodes; a parent stands in the middle of its children.
function placed(parents) {
  const below = parents.map(() => []), depths = parents.map(() => 0), rows = [];
  let leaves = 0;
  parents.forEach((parent, n) => {
    if (parent < 0) return;
    below[parent].push(n);
    depths[n] = depths[parent] + 1;
  });
  const place = (n) => {
    below[n].forEach(place);
    rows[n] = below[n].length ? below[n].reduce((sum, m) => sum + rows[m], 0) / below[n].length : leaves++;
  };
  place(0);
  return { depths, rows, leaves };
}

// tree: { texts, parents, path }, or null for none.
export function draw(tree) {
  const svg = $('tree');
  svg.replaceChildren();
  svg.setAttribute('aria-label', tree ? `${tree.texts.length - 1} draft tokens, ${tree.path.length} accepted` : 'No draft yet');
  if (!tree) return;
  const { texts, parents, path } = tree, accepted = new Set([0, ...path]), { depths, rows, leaves } = placed(parents);
  // As large as its place, or larger where tokens could not be read: it is scrolled then.
  const { clientWidth, clientHeight } = svg.parentElement, columns = Math.max(...depths) + 1;
  const step = Math.max(COLUMN, (clientWidth - 20) / columns), height = Math.max(leaves * ROW, clientHeight - 30);
  svg.setAttribute('width', columns * step + 20);
  svg.setAttribute('height', height + 24);
  const at = (n) => [12 + depths[n] * step, 16 + (rows[n] + 0.5) * (height / leaves)];
  const put = (tag, attributes, n) => {
    const node = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (accepted.has(n)) node.setAttribute('class', 'accepted');
    svg.append(node);
    return node;
  };
  parents.forEach((parent, n) => {
    if (parent < 0) return;
    const [x0, y0] = at(parent), [x1, y1] = at(n), middle = (x0 + x1) / 2;
    put('path', { d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}` }, n);
  });
  texts.forEach((text, n) => {
    const [cx, cy] = at(n);
    put('circle', { cx, cy, r: 4 }, n);
    const words = put('text', { x: cx - 4, y: cy - 8 }, n);
    words.textContent = short(text.replace(/\n/g, '↵').replace(/ /g, '·'), Math.floor((step - 6) / CHARACTER));
  });
  svg.parentElement.scrollTop = at(0)[1] - clientHeight / 2;
}

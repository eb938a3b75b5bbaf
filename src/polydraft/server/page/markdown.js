// Markdown as DOM nodes, and each character as its token's span: no markup is ever made of what a model writes.
// `marked` finds the structure; every piece has its place in the source, and so the tokens that wrote it.

import { Lexer } from './vendor/marked.js';

const element = (tag, kind) => { const e = document.createElement(tag); if (kind) e.className = kind; return e; };
const MARKS = { strong: 'strong', em: 'em', del: 's' };

// tokens: of the answer, each { start, end, span } where span() makes an empty node for a piece of it.
export function render(text, tokens) {
  const page = document.createDocumentFragment(), pieces = coloured(text, tokens);
  blocks(page, Lexer.lex(text), { at: 0, text, pieces });
  return page;
}

// The text from `start` to `end`, a span for each token of it.
export function coloured(text, tokens) {
  return (on, start, end) => {
    let low = 0, high = tokens.length;
    while (low < high) { const middle = (low + high) >> 1; if (tokens[middle].end <= start) low = middle + 1; else high = middle; }
    for (let at = start; at < end; low++) {
      const token = tokens[low], until = Math.min(token?.end ?? end, end), span = token?.span() ?? element('span');
      span.textContent = text.slice(at, until);
      on.append(span);
      at = until;
    }
  };
}

// The characters of `words`, which stand somewhere behind the place, line by line where the source indents them; what it does not have gets no tokens.
function write(on, words, place) {
  const start = place.text.indexOf(words, place.at);
  if (start < 0 && words.includes('\n')) { words.split(/(?<=\n)/).forEach((line) => write(on, line, place)); return; }
  if (start < 0 || !words) { on.append(words); return; }
  place.pieces(on, start, start + words.length);
  place.at = start + words.length;
}

function blocks(on, parts, place) {
  for (const part of parts) {
    const begin = place.text.indexOf(part.raw, place.at), end = begin < 0 ? place.at : begin + part.raw.length;
    if (begin >= 0) place.at = begin;
    block(on, part, place);
    place.at = Math.max(place.at, end);
  }
}

function block(on, part, place) {
  if (part.type === 'space' || part.type === 'def') return;
  if (part.type === 'code') { on.append(code(part, place)); return; }
  if (part.type === 'hr') { on.append(element('hr')); return; }
  if (part.type === 'list') { on.append(list(part, place)); return; }
  if (part.type === 'table') { on.append(table(part, place)); return; }
  const tag = { heading: `h${Math.min((part.depth ?? 1) + 2, 6)}`, paragraph: 'p', blockquote: 'blockquote' }[part.type];
  const box = tag ? element(tag) : on;
  if (part.type === 'blockquote') blocks(box, part.tokens, place);
  else if (part.tokens) inline(box, part.tokens, place);
  else write(box, part.raw, place);
  if (tag) on.append(box);
}

function code(part, place) {
  const box = element('figure', 'code'), head = element('figcaption'), copy = element('button'), body = element('pre');
  head.append(part.lang || 'text');
  copy.type = 'button'; copy.textContent = 'Copy';
  copy.addEventListener('click', async () => { await navigator.clipboard?.writeText(part.text); copy.textContent = 'Copied'; });
  if (/^[`~]{3}/.test(part.raw.trimStart())) place.at += part.raw.indexOf('\n') + 1;
  write(body.appendChild(element('code')), part.text, place);
  head.append(copy); box.append(head, body);
  return box;
}

function list(part, place) {
  const box = element(part.ordered ? 'ol' : 'ul');
  if (part.ordered && part.start > 1) box.start = part.start;
  for (const item of part.items) {
    const begin = place.text.indexOf(item.raw, place.at);
    if (begin >= 0) place.at = begin;
    const line = box.appendChild(element('li'));
    if (item.task) line.append(item.checked ? '☑ ' : '☐ ');
    blocks(line, item.tokens.filter((token) => token.type !== 'checkbox'), place);
  }
  return box;
}

function table(part, place) {
  const box = element('table'), row = (cells, tag) => {
    const line = element('tr');
    for (const cell of cells) inline(line.appendChild(element(tag, cell.align ?? '')), cell.tokens, place);
    return line;
  };
  box.append(row(part.header, 'th'), ...part.rows.map((cells) => row(cells, 'td')));
  return box;
}

function inline(on, parts, place) {
  for (const part of parts) {
    if (part.type in MARKS) inline(on.appendChild(element(MARKS[part.type])), part.tokens, place);
    else if (part.type === 'codespan') write(on.appendChild(element('code')), part.text, place);
    else if (part.type === 'br') on.append(element('br'));
    else if (part.type === 'link') link(on, part, place);
    else if (part.tokens?.length) inline(on, part.tokens, place);
    else write(on, part.type === 'text' || part.type === 'escape' ? part.text : part.raw, place);
  }
}

// Links lead away only where they are web addresses, in a window of their own.
function link(on, part, place) {
  const web = /^https?:\/\//i.test(part.href), box = on.appendChild(element(web ? 'a' : 'span'));
  if (web) { box.href = part.href; box.target = '_blank'; box.rel = 'noopener noreferrer'; }
  inline(box, part.tokens, place);
}
